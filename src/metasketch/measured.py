"""What was measured of Y so far: replays of probes, and forward passes along directions.

    U = Z^T Y    what the replays gave: (a, N) for probes Z (K, a)
    C = Y Q^T    what the forward passes gave: (K, r) for orthonormal directions Q (r, N)

Probes and estimators read it; only the loop of `metasketch.attribute` adds to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from metasketch.surrogate import Stack


@dataclass(frozen=True)
class Replayed:
    """A block of replays.

    Attributes:
        Z: the probes, (K, b), float64.
        U: z^T Y for each, divided by its scale, (b, N), in the precision of the sweeps.
        scales: powers of two, (b,), float64; 0 for a combination of query gradients that vanishes,
            whose row is zero without a sweep.
    """

    Z: Tensor
    U: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return _nbytes(self.Z, self.U, self.scales)

    @property
    def sent(self) -> int:
        """Rows that were swept."""
        return int((self.scales > 0).sum())


@dataclass(frozen=True)
class Paired:
    """A block of forward passes.

    Attributes:
        Q: orthonormal directions, (r, N), float64.
        C: their inner products with every row of Y, (K, r), float64.
        origin: the number of the replay from which each direction came.
    """

    Q: Tensor
    C: Tensor
    origin: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.Q, self.C)


@dataclass(frozen=True)
class Measured:
    """Everything known of Y, in blocks.

    Attributes:
        K, N: numbers of queries and examples.
        gram: gives G = V^T V, (K, K), float64, made when it is first asked for.
        replays, pairs: the finished blocks, by number.
        surrogates: gives stand-ins for Y that took no sweep, made when they are first asked for.
    """

    K: int
    N: int
    gram: Callable[[], Tensor] = field(repr=False)
    replays: dict[int, Replayed] = field(default_factory=dict, repr=False)
    pairs: dict[int, Paired] = field(default_factory=dict, repr=False)
    surrogates: Callable[[], Stack] | None = field(default=None, repr=False)

    @property
    def G(self) -> Tensor:
        """V^T V."""
        return self.gram()

    @property
    def Z(self) -> Tensor:
        """Probes of the finished replays, (K, a)."""
        return _cat([self.replays[i].Z for i in sorted(self.replays)], (self.K, 0))

    @property
    def U(self) -> Tensor:
        """Z^T Y, (a, N), float64."""
        blocks = [self.replays[i] for i in sorted(self.replays)]
        return _cat([b.U.double() * b.scales[:, None] for b in blocks], (0, self.N), dim=0)

    @property
    def scales(self) -> Tensor:
        """Powers of two by which the rows of U were divided, (a,); 0 for rows that vanish."""
        return torch.cat([self.replays[i].scales for i in sorted(self.replays)])

    @property
    def Q(self) -> Tensor:
        """Orthonormal directions of the finished forward passes, (r, N)."""
        return _cat([self.pairs[i].Q for i in sorted(self.pairs)], (0, self.N), dim=0)

    @property
    def C(self) -> Tensor:
        """Y Q^T, (K, r)."""
        return _cat([self.pairs[i].C for i in sorted(self.pairs)], (self.K, 0))

    @property
    def captured(self) -> float:
        """‖Y Π‖², the energy of Y in the span of the directions."""
        return float(self.C.square().sum())

    @property
    def sweeps(self) -> dict[str, int]:
        """Rows swept so far in each direction."""
        return {
            "replay": sum(b.sent for b in self.replays.values()),
            "forward": sum(len(b.Q) for b in self.pairs.values()),
        }

    def before(self, number: int) -> "Measured":
        """What the blocks before this one gave."""
        return replace(
            self,
            replays={i: block for i, block in self.replays.items() if i < number},
            pairs={i: pair for i, pair in self.pairs.items() if i < number},
        )

    def first(self, count: int, starts: Sequence[int]) -> "Measured":
        """What the first ``count`` replays and their forward passes gave.

        Args:
            starts: the number of the first replay of each block.
        """
        replays, pairs = {}, {}
        for i, block in self.replays.items():
            rows = min(count - starts[i], len(block.U))
            if rows == len(block.U):
                replays[i] = block
            elif rows > 0:
                replays[i] = Replayed(block.Z[:, :rows], block.U[:rows], block.scales[:rows])
        for i, pair in self.pairs.items():
            r = sum(origin < count for origin in pair.origin)
            if i in replays:
                pairs[i] = Paired(pair.Q[:r], pair.C[:, :r], pair.origin[:r])
        return replace(self, replays=replays, pairs=pairs)


def _nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _cat(blocks: Sequence[Tensor], empty: tuple[int, int], dim: int = 1) -> Tensor:
    return torch.cat(list(blocks), dim) if blocks else torch.zeros(empty, dtype=torch.float64)
