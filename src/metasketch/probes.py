"""Probes: which combinations of queries to send through the run. Pure functions of G, (K, K).

A probe is a vector z of coefficients over the queries; probes stand side by side as columns of
Z (K, b). Eigenvectors have a fixed sign (the entry of largest size is positive), so that a probe
depends on G alone. All of it is float64.

The rules at the end choose probe after probe from what was measured so far; an estimator
(`metasketch.estimate`) is chosen apart from them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor

from metasketch.errors import ArgumentError
from metasketch.measured import Measured
from metasketch.randomness import generator

Objective = Literal["attribution", "reconstruction"]


def leading_eigenvectors(G: Tensor, start: int, stop: int) -> Tensor:
    """The eigenvectors of a symmetric matrix number ``start`` to ``stop``, leading first, (K, b).

    >>> leading_eigenvectors(torch.diag(torch.tensor([1.0, 3.0, 2.0])), 0, 2)
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.]])
    """
    return _signed(torch.linalg.eigh(G).eigenvectors.flip(1)[:, start:stop])


def _signed(vectors: Tensor) -> Tensor:
    """Eigenvectors with their sign fixed."""
    largest = vectors.abs().argmax(dim=0, keepdim=True)
    return vectors * vectors.gather(0, largest).sign()


def mage(G: Tensor, start: int, stop: int) -> Tensor:
    """MAGE: the leading eigenvectors of G = V^T V, in order."""
    return leading_eigenvectors(G, start, stop)


def spherical(G: Tensor, start: int, stop: int) -> Tensor:
    """Leading directions of the queries at equal size, in order, (K, b).

        z_a = D^-1 e_a,    e_a the eigenvectors of D^-1 G D^-1,    D = diag(‖v_q‖)

    The norms of query gradients stand in for the row norms of Y, which they rank almost perfectly,
    and are known beforehand. Queries whose gradient vanishes take no part.
    """
    norms = G.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(norms > 0, 1 / norms.clamp(min=torch.finfo(G.dtype).tiny), 0.0)
    unit = inverse[:, None] * G * inverse
    return inverse[:, None] * leading_eigenvectors((unit + unit.T) / 2, start, stop)


def residual_gram(G: Tensor, Z: Tensor) -> Tensor:
    """The Gram matrix of what is left of the query gradients beside V Z: Residual-Gram.

    P = I - Z (Z^T G Z)^+ Z^T G,    G_res = P^T G P
    """
    if Z.shape[1] == 0:
        return G
    P = torch.eye(len(G), dtype=G.dtype) - Z @ deflation(G, Z)
    G_res = P.T @ G @ P
    return (G_res + G_res.T) / 2


def deflation(G: Tensor, Z: Tensor) -> Tensor:
    """(Z^T G Z)^+ Z^T G, (B, K): coefficients of the best fit of every v_q by V Z.

    Probes are scaled to ‖V z‖ = 1 first: theirs differ by as many orders as the rows of Y do.
    """
    GZ = G @ Z
    sizes = (Z * GZ).sum(0).clamp(min=0).sqrt()
    scale = torch.where(sizes > 0, 1 / sizes.clamp(min=torch.finfo(G.dtype).tiny), 0.0)
    inner = scale[:, None] * (Z.T @ GZ) * scale
    pseudo_inverse: Tensor = torch.linalg.pinv((inner + inner.T) / 2, rtol=1e-12, hermitian=True)
    return scale[:, None] * (pseudo_inverse @ (scale[:, None] * GZ.T))


def floored(norms: Tensor, floor: float) -> Tensor:
    """Row norms, raised to the percentile ``floor`` (a fraction) of the positive ones.

    >>> floored(torch.tensor([0.0, 1.0, 2.0, 3.0]), 0.5)
    tensor([2., 2., 2., 3.])
    """
    positive = norms[norms > 0]
    if len(positive) == 0:
        return torch.ones_like(norms)
    return norms.clamp(min=float(torch.quantile(positive, floor)))


def spell(G: Tensor, Z: Tensor, row_norms: Tensor, floor: float, count: int) -> Tensor:
    """SPELL after its warm-up: the leading directions of the row-normalised residual, (K, count).

        z ∝ D^-1 v_max(D^-1 G_res D^-1),    zero where nothing is left to measure

    Args:
        Z: the probes sent so far, (K, a).
        row_norms: ‖Ŷ_q‖ of the estimate so far, (K,).
        floor: percentile of the positive ones below which norms are raised, as a fraction.
        count: directions to take; the paper takes one.
    """
    D = floored(row_norms, floor)
    R = residual_gram(G, Z) / D[:, None] / D
    energies, vectors = torch.linalg.eigh((R + R.T) / 2)
    z = _signed(vectors.flip(1)[:, :count]) / D[:, None]
    # Where what is left is nothing but rounding, every row is measured: there is nothing to send.
    rounding = len(G) * torch.finfo(G.dtype).eps * (G.diagonal() / D.square()).sum()
    z[:, energies.flip(0)[:count] <= rounding] = 0.0
    z /= torch.linalg.vector_norm(z, dim=0).clamp(min=torch.finfo(G.dtype).tiny)
    return z


def gaussian(K: int, seed: int, start: int, stop: int) -> Tensor:
    """Random probes z ~ N(0, I), each from a generator of its own: (K, b)."""
    columns = [
        torch.randn(K, generator=generator(seed, "probe", a), dtype=torch.float64)
        for a in range(start, stop)
    ]
    return torch.stack(columns, dim=1)


def coordinates(order: Sequence[int], K: int, start: int, stop: int) -> Tensor:
    """Single queries z = e_q in a given order, (K, b)."""
    Z = torch.zeros(K, stop - start, dtype=torch.float64)
    Z[list(order[start:stop]), range(stop - start)] = 1.0
    return Z


def permutation(K: int, seed: int) -> list[int]:
    """Queries in random order (the paper's order for language models)."""
    found: list[int] = torch.randperm(K, generator=generator(seed, "first")).tolist()
    return found


def round_robin(labels: Sequence[Any]) -> list[int]:
    """Queries in class-balanced round robin: one of each class in turn, classes in sorted order.

    >>> round_robin(["b", "a", "a", "b", "a"])
    [1, 0, 2, 3, 4]
    """
    try:
        classes = sorted(set(labels))
    except TypeError as error:
        raise ArgumentError(f"labels cannot be sorted into classes: {error}") from None
    members = [[q for q, label in enumerate(labels) if label == c] for c in classes]
    longest = max(len(m) for m in members)
    return [m[turn] for turn in range(longest) for m in members if turn < len(m)]


class Rule(Protocol):
    """Chooses probes.

    ``uses_gram`` says whether it looks at G, which is made only then, and ``adaptive`` whether
    later probes depend on what earlier ones measured.
    """

    uses_gram: ClassVar[bool]
    adaptive: ClassVar[bool]

    @property
    def per_round(self) -> int:
        """Probes that are chosen at once, where they depend on what was measured."""

    def fixed(self, budget: int) -> int:
        """How many leading probes do not depend on what is measured."""

    def check(self, K: int) -> None:
        """Refuse options that do not fit the number of queries."""

    def choose(self, measured: Measured, start: int, stop: int) -> Tensor:
        """Probes number ``start`` to ``stop``, (K, b).

        Leading ones that are fixed are chosen with nothing measured, whatever is there by then.
        """


@dataclass(frozen=True)
class _Fixed:
    """A rule whose probes are known beforehand, so that they share sweeps."""

    per_round: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False

    def fixed(self, budget: int) -> int:
        return budget

    def check(self, K: int) -> None:
        return None


@dataclass(frozen=True)
class Mage(_Fixed):
    """The leading eigenvectors of G, in order."""

    uses_gram: ClassVar[bool] = True

    def choose(self, measured: Measured, start: int, stop: int) -> Tensor:
        return mage(measured.G, start, stop)


@dataclass(frozen=True)
class Leading(_Fixed):
    """The leading directions of the query gradients, for one of the two objectives.

    Attributes:
        objective: "attribution" counts every query alike: spherical probes. "reconstruction"
            counts each by the energy of its gradient: MAGE's probes.
    """

    objective: Objective = "attribution"
    uses_gram: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ArgumentError(
                f"objective={self.objective!r}: give one of {list(get_args(Objective))}"
            )

    def choose(self, measured: Measured, start: int, stop: int) -> Tensor:
        choose = spherical if self.objective == "attribution" else mage
        return choose(measured.G, start, stop)


@dataclass(frozen=True)
class Nothing(_Fixed):
    """No probes at all."""

    uses_gram: ClassVar[bool] = False

    def choose(self, measured: Measured, start: int, stop: int) -> Tensor:
        return coordinates([], measured.K, 0, 0)


@dataclass(frozen=True)
class Spell:
    """MAGE's probes first, then the leading direction of the row-normalised residual.

    Attributes:
        warmup: a0, probes of MAGE at the start; None for the paper's max(⌈0.1 B⌉, 10).
        floor: percentile of the positive row norms, as a fraction, to which smaller ones are
            raised.
        per_round: directions taken at once; the paper takes one. More share a sweep, and are
            chosen with less knowledge.
    """

    warmup: int | None = None
    floor: float = 0.1
    per_round: int = 1
    uses_gram: ClassVar[bool] = True
    adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup < 0:
            raise ArgumentError(f"warmup={self.warmup}: a number of probes, at least 0, or None")
        if not 0 <= self.floor <= 1:
            raise ArgumentError(f"floor={self.floor}: a percentile as a fraction, 0 to 1")
        if self.per_round < 1:
            raise ArgumentError(f"per_round={self.per_round}: at least one probe a round")

    def fixed(self, budget: int) -> int:
        if self.warmup is None:
            return max(math.ceil(0.1 * budget), 10)
        return self.warmup

    def check(self, K: int) -> None:
        return None

    def choose(self, measured: Measured, start: int, stop: int) -> Tensor:
        if not measured.replays:
            return mage(measured.G, start, stop)
        row_norms = torch.linalg.vector_norm(measured.C, dim=1)
        return spell(measured.G, measured.Z, row_norms, self.floor, stop - start)


@dataclass(frozen=True)
class Gaussian(_Fixed):
    """Random combinations z ~ N(0, I)."""

    seed: int = 0
    uses_gram: ClassVar[bool] = False

    def choose(self, measured: Measured, start: int, stop: int) -> Tensor:
        return gaussian(measured.K, self.seed, start, stop)


@dataclass(frozen=True)
class First(_Fixed):
    """Single queries: in class-balanced round robin where labels are given, else at random.

    Attributes:
        labels: the class of each query.
        seed: of the random order.
    """

    labels: tuple[Any, ...] | None = None
    seed: int = 0
    uses_gram: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.labels is not None:
            labels = tuple(x.item() if hasattr(x, "item") else x for x in self.labels)
            object.__setattr__(self, "labels", labels)

    def check(self, K: int) -> None:
        if self.labels is not None and len(self.labels) != K:
            raise ArgumentError(f"labels names {len(self.labels)} queries; there are {K}")

    def choose(self, measured: Measured, start: int, stop: int) -> Tensor:
        K = measured.K
        order = permutation(K, self.seed) if self.labels is None else round_robin(self.labels)
        return coordinates(order, K, start, stop)


@dataclass(frozen=True)
class Every(_Fixed):
    """Each query for itself, in order."""

    uses_gram: ClassVar[bool] = False

    def choose(self, measured: Measured, start: int, stop: int) -> Tensor:
        return coordinates(range(measured.K), measured.K, start, stop)
