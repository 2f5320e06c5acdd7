"""The budgeted loop: blocks of replays and forward passes until the budget is spent.

    for each block of probes Z:   U = Z^T Y       one replay a probe
                                  C = Y Q^T       one forward pass for each new direction Q of U

Which blocks can be worked on now is a pure function of what is finished, so a loop that was killed
goes on where it was, and several processes share one ledger without doing anything twice.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasketch.attribution_store import Block, Ledger
from metasketch.measured import Measured, Paired, Replayed
from metasketch.memory import block_size
from metasketch.methods import Method
from metasketch.query_gradients import QueryGradients, power_of_two
from metasketch.run import Run
from metasketch.surrogate import Stack

Rounds = Sequence[tuple[int, int]]
"""Probes start to stop of each block, in order."""


def rounds(start: int, stop: int, fixed: int, most: int, per_round: int) -> list[tuple[int, int]]:
    """Cut probes number start to stop into blocks.

    The first ``fixed`` do not depend on what is measured, and go through in blocks of at most
    ``most`` rows; the others in rounds.

    >>> rounds(0, 9, 5, 4, 2)
    [(0, 3), (3, 5), (5, 7), (7, 9)]
    """
    known = min(max(fixed, start), stop)
    size = block_size(known - start, most) if known > start else 1
    rest = min(per_round, most)
    return [
        *((a, min(a + size, known)) for a in range(start, known, size)),
        *((a, min(a + rest, stop)) for a in range(known, stop, rest)),
    ]


def open_blocks(
    cut: Rounds, fixed: int, pairs: bool, replayed: set[int], paired: set[int]
) -> list[Block]:
    """What can be worked on now, the most urgent first.

    Forward passes come before further replays, so that the estimate is as good as it can be at
    every moment. Those of a block need every replay up to it; a probe that depends on what is
    measured needs everything before it.
    """
    forward, replay = [], []
    measured = complete = True  # everything before this block is replayed; and paired, too
    for number, (_, stop) in enumerate(cut):
        if number not in replayed:
            if stop <= fixed or complete:
                replay.append(Block("replay", number))
            measured = complete = False
        elif pairs and number not in paired:
            if measured:
                forward.append(Block("forward", number))
            complete = False
    return forward + replay


@dataclass(frozen=True)
class Sketch:
    """An attribution under way.

    Attributes:
        run: the run that is differentiated.
        V: the query gradients.
        method: chooses probes and directions.
        cut: the blocks.
        fixed: how many leading probes do not depend on what is measured.
        ledger: where finished blocks are kept.
        settle: decides how blocks of so many rows are differentiated in a mode, before one is.
        gram: gives G.
        surrogates: gives stand-ins for Y, where the method takes any.
        progress: show a bar for each sweep; by default on a terminal.
    """

    run: Run
    V: QueryGradients
    method: Method
    cut: Rounds
    fixed: int
    ledger: Ledger
    settle: Callable[[str, int], None]
    gram: Callable[[], Tensor]
    surrogates: Callable[[], Stack] | None = None
    progress: bool | None = None

    def measure(self) -> Generator[Measured, None, Measured]:
        """Work until every block is finished; yields what is known, at the start and after each."""
        K, N = self.V.num_queries, self.run.num_examples
        known = Measured(K, N, self.gram, surrogates=self.surrogates)
        self._collect(known)
        yield known
        while work := self._open(known):
            for block in work:
                with self.ledger.claim(block) as mine:
                    if mine and self.ledger.read(block) is None:
                        self.ledger.write(block, self._made(block, known))
                        break
            else:
                # Every open block is in other hands: wait for one of them.
                with self.ledger.claim(work[0], wait=True):
                    pass
            self._collect(known)
            yield known
        return known

    def _open(self, known: Measured) -> list[Block]:
        pairs = self.method.estimator.pairs
        return open_blocks(self.cut, self.fixed, pairs, set(known.replays), set(known.pairs))

    def _collect(self, known: Measured) -> None:
        """Add what was finished, by anyone."""
        for number in range(len(self.cut)):
            if number not in known.replays:
                found = self.ledger.read(Block("replay", number))
                if isinstance(found, Replayed):
                    known.replays[number] = found
            # In this order: a block that lost its replays has no use for its forward passes yet.
            wanted = self.method.estimator.pairs and number in known.replays
            if wanted and number not in known.pairs:
                found = self.ledger.read(Block("forward", number))
                if isinstance(found, Paired):
                    known.pairs[number] = found

    def _made(self, block: Block, known: Measured) -> Replayed | Paired:
        if block.kind == "replay":
            start, stop = self.cut[block.number]
            # A probe sees what it depends on, whatever else is finished when its turn comes.
            seen = known.before(block.number if stop > self.fixed else 0)
            return self._replayed(self.method.rule.choose(seen, start, stop))
        return self._paired(block.number, known)

    def _replayed(self, Z: Tensor) -> Replayed:
        """U = Z^T Y. Rows are sent at a size near 1, whatever the size of the gradients."""
        bars = self.V.combine(Z)
        sizes = torch.linalg.vector_norm(bars, dim=1)
        live = sizes > self._rounding(Z).to(sizes)
        scales = torch.where(live, power_of_two(sizes), 0.0)
        like = self.run.final.params
        U = torch.zeros(Z.shape[1], self.run.num_examples, dtype=like.dtype)
        rows = int(live.sum())
        if rows:
            self.settle("replay", rows)
            cotangents = self.run.named(bars[live] / scales[live, None])
            U[live.cpu()] = self.run.replay(cotangents, rows, self.progress).cpu()
        return Replayed(Z, U, scales.cpu())

    def _rounding(self, Z: Tensor) -> Tensor:
        """Size below which V z is nothing but rounding, (b,)."""
        if not self.method.rule.uses_gram:
            return torch.zeros(Z.shape[1], dtype=Z.dtype)
        sizes = self.gram().diagonal().clamp(min=0).sqrt()
        bound: Tensor = len(Z) * torch.finfo(Z.dtype).eps * (sizes @ Z.abs())
        return bound

    def _paired(self, number: int, known: Measured) -> Paired:
        """C = Y Q^T for the directions Q that a block of replays adds."""
        Q = torch.zeros(0, known.N, dtype=torch.float64)
        new, rows = Q, list[int]()
        for i in range(number + 1):
            Q = torch.cat([Q, new])
            if i < number and i in known.pairs:
                new = known.pairs[i].Q
            else:
                new, rows = self.method.estimator.directions(Q, known.replays[i].U)
        start = self.cut[number][0]
        origin = tuple(start + row for row in rows)
        if not rows:
            return Paired(new, torch.zeros(known.K, 0, dtype=torch.float64), origin)
        self.settle("forward", len(new))
        tangents = self.run.flat(self.run.forward(new, len(new), self.progress))
        return Paired(new, self.V.pair(tangents), origin)


def blocks_needed(cut: Rounds, budget: int) -> list[tuple[int, int]]:
    """The blocks that hold the first ``budget`` probes."""
    return [(start, stop) for start, stop in cut if start < budget]


def num_sweeps(cut: Rounds, pairs: bool) -> int:
    """Sweeps that the blocks take at most."""
    return sum(stop - start for start, stop in cut) * (2 if pairs else 1)


def remarks(
    steps: Generator[Measured, None, Measured],
) -> Generator[tuple[int, str], None, Measured]:
    """What to show of a sketch under way: sweeps done, and the energy captured."""
    before = 0.0
    while True:
        try:
            known = next(steps)
        except StopIteration as stop:
            finished: Measured = stop.value
            return finished
        energy = known.captured
        remark = ""
        if energy > 0:
            added = 100 * (1 - before / energy)
            remark = f"captured energy {energy:.3g}, {added:.1f} % of it by the last sweeps"
        before = energy
        done = [*known.replays, *known.pairs]  # forward passes count for their whole block
        yield sum(len(known.replays[number].U) for number in done), remark
