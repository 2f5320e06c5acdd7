"""A dry run of two steps and one query: most mistakes show in seconds, before anything is spent."""

import dataclasses
import time
from dataclasses import dataclass

from torch import Tensor, ones_like

from metasketch import checkpoints
from metasketch.checkpoints import Plan
from metasketch.errors import MismatchError
from metasketch.memory import Budget
from metasketch.queries import Queries
from metasketch.recipe import Recipe
from metasketch.run import Run
from metasketch.sizes import format_bytes, format_duration
from metasketch.state import digest
from metasketch.train import train


@dataclass(frozen=True)
class CheckReport:
    """What a dry run found. Printing it gives the summary; mistakes were raised as errors.

    Attributes:
        num_steps, num_examples, num_params: T, N and P of the whole recipe.
        unused: trainable parameters that take no part in the loss; they never move.
        state_bytes: memory of one state of the run.
        graph_bytes: memory that the graph of one step's gradient holds.
        plan: which states the whole run would keep in the given memory.
        seconds_per_step: of training.
        seconds_per_row: of one step of a replay, for one row.
        adjoint_gap: |<s, Ju> - <Jᵀs, u>| relative to its size: 0 up to rounding.
        implementations: the fastest second derivatives, by mode.
    """

    num_steps: int
    num_examples: int
    num_params: int
    unused: tuple[str, ...]
    state_bytes: int
    graph_bytes: int
    plan: Plan
    seconds_per_step: float
    seconds_per_row: float
    adjoint_gap: float
    implementations: dict[str, str]

    def __str__(self) -> str:
        per_row = self.num_steps * (self.seconds_per_row + self.plan.factor * self.seconds_per_step)
        kept = len(self.plan.kept)
        lines = [
            "The recipe trains, replays, and can be differentiated in both directions.",
            f"  run         {self.num_steps} steps, {self.num_examples} examples, "
            f"{self.num_params} trained parameters",
            f"  training    about {format_duration(self.num_steps * self.seconds_per_step)}",
            f"  one replay  about {format_duration(per_row)} for one row alone; rows that share a "
            "sweep cost less",
            f"  memory      {format_bytes(self.state_bytes)} a state, "
            f"{format_bytes(self.graph_bytes)} for the graph of a step; keeps {kept} of "
            f"{self.num_steps} states, so a replay recomputes {self.plan.factor:.2f} steps a step",
            f"  adjoint     the two modes agree to {self.adjoint_gap:.1e}",
        ]
        if self.unused:
            lines.append(f"  NOTE        never used by the loss, left alone: {list(self.unused)}")
        return "\n".join(lines)


def check(
    recipe: Recipe, queries: Queries | None = None, memory: int | float | str = "4GiB"
) -> CheckReport:
    """Train two steps twice, measure one query, and send it through both sweeps.

    Raises the error that a long run would have met at its start: a loss of the wrong form, data
    that change between reads, a module without second derivatives, too small a memory budget.

    Args:
        recipe: what is to be trained; only its first two steps are.
        queries: what is to be asked; without them a fixed direction stands in.
        memory: the budget that the whole run would get.
    """
    rates = recipe.rates
    short = dataclasses.replace(
        recipe,
        batches=list(recipe.order.batches[:2]),
        batch_size=None,
        epochs=None,
        schedule=lambda step, num_steps: rates[step],
    )
    seconds, runs = [], []
    for _ in range(2):
        start = time.perf_counter()
        runs.append(train(short, memory="2 states", progress=False))
        seconds.append((time.perf_counter() - start) / (short.num_steps + 1))
    run = runs[0]
    if digest(run.final) != digest(runs[1].final):
        raise MismatchError(
            "two trainings of the same recipe ended in different states: the loss, the model or "
            "the data depend on something besides their inputs and the seeded generators (a "
            "counter, a private generator, a nondeterministic kernel)"
        )
    bar = _fixed_direction(run) if queries is None else queries.gradients(run, [0])
    row = run.replay(bar, progress=False)
    start = time.perf_counter()
    run.replay(bar, progress=False)
    per_row = (time.perf_counter() - start) / short.num_steps
    dot = run.forward(row, progress=False)
    left = sum((bar[n].double() * dot[n].double()).sum() for n in bar)
    right = row.double().square().sum()
    gap = float(abs(left - right) / right) if float(right) > 0 else 0.0
    places = Budget.parse(memory).places(run.sizes, recipe.num_steps)
    used = set(run.step.model.layout.names)
    return CheckReport(
        num_steps=recipe.num_steps,
        num_examples=recipe.num_examples,
        num_params=run.num_params,
        unused=tuple(n for n in recipe.functional.layout.names if n not in used),
        state_bytes=run.sizes.state,
        graph_bytes=run.sizes.graph,
        plan=checkpoints.plan(recipe.num_steps, places),
        seconds_per_step=min(seconds),
        seconds_per_row=per_row,
        adjoint_gap=gap,
        implementations=run.implementations,
    )


def _fixed_direction(run: Run) -> dict[str, Tensor]:
    return {name: ones_like(value)[None] for name, value in run.state_dict().items()}
