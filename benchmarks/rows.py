"""Cost of exact rows of influence, in units of one step of a bare torch training loop.

A row through T steps costs T (1 + r + 2b) / b gradients at least, where b rows share a sweep and
the sweep recomputes r T states. The table shows, for each step of the run, what one row cost in
whole calls of `Run.replay` and `Run.forward`, and that floor. The unit is a step of the same
training as torch users write it (benchmarks/models.py), optimiser included, measured in between.

    python benchmarks/rows.py                             # some ten minutes on one core
    python benchmarks/rows.py --models mlp --rows 1 64 --steps 20
    python benchmarks/rows.py --memory                    # the peak of memory against the budget

Each figure is the least of --repeats; the spread is how far the worst was above it. With one
thread, time is CPU time of the process, so that a neighbour who takes the core does not count.
Ratios hold within one run of this script only.
"""

import argparse
import ctypes
import datetime
import gc
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import ceil, isqrt
from pathlib import Path
from typing import Any

import torch
from memory_use import high_water, resident, restart
from models import PROBLEMS, Problem
from torch import Tensor, nn

import metasketch as ms
from metasketch import choose
from metasketch.memory import block_size
from metasketch.sizes import format_bytes, parse_bytes

EVERYTHING = "16GiB"
BARE_SECONDS = 0.3
TRAIN_SECONDS = 2.0
"""Of bare training: what `ms.train` does once, before the first step, is spread over these."""
BUDGETS = ("2GiB", "600MiB", "300MiB")
MEMORY_STEPS, MEMORY_ROWS = 12, 16

Clock = Callable[[], float]


@dataclass(frozen=True)
class Record:
    """One thing measured.

    Attributes:
        what: "bare", "train", "replay" or "forward".
        states: how many of the run's states are kept ("" where it does not matter).
        rows: b.
        recomputed: r, the steps that the sweep took again for each step of the run.
        how: the implementation of the second derivatives.
        seconds: for each step and row, of each repeat.
    """

    model: str
    what: str
    states: str
    rows: int
    recomputed: float
    how: str
    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        return max(self.seconds) / self.best - 1

    @property
    def floor(self) -> float:
        """(1 + r + 2b) / b"""
        return (1 + self.recomputed + 2 * self.rows) / self.rows


def cotangents(model: nn.Module, b: int) -> dict[str, Tensor]:
    """Random rows to replay, (b, *shape) by name."""
    return {name: torch.randn(b, *p.shape) for name, p in model.named_parameters()}


def sweeps(run: ms.Run, b: int) -> dict[str, Callable[[], object]]:
    """A whole call of each mode, with b rows in one block."""
    theta_bar = cotangents(run.model(), b)
    w_dot = torch.randn(b, run.num_examples)
    return {
        "replay": lambda: run.replay(theta_bar, block=b, progress=False),
        "forward": lambda: run.forward(w_dot, block=b, progress=False),
    }


def check_same_training(problem: Problem, clock: Clock) -> None:
    """The bare loop and metasketch train the same model, up to rounding."""

    def flat(model: nn.Module) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    recipe = problem.recipe(4)
    bare = flat(problem.bare(4, clock)[1])
    ours = flat(ms.train(recipe, progress=False).model())
    moved = torch.linalg.vector_norm(bare - flat(recipe.model))
    gap = float(torch.linalg.vector_norm(bare - ours) / moved)
    if not gap < 1e-3:
        raise SystemExit(f"{problem.name}: the bare loop trains another model, gap {gap:.1e}")


def chosen(problem: Problem, rows: list[int]) -> ms.Run:
    """A short run that has chosen its implementations for these rows, outside the timings."""
    run = ms.train(problem.recipe(2), memory=EVERYTHING, progress=False)
    for b in rows:
        for sweep in sweeps(run, b).values():
            sweep()
    return run


