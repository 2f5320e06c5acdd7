"""Train, keep what the sweeps need, and take a run up again from its store."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from metasketch import checkpoints
from metasketch.errors import ArgumentError, MemoryBudgetError, StoreError
from metasketch.gradient import IMPLEMENTATIONS
from metasketch.memory import Budget, Sizes, disk_places
from metasketch.probe import probe
from metasketch.progress import drive
from metasketch.recipe import Recipe, weights_of
from metasketch.run import Run, computing_as, facts_of
from metasketch.state import State
from metasketch.step import Step
from metasketch.store import RunStore, differences
from metasketch.trajectory import Trajectory
from metasketch.verdict import Verdict
from metasketch.version import __version__


@dataclass(frozen=True)
class Choices:
    """What was decided for a run when it began. A store records it, and it is obeyed afterwards:
    most of it changes rounding.

    Attributes:
        num_threads: threads of training and sweeps.
        used: parameters that take part in the loss, in the order of the flat state.
        fused: training uses torch's fused attention.
        graph_bytes: memory of the graph of one microbatch's gradient.
        most_rows: rows of the largest block.
        implementation: of the second derivatives, or "auto".
        saved: steps whose state is in the store.
    """

    num_threads: int
    used: tuple[str, ...]
    fused: bool
    graph_bytes: int
    most_rows: int
    implementation: str
    saved: tuple[int, ...]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Choices":
        given = dict(record["choices"])
        return cls(**{**given, "used": tuple(given["used"]), "saved": tuple(given["saved"])})

    def step(self, recipe: Recipe) -> Step:
        return Step.of(recipe, self.used, self.fused)

    def sizes(self, step: Step) -> Sizes:
        state = step.initial()
        item = state.params.element_size()
        return Sizes(
            state=state.nbytes,
            params=state.params.numel() * item,
            graph=self.graph_bytes,
            examples=step.recipe.num_examples * item,
        )


def train(
    recipe: Recipe,
    weights: Any = None,
    memory: int | float | str = "4GiB",
    store: str | os.PathLike[str] | None = None,
    disk: int | float | str | None = None,
    implementation: str = "auto",
    progress: bool | None = None,
) -> Run:
    """Train a recipe at given data weights, keeping what its sweeps will need.

    Args:
        weights: w, (N,), finite and not negative; ones by default. 0 removes an example: its loss
            no longer counts, everything else (order, batch sizes, dropout, BatchNorm) is as before.
        memory: budget for the states kept, and for the sweeps to come: a size such as ``"4GiB"``,
            or ``"20 states"``. Where not every state fits, some are recomputed in each sweep.
        store: a folder that keeps the run. The same call resumes an interrupted training there,
            and returns a finished one without training.
        disk: budget for the states in the store; by default about √T of them.
        implementation: of the second derivatives: "loop", "tuned", "batched", "forward"; "auto"
            measures which is fastest.
        progress: show a bar; by default on a terminal.

    Returns:
        The finished run. Cost: 1, in units of training; deterministic, bit for bit, on one
        machine with one number of threads.
    """
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"implementation={implementation!r}: choose one of {list(IMPLEMENTATIONS)} or 'auto'"
        )
    budget = Budget.parse(memory)
    folder = None if store is None else RunStore(store)
    if folder is None and disk is not None:
        raise MemoryBudgetError("disk=... needs a folder to write to: give store=... too")
    if folder is not None and folder.final.exists():
        return _load(recipe, folder, weights, budget, implementation)
    record = None
    if folder is not None and folder.record.exists():
        record = folder.read_record()
    num_threads = torch.get_num_threads() if record is None else Choices.of(record).num_threads
    with computing_as(recipe, num_threads):
        w = weights_of(recipe, weights)
        if record is None:
            first = probe(recipe, w)
            used = Step.of(recipe, first.used).model.layout.names
            choices = Choices(
                num_threads, used, first.fused, first.graph_bytes, 0, implementation, ()
            )
        else:
            assert folder is not None
            _check_same(folder, record, recipe, w)
            choices = _with_implementation(Choices.of(record), implementation)
        step = choices.step(recipe)
        sizes = choices.sizes(step)
        places = budget.places(sizes, recipe.num_steps)
        if record is not None:
            plan = checkpoints.plan_with(recipe.num_steps, places, choices.saved)
        else:
            on_disk = 0 if folder is None else disk_places(disk, sizes, recipe.num_steps)
            plan = checkpoints.plan(recipe.num_steps, places, on_disk)
            saved = tuple(sorted(plan.on_disk)) or checkpoints.evenly(recipe.num_steps, on_disk)
            choices = replace(choices, saved=saved, most_rows=budget.rows(sizes, plan))
        trajectory = Trajectory(step, w, plan, folder, frozenset(choices.saved))
        if folder is None:
            final = drive(trajectory.record(step.initial()), recipe.num_steps, "training", progress)
            return _run(trajectory, final, budget, sizes, choices)
        with folder.locked():
            start, state = 0, step.initial()
            if record is None:
                _write_record(folder, recipe, trajectory, choices)
            else:
                start, state = _resume(trajectory, folder) or (start, state)
            remaining = recipe.num_steps - start
            final = drive(trajectory.record(state, start), remaining, "training", progress)
        return _run(trajectory, final, budget, sizes, choices)


def load_run(
    recipe: Recipe,
    store: str | os.PathLike[str],
    memory: int | float | str = "4GiB",
    weights: Any = None,
) -> Run:
    """A stored run, verified against the recipe.

    The recipe is compared fact by fact, the first step is taken again, and every state that a sweep
    recomputes is compared with its digest.

    Args:
        recipe: the recipe that was trained.
        store: the folder that `train` was given.
        memory: budget for the sweeps to come.
        weights: the data weights of the run; ones by default.
    """
    folder = RunStore(store)
    folder.read_record()
    if not folder.final.exists():
        raise StoreError(
            f"the run in {Path(store)} is not finished: call train(recipe, store=...) to go on"
        )
    return _load(recipe, folder, weights, Budget.parse(memory), "auto")


def _load(
    recipe: Recipe, folder: RunStore, weights: Any, budget: Budget, implementation: str
) -> Run:
    record = folder.read_record()
    choices = _with_implementation(Choices.of(record), implementation)
    with computing_as(recipe, choices.num_threads):
        w = weights_of(recipe, weights)
        _check_same(folder, record, recipe, w)
        step = choices.step(recipe)
        sizes = choices.sizes(step)
        places = budget.places(sizes, recipe.num_steps)
        plan = checkpoints.plan_with(recipe.num_steps, places, choices.saved)
        trajectory = Trajectory(step, w, plan, folder, frozenset(choices.saved))
        for t in choices.saved:
            _, notes = folder.read_state(folder.state_path(t), w.device)
            _note(trajectory, notes)
        final, notes = folder.read_state(folder.final, w.device)
        _note(trajectory, notes)
        trajectory.verify_first_step()
        run = _run(trajectory, final, budget, sizes, choices)
        run.verdict = Verdict.of(record.get("verdict"))
        if choices.implementation == Choices.of(record).implementation:
            run.implementations = dict(record["implementations"])
    return run


def _run(
    trajectory: Trajectory, final: State, budget: Budget, sizes: Sizes, choices: Choices
) -> Run:
    return Run(
        recipe=trajectory.step.recipe,
        trajectory=trajectory,
        final=final,
        budget=budget,
        sizes=sizes,
        num_threads=choices.num_threads,
        most_rows=min(choices.most_rows, budget.rows(sizes, trajectory.plan)),
        implementation=choices.implementation,
    )


def _with_implementation(choices: Choices, implementation: str) -> Choices:
    """A name that is given anew goes before the recorded one."""
    if implementation == "auto":
        return choices
    return replace(choices, implementation=implementation)


def _write_record(
    store: RunStore, recipe: Recipe, trajectory: Trajectory, choices: Choices
) -> None:
    record = {
        "metasketch": __version__,
        "torch": torch.__version__,
        "facts": facts_of(recipe, trajectory.w),
        "choices": asdict(choices),
        "implementations": {},
    }
    store.write_record(record)


def _resume(trajectory: Trajectory, store: RunStore) -> tuple[int, State] | None:
    """The last state from which training can go on, with the digests up to there."""
    found: tuple[int, State] | None = None
    for t in sorted(trajectory.saved):
        try:
            state, notes = store.read_state(store.state_path(t), trajectory.w.device)
        except StoreError:
            break
        if notes.get("since") != (0 if found is None else found[0]):
            break
        _note(trajectory, notes)
        if t in trajectory.plan.kept and t not in trajectory.plan.on_disk:
            trajectory.memory[t] = state
        found = (t, state)
    if found is not None and found[0] > 0:
        trajectory.verify_first_step()
    return found


def _note(trajectory: Trajectory, notes: Mapping[str, Any]) -> None:
    """Append the digests that a stored state carries (its first one is known already)."""
    known = 1 if trajectory.digests else 0
    trajectory.digests += [int(d, 16) for d in notes["digests"][known:]]
    trajectory.batch_digests += [int(d, 16) for d in notes["batches"]]


def _check_same(
    store: RunStore, record: Mapping[str, Any], recipe: Recipe, w: torch.Tensor
) -> None:
    differing = differences(record["facts"], facts_of(recipe, w))
    if differing:
        raise StoreError(
            f"the store {store.folder} holds another run; it differs in: {'; '.join(differing)}. "
            "Give another folder, or the recipe that was stored"
        )
