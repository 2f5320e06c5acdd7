"""The cost model: time, memory and disk of an attribution, before it is begun.

    seconds = outputs + gradients of the queries + Gram matrix + blocks of sweeps

Blocks are those that `attribute` would cut, and are handed out as it hands them out: see
`metasketch.sketch`. How long each takes is measured (`metasketch.speeds`); how much memory a sweep
takes is what `metasketch.memory` says.
"""

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from metasketch.attribute import spend
from metasketch.attribution_store import Block
from metasketch.errors import ArgumentError
from metasketch.gradient import VMAPPED
from metasketch.measured import Paired, Replayed
from metasketch.memory import block_size
from metasketch.methods import Method, make
from metasketch.queries import Queries
from metasketch.query_gradients import QueryGradients
from metasketch.run import Run
from metasketch.sizes import format_bytes, format_duration, parse_bytes
from metasketch.sketch import Rounds, open_blocks, rounds
from metasketch.speeds import Clock, Speeds

Seconds = Callable[[Block], float]


@dataclass(frozen=True)
class JobPlan:
    """What an attribution would cost. Printing it gives the summary.

    Attributes:
        method, budget: of the job; "exact" where the budget exceeds the queries.
        workers: processes that would share its store.
        sweeps: rows to be swept in each direction, at most.
        blocks: rows of each block of replays.
        seconds: until it is finished.
        parts: seconds of its parts, added up over workers.
        memory: bytes that one worker holds at most, the run's states among them.
        disk: bytes of the job's store.
        run_disk: bytes of the run's own store, where it has one.
    """

    method: str
    budget: int
    workers: int
    sweeps: Mapping[str, int]
    blocks: tuple[int, ...]
    seconds: float
    parts: Mapping[str, float]
    memory: int
    disk: int
    run_disk: int

    def __str__(self) -> str:
        cut = f"{len(self.blocks)} blocks of at most {max(self.blocks)} rows"
        spent = ", ".join(f"{name} {format_duration(s)}" for name, s in self.parts.items() if s)
        swept = ", ".join(f"{count} {name}" for name, count in self.sweeps.items() if count)
        by = "" if self.workers == 1 else f" by {self.workers} workers with a core each"
        return "\n".join(
            (
                f"{self.method}, budget {self.budget}: about {format_duration(self.seconds)}{by}",
                f"  sweeps   {swept}, in {cut}",
                f"  time     {spent}",
                f"  memory   {format_bytes(self.memory)} in each process, beside the data",
                f"  disk     {format_bytes(self.disk)} where it has a store"
                + (f", and {format_bytes(self.run_disk)} of the run's" if self.run_disk else ""),
            )
        )


def plan(
    run: Run,
    queries: Queries,
    method: str = "spell",
    budget: int | None = None,
    workers: int = 1,
    *,
    audit: int = 0,
    memory: int | float | str = "4GiB",
    block: int | None = None,
    clock: Clock = time.perf_counter,
    **options: Any,
) -> JobPlan:
    """Predict time, memory and disk of `metasketch.attribute` with the same arguments.

    Args:
        run, queries, method, budget, audit, memory, block, options: as for `attribute`.
        workers: processes that share the job's store, each with a core (or device) of its own.
        clock: reads seconds; ``time.process_time`` leaves out what others take of a shared core.

    Returns:
        The prediction. Cost: some steps of each kind that the job takes, and four gradients of
        queries.
    """
    with run.computing():
        V = QueryGradients(queries.of(run), parse_bytes(memory, "memory"))
    job = (make(method, **options), budget, workers, audit, block)
    return planned(Speeds(run, V, clock), *job)