def measure(
    problem: Problem, rows: list[int], steps: dict[str, int], repeats: int, clock: Clock
) -> tuple[list[Record], ms.Run]:
    """Everything about one model, bare loops in between."""
    check_same_training(problem, clock)
    choice = chosen(problem, rows)
    runs: dict[str, ms.Run] = {}
    for memory, num_steps in steps.items():
        run = ms.train(problem.recipe(num_steps), memory=memory, progress=False)
        run.implementations.update(choice.implementations)
        runs[f"{len(run.plan.kept) + run.plan.free} of {num_steps}"] = run
    bare_step = problem.bare(4, clock)[0]
    bare_steps, train_steps = ceil(BARE_SECONDS / bare_step), ceil(TRAIN_SECONDS / bare_step)
    train_recipe = problem.recipe(train_steps)
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    recomputed: dict[tuple[str, str, int], float] = defaultdict(float)
    for _ in range(repeats):
        start = clock()
        ms.train(train_recipe, memory="2 states", progress=False)
        seconds["train", "", 1].append((clock() - start) / train_steps)
        for states, run in runs.items():
            for b in rows:
                for what, sweep in sweeps(run, b).items():
                    seconds["bare", "", 1].append(problem.bare(bare_steps, clock)[0])
                    before, start = run.trajectory.recomputed, clock()
                    sweep()
                    took = clock() - start
                    key = (what, states, b)
                    seconds[key].append(took / run.num_steps / b)
                    recomputed[key] = (run.trajectory.recomputed - before) / run.num_steps
                    print(f"{problem.name} {what} {states} b={b}: {took:.1f} s", file=sys.stderr)
    records = [
        Record(
            problem.name,
            what,
            states,
            b,
            recomputed[what, states, b],
            choice.implementations.get(f"{what} b={min(b, 4)}", ""),
            tuple(times),
        )
        for (what, states, b), times in seconds.items()
    ]
    return records, choice


