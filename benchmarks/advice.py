"""Claim: `ms.advise` predicts captured energy within 20 %, and time within a factor of 1.5.

Four problems. For each, the advice is asked first; then its options are carried out, and compared
with exact rows: the captured energy of the whole matrix (where it is 0.1 at least), and the time.
Times are CPU time of the process, before and after, so that a neighbour who takes the core does
not count.

    python -m benchmarks.advice             # some five minutes on one core
"""

import argparse
import datetime
import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

import metasketch as ms
from benchmarks.problems import NUM_EXAMPLES, PROBLEMS, digits, mlp

BUDGETS = (5, 10, 16)
METHODS = ("mage", "spell", "pca")
QUERIES = 40
ENERGY, TIME, LEAST = 0.2, 1.5, 0.1

Problem = Callable[[], tuple[ms.Recipe, ms.Queries]]


def adam() -> tuple[ms.Recipe, ms.Queries]:
    """An MLP trained by Adam, on half of the images."""
    train, test = digits(3, NUM_EXAMPLES // 2, QUERIES)
    torch.manual_seed(3)
    recipe = ms.Recipe(
        model=mlp(24),
        loss=ms.losses.cross_entropy,
        data=train,
        optimizer=ms.Adam(lr=0.003, eps_root=1e-8),
        schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
        batch_size=50,
        epochs=12,
    )
    return recipe, ms.Queries(test, ms.losses.cross_entropy)


FOUR: dict[str, Problem] = {
    "easy": lambda: PROBLEMS["easy"](k=QUERIES),
    "adam": adam,
    "cnn": lambda: PROBLEMS["cnn"](k=QUERIES),
    "hard": lambda: PROBLEMS["hard"](k=QUERIES),
}


def carried_out(name: str) -> list[tuple[str, int, float, float, float, float]]:
    """(method, B, predicted energy, reached, predicted seconds, taken) of each option."""
    recipe, queries = FOUR[name]()
    run = ms.train(recipe, progress=False)
    advice = ms.advise(run, queries, budgets=BUDGETS, clock=time.process_time, progress=False)
    Y = ms.attribute(run, queries, "exact", progress=False).dense()
    found = []
    for option in advice.options:
        if option.method not in METHODS:
            continue
        start = time.process_time()
        result = ms.attribute(run, queries, option.method, option.budget, progress=False)
        taken = time.process_time() - start
        reached = float(1 - np.square(Y - result.dense()).sum() / np.square(Y).sum())
        row = (option.method, option.budget, option.outcome.total, reached)
        found.append((*row, option.plan.seconds, taken))
    return found


def main() -> int:
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    torch.set_num_threads(1)
    print(
        f"{datetime.date.today()}, metasketch {ms.__version__}, torch {torch.__version__}, "
        f"{platform.machine()}, {os.cpu_count()} cores; k = {QUERIES}, CPU time\n"
    )
    print("| problem | method | B | energy predicted | reached | off | seconds | taken | factor |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    energy, factors = [], []
    for name in FOUR:
        for method, B, predicted, reached, seconds, taken in carried_out(name):
            off, factor = predicted / reached - 1, seconds / taken
            if reached >= LEAST:
                energy.append(abs(off) <= ENERGY)
            factors.append(1 / TIME <= factor <= TIME)
            print(
                f"| {name} | {method} | {B} | {predicted:.3f} | {reached:.3f} | {off:+.0%} | "
                f"{seconds:.2f} | {taken:.2f} | {factor:.2f} |",
                flush=True,
            )
    print(
        f"\n{sum(energy)} of {len(energy)} energies are within {ENERGY:.0%}, "
        f"{sum(factors)} of {len(factors)} times within a factor of {TIME}"
    )
    return 0 if all(energy) and all(factors) else 1


if __name__ == "__main__":
    raise SystemExit(main())
