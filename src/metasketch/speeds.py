"""How fast the parts of a job are on this machine: each is done once or a few times, and timed.

Nothing is timed before it is asked for, and nothing twice. What takes time only once (choosing an
implementation, the first call of a kernel) is done before the clock starts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from metasketch.environment import synchronize
from metasketch.measured import Measured, Paired, Replayed
from metasketch.prior import surrogate
from metasketch.probes import Rule
from metasketch.progress import exhaust
from metasketch.query_gradients import QueryGradients
from metasketch.run import Run
from metasketch.state import State, digest

Clock = Callable[[], float]

_REPEATS = 3
_SLICE = 1 << 16
"""Columns of V with which products of held gradients are timed."""


@dataclass
class Speeds:
    """Seconds that the parts of a job take.

    Attributes:
        run: whose steps are timed.
        V: the queries' gradients, with the memory that they would get.
        clock: reads the time in seconds.
    """

    run: Run
    V: QueryGradients
    clock: Clock = time.perf_counter
    _known: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)

    def sweep(self, mode: str, rows: int) -> float:
        """Of one sweep with a block of so many rows.

            T (one step of the block) + (steps taken again) (one step of training)

        Cost to measure: 4 (2 + 2b) steps.
        """
        plan, T = self.run.plan, self.run.num_steps
        again = plan.recomputed if mode == "replay" else plan.recomputed_forward
        retaken = again * self.advance() if again else 0.0
        return T * self._once((mode, rows), lambda: self._timed_sweep(mode, rows)) + retaken

    def advance(self) -> float:
        """Of one step of training, read and verified."""
        return self._once(("advance",), self._timed_advance)

    def values(self) -> float:
        """Of measuring every query."""
        measurement = self.V.measurement
        first = next(measurement.chunks())

        def timed() -> float:
            with torch.no_grad():
                state = measurement.leaves()
                return self._median(lambda _: measurement.values(first, state))

        return self._once(("values",), timed) * self.V.num_queries / len(first)

    def gradient(self) -> float:
        """Of one query's gradient."""
        last = self.V.num_queries - 1
        return self._once(("gradient",), lambda: self._median(lambda i: self.V.row(min(i, last))))

    def surrogate(self) -> float:
        """Of the surrogates of one checkpoint, all of them: at most about a sweep.

        NOTE: choosing their weights afterwards is linear algebra of K and N, which shows on runs of
        seconds alone and is left out.
        """
        return self._once(("surrogate",), self._timed_surrogate)

    def surrogate_bytes(self) -> int:
        """Of what is kept of them."""
        self.surrogate()
        return int(self._known["surrogate bytes",])

    def _timed_surrogate(self) -> float:
        start = self.clock()
        made = exhaust(surrogate(self.run, self.V, self.run.final, self.V.memory))
        seconds = self.clock() - start
        tensors = (made.left, made.right, made.energies, made.sizes)
        self._known["surrogate bytes",] = sum(t.nbytes for t in tensors)
        return seconds

    def products(self, b: int) -> float:
        """Of b products with all query gradients where they are held: 2 K P b operations."""
        columns = min(self.V.size, _SLICE)
        sample = torch.ones(self.V.num_queries, columns, dtype=torch.float64)
        block = torch.ones(columns, b, dtype=torch.float64)
        key = ("products", b)
        return self._once(key, lambda: self._median(lambda _: sample @ block)) * (
            self.V.size / columns
        )

    def combine(self, b: int) -> float:
        """Of V z for b probes."""
        if self.V.held:
            return self.products(b)
        return self._over_chunks(
            ("combine", b), lambda first: self.V.combine(_ones(first, self, b))
        )

    def pair(self, b: int) -> float:
        """Of Vᵀ t for b tangents."""
        if self.V.held:
            return self.products(b)
        t = torch.ones(b, self.V.size, dtype=torch.float64, device=self.run.recipe.device)
        return self._over_chunks(("pair", b), lambda first: self.V.pair_some(first, t))

    def choosing(self, rule: Rule, known: int, count: int) -> float:
        """Of choosing ``count`` probes where ``known`` are measured."""
        if not rule.uses_gram:
            return 0.0
        K = self.V.num_queries
        G = torch.eye(K, dtype=torch.float64) + 1.0 / (1 + torch.arange(K, dtype=torch.float64))
        G = G @ G.T
        measured = Measured(K, 1, lambda: G)
        if known:
            Z = torch.eye(K, known, dtype=torch.float64)
            measured.replays[0] = Replayed(Z, torch.ones(known, 1), torch.ones(known))
            measured.pairs[0] = Paired(torch.ones(known, 1), Z + 1, tuple(range(known)))
        key = ("choosing", repr(rule), known, count)
        return self._once(
            key, lambda: self._median(lambda _: rule.choose(measured, known, known + count))
        )

    def _once(self, key: tuple[object, ...], timed: Callable[[], float]) -> float:
        if key not in self._known:
            with self.run.computing():
                self._known[key] = timed()
        return self._known[key]

    def _median(self, work: Callable[[int], object]) -> float:
        """Seconds of a piece of work, done once before the clock starts."""
        work(0)
        seconds = []
        for i in range(_REPEATS):
            start = self._now()
            work(i)
            seconds.append(self._now() - start)
        return median(seconds)

    def _now(self) -> float:
        synchronize(self.run.final.params.device)
        return self.clock()

    def _steps(self, i: int) -> int:
        """Steps that are timed, from all over the run."""
        return self.run.num_steps * (2 * i + 1) // (2 * _REPEATS)

    def _timed_advance(self) -> float:
        step, w, state = self.run.step, self.run.weights, self.run.step.initial()

        def work(i: int) -> None:
            t = self._steps(i)
            digest(step.advance(state, t, w, step.batches.load(t)))

        return self._median(work)

    def _timed_sweep(self, mode: str, rows: int) -> float:
        """One step of a block of rows, as `replay` and `forward` take it."""
        step, w, state = self.run.step, self.run.weights, self.run.step.initial()
        self.run.settle(mode, rows)
        how, zeros = self.run.how(mode, rows), state.zeros(rows)
        like = zeros.params.new_ones(rows, len(w))
        scratch = torch.empty_like(zeros.params)

        def work(i: int) -> None:
            t = self._steps(i)
            batch, which = step.batches.load(t), step.recipe.order.batches[t].to(w.device)
            block = State(zeros.params + 1, zeros.stats.clone(), _copied(zeros))
            if mode == "replay":
                _, w_bar = step.pull(state, t, w, batch, block, how, scratch)
                like.index_add_(1, which, w_bar)
            else:
                step.push(state, t, w, batch, block, like[:, which], how, scratch)

        return self._median(work)

    def _over_chunks(self, key: tuple[object, ...], work: Callable[[Tensor], object]) -> float:
        """A pass over all queries, from its first batch."""
        first = next(self.V.measurement.chunks())
        timed = self._once(key, lambda: self._median(lambda _: work(first)))
        return timed * self.V.num_queries / len(first)


def _ones(first: Tensor, speeds: Speeds, b: int) -> Tensor:
    """Probes that ask for a first batch of queries alone, (K, b)."""
    Z = torch.zeros(speeds.V.num_queries, b, dtype=torch.float64)
    Z[first] = 1.0
    return Z


def _copied(state: State) -> dict[str, Tensor]:
    return {name: slot.clone() for name, slot in state.slots.items()}