def table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table with aligned columns, the first to the left and the rest to the right."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]

    def row(cells: list[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([row(header), row(rule), *map(row, lines)])


def of(records: list[Record], what: str) -> list[Record]:
    return [record for record in records if record.what == what]


def training_line(problem: Problem, records: list[Record], run: ms.Run) -> list[str]:
    (bare,), (train,) = of(records, "bare"), of(records, "train")
    return [
        problem.name,
        f"{run.num_params / 1e6:.2f} M",
        str(problem.batch_size),
        f"{1000 * bare.best:.2f} ms",
        f"{100 * bare.spread:.0f}%",
        f"{train.best / bare.best:.2f}",
        f"{100 * train.spread:.0f}%",
        format_bytes(run.sizes.state),
        format_bytes(run.sizes.graph),
    ]


TRAINING = ["model", "params", "batch", "bare step", "spread", "ms.train", "spread"]
TRAINING += ["state", "graph"]


def row_lines(records: list[Record]) -> list[list[str]]:
    """One line for each sweep and plan, with a cell 'cost / floor how' for each b."""
    (bare,) = of(records, "bare")
    grouped: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in of(records, "replay") + of(records, "forward"):
        grouped[record.what, record.states].append(record)
    return [
        [
            f"{bare.model} {what}",
            states,
            f"{group[0].recomputed:.2f}",
            *(f"{r.best / bare.best:.2f} / {r.floor:.2f} {r.how:>7}" for r in group),
            f"{100 * max(r.spread for r in group):.0f}%",
        ]
        for (what, states), group in grouped.items()
    ]


def choice_lines(problem: Problem, records: list[Record], run: ms.Run) -> list[list[str]]:
    """What each implementation took for one step when the library measured them, in bare steps."""
    (bare,) = of(records, "bare")

    def cell(timing: choose.Timing, how: str) -> str:
        if how in timing.seconds:
            return f"{timing.seconds[how] / bare.best:.2f}"
        return "fails" if how in timing.failures else ""

    return [
        [
            f"{problem.name} {key}",
            *(cell(timing, how) for how in choose.names()),
            run.implementations[key],
        ]
        for key, timing in run.timings.items()
    ]


def failure_lines(problem: Problem, run: ms.Run) -> list[str]:
    """Why implementations fail, each reason once."""
    failures = {pair for timing in run.timings.values() for pair in timing.failures.items()}
    return [f"\n{problem.name}: {how} fails: {why}" for how, why in sorted(failures)]


def peak_memory(name: str, budget: str, threads: int, answer: Any) -> None:
    """In a fresh process: train and replay under a budget, and send the peak above the start."""
    torch.set_num_threads(threads)
    problem = PROBLEMS[name]
    for how in choose.names():  # what torch loads and compiles at first use does not count
        warm = ms.train(problem.recipe(1), implementation=how, progress=False)
        warm.replay(cotangents(warm.model(), 1), progress=False)
    del warm
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # nor may the runs below use what these have left
    recipe = problem.recipe(MEMORY_STEPS)
    theta_bar = cotangents(recipe.model, MEMORY_ROWS)
    before = resident()
    restart()
    try:
        run = ms.train(recipe, memory=budget, progress=False)
    except ms.MemoryBudgetError:
        answer.put(None)
        return
    trained = high_water()
    run.replay(theta_bar, progress=False)
    block = block_size(MEMORY_ROWS, run.most_rows)
    answer.put(
        {
            "model": name,
            "budget": parse_bytes(budget, "budget"),
            "states": len(run.plan.kept) + run.plan.free,
            "recomputed": run.plan.factor,
            "block": block,
            "train": trained - before,
            "peak": high_water() - before,
            "how": ", ".join(sorted(set(run.implementations.values()))),
        }
    )


def memory_records(models: list[str], threads: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    found = []
    for name in models:
        for budget in BUDGETS:
            print(f"{name} in {budget}", file=sys.stderr)
            answer = context.SimpleQueue()
            process = context.Process(target=peak_memory, args=(name, budget, threads, answer))
            process.start()
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"{name} in {budget}: the process failed")
            if (record := answer.get()) is not None:
                found.append(record)
    return found


def memory_line(record: dict[str, Any]) -> list[str]:
    return [
        record["model"],
        format_bytes(record["budget"]),
        f"{record['states']} of {MEMORY_STEPS}",
        f"{record['recomputed']:.2f}",
        str(record["block"]),
        record["how"],
        format_bytes(record["train"]),
        format_bytes(record["peak"]),
        f"{record['peak'] / record['budget']:.2f}",
    ]


MEMORY = ["model", "budget", "states", "r", "block", "chosen", "peak in training", "peak in all"]
MEMORY += ["peak / budget"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16], help="b")
    parser.add_argument("--steps", type=int, help="T where every state is kept")
    parser.add_argument("--level-steps", type=int, help="T with one level of checkpoints")
    parser.add_argument("--states", type=int, help="states of that one; by default √T + 1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="measure the peak of memory instead")
    parser.add_argument("--json", type=Path, help="write the records to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    setting = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "metasketch": ms.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": args.threads,
        "repeats": args.repeats,
    }
    print(", ".join(f"{key} {value}" for key, value in setting.items()), end="\n\n")
    records: list[Any] = []
    if args.memory:
        records = memory_records(args.models, args.threads)
        print(table(MEMORY, [memory_line(record) for record in records]))
    else:
        training, rows, choices, failures = [], [], [], []
        for problem in (PROBLEMS[name] for name in args.models):
            level_steps = args.level_steps or 2 * problem.steps
            states = args.states or isqrt(level_steps) + 1
            steps = {EVERYTHING: args.steps or problem.steps, f"{states} states": level_steps}
            found, run = measure(problem, args.rows, steps, args.repeats, clock)
            training.append(training_line(problem, found, run))
            rows += row_lines(found)
            choices += choice_lines(problem, found, run)
            failures += failure_lines(problem, run)
            records += [asdict(record) for record in found]
        print(table(TRAINING, training), end="\n\n")
        print("Cost of a row for each step of the run / floor, in bare steps:\n")
        print(table(["sweep", "states", "r", *(f"b = {b}" for b in args.rows), "spread"], rows))
        print("\nOne step with at most 4 rows, as the library measured it to choose:\n")
        print(table(["choice", *choose.names(), "chosen"], choices))
        print(*failures, sep="\n")
    if args.json:
        args.json.write_text(json.dumps({"setting": setting, "records": records}, indent=1))


if __name__ == "__main__":
    main()