def planned(
    speeds: Speeds,
    method: Method,
    budget: int | None,
    workers: int = 1,
    audit: int = 0,
    block: int | None = None,
) -> JobPlan:
    """The same from speeds, which are measured only where they are not known yet."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ArgumentError(f"workers={workers!r}: a whole number of at least 1")
    if method.prior:
        raise ArgumentError(
            f"method={method.name!r}: the cost of its surrogates is not predicted yet; plan a "
            'method without them, such as "mage", which takes as many sweeps for a budget'
        )
    run, V = speeds.run, speeds.V
    method.rule.check(V.num_queries)
    method, B, _ = spend(method, budget, V.num_queries)
    fixed, pairs = method.rule.fixed(B), method.estimator.pairs
    most = run.most_rows if block is None else block
    cut = rounds(0, B, fixed, most, method.rule.per_round)

    def seconds_of(part: Block) -> float:
        start, stop = cut[part.number]
        b = stop - start
        if part.kind == "forward":
            return speeds.sweep("forward", b) + speeds.pair(b)
        seen = start if stop > fixed else 0
        chosen = speeds.choosing(method.rule, seen, b)
        return chosen + speeds.combine(b) + speeds.sweep("replay", b)

    of_queries = speeds.values() + _gradients(speeds, method)
    of_audit = _audit(speeds, audit) if audit else 0.0
    parts = {
        "queries": of_queries,
        "replays": sum(seconds_of(Block("replay", i)) for i in range(len(cut))),
        "forward passes": sum(seconds_of(Block("forward", i)) for i in range(len(cut)) if pairs),
        "audit": of_audit,
    }
    sweeps = makespan(cut, fixed, pairs, seconds_of, workers)
    widths = tuple(stop - start for start, stop in cut)
    return JobPlan(
        method=method.name,
        budget=B,
        workers=workers,
        sweeps={"replay": B, "forward": B if pairs else 0, "audit": audit},
        blocks=widths,
        seconds=of_queries + sweeps + of_audit,
        parts=parts,
        memory=_memory(run, V, method, widths, audit),
        disk=_stored(run, V, method, widths, audit),
        run_disk=_run_disk(run),
    )


def _gradients(speeds: Speeds, method: Method) -> float:
    """Of the queries' gradients, held or for the Gram matrix, and of its products."""
    V, uses_gram = speeds.V, method.rule.uses_gram
    count = V.num_gradients() if V.held or uses_gram else 0
    return count * speeds.gradient() + (speeds.products(V.num_queries) if uses_gram else 0.0)


def _audit(speeds: Speeds, sweeps: int) -> float:
    """Of an audit, in as many blocks as memory needs."""
    b = block_size(sweeps, speeds.run.most_rows)
    return -(-sweeps // b) * speeds.sweep("forward", b) + speeds.pair(sweeps)


def makespan(cut: Rounds, fixed: int, pairs: bool, seconds_of: Seconds, workers: int) -> float:
    """Seconds until the last block is finished, when workers take the blocks that are open.

    >>> makespan([(0, 2), (2, 4)], 4, True, lambda block: 1.0, workers=1)
    4.0
    >>> makespan([(0, 2), (2, 4)], 4, True, lambda block: 1.0, workers=2)
    2.0
    >>> makespan([(0, 1), (1, 2)], 0, True, lambda block: 1.0, workers=2)
    4.0
    """
    done: set[Block] = set()
    taken: set[Block] = set()
    running: list[tuple[float, Block]] = []
    now = 0.0
    while True:
        numbers = {k: {b.number for b in done if b.kind == k} for k in ("replay", "forward")}
        waiting = open_blocks(cut, fixed, pairs, numbers["replay"], numbers["forward"])
        for block in [b for b in waiting if b not in taken][: workers - len(running)]:
            taken.add(block)
            heapq.heappush(running, (now + seconds_of(block), block))
        if not running:
            return now
        now, finished = heapq.heappop(running)
        done.add(finished)


def _memory(
    run: Run, V: QueryGradients, method: Method, widths: tuple[int, ...], audit: int
) -> int:
    """Bytes: the run with its largest sweep, the queries' gradients, and what was measured."""
    sweeps = 0
    for mode in ("replay", "forward"):
        for b in {*widths, audit} - {0}:
            vmapped = run.how(mode, b) in VMAPPED
            rows = min(b, run.most_rows)
            sweeps = max(sweeps, run.sizes.sweep(rows, vmapped, run.plan))
    gradients = V.whole if V.held else (V.memory or 0) if method.rule.uses_gram else 0
    return sweeps + gradients + _stored(run, V, method, widths, audit)


def _stored(
    run: Run, V: QueryGradients, method: Method, widths: tuple[int, ...], audit: int
) -> int:
    """Bytes of G and of every block."""
    K, N, like = V.num_queries, run.num_examples, run.final.params
    total = _empty(K, K).nbytes if method.rule.uses_gram else 0
    for b in widths:
        U = torch.empty(b, N, dtype=like.dtype, device="meta")
        total += Replayed(_empty(K, b), U, _empty(b)).nbytes
    for b in [*(widths if method.estimator.pairs else ()), *([audit] if audit else ())]:
        total += Paired(_empty(b, N), _empty(K, b), ()).nbytes
    return total


def _empty(*shape: int) -> torch.Tensor:
    """A tensor that has a size and no content."""
    return torch.empty(*shape, dtype=torch.float64, device="meta")


def _run_disk(run: Run) -> int:
    """Bytes of the states in a run's store, the last one among them."""
    trajectory = run.trajectory
    return 0 if trajectory.store is None else (len(trajectory.saved) + 1) * run.sizes.state
