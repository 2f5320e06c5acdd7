"""2,000 steps under 20 states: a replay takes again the steps that the plan says, and no more.

Trains a small network, replays one row, and counts: the states alive at once, and the steps taken
again. Compares with the plan's prediction, and with the textbook binomial schedule, which keeps
only the first state from sweep to sweep. Exits with 1 where a count is not as predicted.

    python benchmarks/binomial.py        # half a minute
"""

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from torch import nn

import metasketch as ms
from metasketch.checkpoints import binomial_cost
from metasketch.step import Step

NUM_STEPS, NUM_STATES = 2000, 20

BESIDES = 4
"""States alive besides those stored: visited last, stepped from, being made, and the final one."""


def optimum(length: int, places: int) -> int:
    """`binomial_cost` by dynamic programming over where to store next: the closed form's oracle."""
    lengths = np.arange(length + 1)
    fewer = lengths * (lengths - 1) // 2  # with one place
    for _ in range(places - 1):
        cost = np.zeros_like(fewer)
        for l in range(2, length + 1):
            m = lengths[1:l]
            cost[l] = (m + fewer[l - m] + cost[m]).min()
        fewer = cost
    return int(fewer[length])


@dataclass
class Alive:
    """Training states that exist now, and the most that there ever were."""

    now: int = 0
    most: int = 0

    def watch(self, state: object) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(state, self._gone)

    def _gone(self) -> None:
        self.now -= 1


@contextmanager
def counted() -> Iterator[Alive]:
    """Count every state that a step makes, and those that runs begin with."""
    alive = Alive()
    initial, advance = Step.initial, Step.advance

    def watched_initial(step: Step) -> object:
        alive.watch(state := initial(step))
        return state

    def watched_advance(step: Step, *args: object) -> object:
        alive.watch(state := advance(step, *args))
        return state

    with (
        mock.patch.object(Step, "initial", watched_initial),
        mock.patch.object(Step, "advance", watched_advance),
    ):
        yield alive


def recipe() -> ms.Recipe:
    """A network of 82 parameters on 64 examples, 4 a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.GELU(), nn.Linear(10, 2))
    x = torch.randn(64, 4)
    batches = [torch.randperm(64)[:4] for _ in range(NUM_STEPS)]
    optimizer = ms.SGD(lr=0.01, momentum=0.9)
    data = (x, (x.sum(1) > 0).long())
    return ms.Recipe(model, ms.losses.cross_entropy, data, optimizer, batches=batches)


def main() -> int:
    torch.set_num_threads(1)
    start = time.perf_counter()
    with counted() as alive:
        run = ms.train(
            recipe(), memory=f"{NUM_STATES} states", implementation="loop", progress=False
        )
        trained, most_in_training, alive.most = time.perf_counter(), alive.most, 0
        rows = run.replay(
            {name: torch.randn(1, *p.shape) for name, p in run.model().named_parameters()},
            progress=False,
        )
    replayed = time.perf_counter()
    plan, taken = run.plan, run.trajectory.recomputed
    textbook = binomial_cost(NUM_STEPS, NUM_STATES)
    print(f"T = {NUM_STEPS}, {NUM_STATES} states; metasketch {ms.__version__}")
    print(f"  plan            {len(plan.kept)} states kept for all sweeps, {plan.free} free places")
    print(f"  training        {trained - start:.1f} s, {most_in_training} states alive at most")
    print(f"  replay          {replayed - trained:.1f} s, {alive.most} states alive at most")
    print(f"  taken again     {taken} steps, {taken / NUM_STEPS:.4f} for each step")
    print(f"  predicted       {plan.recomputed} steps, {plan.factor:.4f} for each step")
    print(f"  textbook        {textbook} steps, {textbook / NUM_STEPS:.4f} for each step")
    checks = {
        "the replay is finite": bool(torch.isfinite(rows).all()),
        "steps taken again are as predicted": taken == plan.recomputed,
        f"no more than {NUM_STATES} states are stored": max(alive.most, most_in_training)
        <= NUM_STATES + BESIDES,
        "the textbook's cost is the optimum": textbook == optimum(NUM_STEPS, NUM_STATES),
        "the plan is below the textbook": plan.recomputed < textbook,
    }
    for claim, holds in checks.items():
        print(f"  {'yes' if holds else 'NO ':3}  {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
