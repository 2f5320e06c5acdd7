"""Rehearse a method on a stand-in for Y: the same probes and estimators, in milliseconds.

A stand-in L (K, r) is any matrix whose L Lᵀ is near Y Yᵀ. What a method would capture of Y then
follows from what it captures of L, since nothing but inner products of rows matters to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metasketch.estimate import Projection
from metasketch.measured import Measured, Paired, Replayed
from metasketch.methods import Method
from metasketch.probes import leading_eigenvectors
from metasketch.sketch import rounds

_ROUNDS = 32
"""Rounds of adaptive probes in a rehearsal, at most: each takes an eigendecomposition."""

_BIN = 1.3
"""Ratio of the ends of the stretches of eigenvectors over which measured energies are averaged."""


class Outcome(NamedTuple):
    """What a method with a budget captured of a stand-in.

    Attributes:
        total: 1 - ‖Y - Ŷ‖² / ‖Y‖², which large rows decide.
        mean: the mean over queries of the share of each row's energy.
        lds: the mean over queries of the cosine of Y_q and Ŷ_q: LDS relative to exact rows.
    """

    total: float
    mean: float
    lds: float


def stand_ins(G: Tensor, Y_U: Tensor | None) -> list[Tensor]:
    """Matrices L (K, K) with L Lᵀ near Y Yᵀ, up to a factor.

    Without measurements Y Yᵀ is taken for G, as if training preserved inner products. It does not:
    it damps the directions that all examples share, which lead G. So with measurements Y u the
    energy of Y in each eigenvector x_i of G is what they say, averaged over stretches of
    neighbours:

        L Lᵀ = Σ_i ê_i x_i x_iᵀ,    ê_i = mean over stretch and directions of ⟨x_i, Y u⟩²

    and a second time with rows divided by the norms of their gradients. The first keeps the large
    rows and sees small ones badly; the second sees all rows alike.

    Args:
        G: Vᵀ V, (K, K).
        Y_U: Y u for random directions, (K, m), if any.
    """
    sizes = G.diagonal().clamp(min=0).sqrt()
    sizes = torch.where(sizes > 0, sizes, 1.0)
    if Y_U is None:
        energies, X = torch.linalg.eigh(G / sizes[:, None] / sizes)
        return [sizes[:, None] * X * energies.clamp(min=0).sqrt()]
    found = []
    for D in (torch.ones_like(sizes), sizes):
        X = leading_eigenvectors(G / D[:, None] / D, 0, len(G))
        energies = _smoothed((X.T @ (Y_U / D[:, None])).square().mean(1))
        found.append(D[:, None] * X * energies.sqrt())
    return found


def _smoothed(energies: Tensor) -> Tensor:
    """Averaged over stretches whose ends grow geometrically."""
    found, start = energies.clone(), 0
    while start < len(energies):
        stop = min(max(start + 1, int(start * _BIN)), len(energies))
        found[start:stop] = energies[start:stop].mean()
        start = stop
    return found


def rehearse(
    stand_ins: Sequence[Tensor], G: Tensor, method: Method, budgets: Sequence[int]
) -> list[Outcome]:
    """What a method would capture at each budget, if Y were like the stand-ins.

    Projections get the mean over stand-ins. Other estimators get the worst: they depend on how
    probes lie to the rows, and one of the stand-ins has MAGE's probes for its own directions.
    """
    every = [_rehearsed(L, G, method, budgets) for L in stand_ins]
    if isinstance(method.estimator, Projection):
        return [
            Outcome(*(sum(x) / len(x) for x in zip(*o, strict=True)))
            for o in zip(*every, strict=True)
        ]
    return [min(o, key=lambda outcome: outcome.lds) for o in zip(*every, strict=True)]


def _rehearsed(L: Tensor, G: Tensor, method: Method, budgets: Sequence[int]) -> list[Outcome]:
    """What it would capture if Y were L.

    NOTE: one rehearsal at the largest budget serves the smaller ones, with its warm-up, and
    adaptive probes are chosen in at most 32 rounds. Surrogates, of which a stand-in says nothing,
    are left out: a method that has them does better.
    """
    K = len(L)
    method = method.without_prior() if method.prior else method
    budgets = [method.num_replays(B, K) for B in budgets]
    most = max(budgets)
    fixed = method.rule.fixed(most)
    per_round = max(method.rule.per_round, -(-(most - min(fixed, most)) // _ROUNDS))
    # Rounds end where a budget does, so that each budget sees no probe beyond it.
    cut: list[tuple[int, int]] = []
    for stop in sorted({*budgets}):
        cut += rounds(cut[-1][1] if cut else 0, stop, fixed, most, per_round)
    known = Measured(K, L.shape[1], lambda: G)
    for number, (start, stop) in enumerate(cut):
        seen = known.before(number if stop > fixed else 0)
        Z = method.rule.choose(seen, start, stop)
        U = Z.T @ L
        known.replays[number] = Replayed(Z, U, torch.ones(stop - start, dtype=torch.float64))
        if method.estimator.pairs:
            Q, rows = method.estimator.directions(known.Q, U)
            known.pairs[number] = Paired(Q, L @ Q.T, tuple(start + row for row in rows))
    starts = [start for start, _ in cut]
    return [_outcome(L, *method.estimator.factors(known.first(B, starts))) for B in budgets]


def _outcome(L: Tensor, C: Tensor, Q: Tensor) -> Outcome:
    L_hat = C @ Q
    size, found = L.square().sum(1), L_hat.square().sum(1)
    missed, inner = (L - L_hat).square().sum(1), (L * L_hat).sum(1)
    live = size > 0
    cosines = inner / (size * found).sqrt().clamp(min=torch.finfo(L.dtype).tiny)
    return Outcome(
        total=float(1 - missed.sum() / size.sum()),
        mean=float((1 - missed / size)[live].mean()),
        lds=float(cosines[live].mean()),
    )
