"""Calibrate surrogates by the replays that were paid for: weights, scales, and whether at all.

The rows of Y are modelled as a combination of surrogates and a remainder whose covariance over
queries is G, independent between examples. With probes Z and what they measured, U = Z^T Y:

    β = argmin ‖C^(-1/2) (U - Σ_j β_j Z^T S_j)‖²,    C = Z^T G Z            (least squares)

C^(-1/2) undoes the bias of leading probes, whose measurements are large. Everything that is chosen
here is chosen by cross-validation over probes: how much is regularised, which surrogates take part,
a scale for each example, and whether to use surrogates at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasketch.surrogate import Stack

_RIDGES = (0.0, 1e-4, 1e-2, 1.0)
"""Of the least squares, in units of a surrogate's own energy; 0 takes the pseudo-inverse."""

_SHRINKAGES = (0.3, 1.0, 3.0, 10.0, float("inf"))
"""κ of the scales of examples, in units of the median energy; infinity: no scales."""

_FOLDS = 5

_WORTH = 0.95
"""Surrogates have to leave at most this share of the error: noise can seem to help a little."""

_ROUNDING = 1e-10
"""Directions among the surrogates with less than this share of the largest energy are dropped."""

_JITTER = 1e-10
"""Added to the unit energies of probes, some of which may depend on others."""

_ENTRIES = 1 << 22
"""Numbers of whitened surrogates that are held at once."""


@dataclass(frozen=True)
class Calibration:
    """What the replays say about a stack of surrogates.

    Attributes:
        beta: weights of the surrogates, (J,); zero where they are switched off.
        scales: a factor for each example, (N,).
        errors: by candidate, its cross-validated error, in units of that without surrogates.
        chosen: the candidate with the least error; "off" where that is hardly less than without.
    """

    beta: Tensor
    scales: Tensor
    errors: dict[str, float]
    chosen: str

    @property
    def off(self) -> bool:
        """Whether surrogates did not help."""
        return self.chosen == "off"


def whitening(G: Tensor, Z: Tensor) -> Tensor:
    """W, (r, a), with W (Z^T G Z) W^T = I: what each probe says beyond the probes before it.

    Probes are scaled to ‖V z‖ = 1 first: theirs differ by orders. Those for which V z is nothing
    but rounding are left out.
    """
    norms = G.diagonal().clamp(min=0).sqrt()
    energies = (Z * (G @ Z)).sum(0)
    rounding = len(G) * torch.finfo(G.dtype).eps * (norms @ Z.abs()).square()
    live = energies > rounding
    scale = energies[live].rsqrt()
    C = scale[:, None] * (Z[:, live].T @ G @ Z[:, live]) * scale
    C = (C + C.T) / 2 + _JITTER * torch.eye(len(C), dtype=C.dtype)
    W = torch.zeros(len(C), Z.shape[1], dtype=Z.dtype)
    identity = torch.eye(len(C), dtype=C.dtype)
    L: Tensor = torch.linalg.cholesky(C)
    W[:, live] = torch.linalg.solve_triangular(L, identity, upper=False) * scale
    return W


def calibrated(stack: Stack, G: Tensor, Z: Tensor, U: Tensor) -> Calibration:
    """Weights and scales of surrogates, from replays U = Z^T Y.

    Args:
        stack: the surrogates.
        G: V^T V, (K, K).
        Z: probes, (K, a).
        U: what they measured, (a, N).

    Cost: no sweep.
    """
    W = whitening(G, Z)
    folds = torch.arange(len(W)) % min(_FOLDS, max(len(W), 1))
    moments = _Moments.of(stack, Z, W, W @ U, folds)
    beta, errors, chosen = _weights(moments, stack.plain)
    scales = torch.ones(U.shape[1], dtype=torch.float64)
    if chosen != "off":
        whole = _seen(stack, beta, W, Z)
        scales = _scales(whole, W @ U, folds)
    unit = max(errors["off"], torch.finfo(torch.float64).tiny)
    return Calibration(beta, scales, {k: e / unit for k, e in errors.items()}, chosen)


@dataclass(frozen=True)
class _Moments:
    """Inner products of whitened surrogates X_j and measurements y, by fold.

    Attributes:
        XX: (F, J, J).
        Xy: (F, J).
        yy: (F,).
    """

    XX: Tensor
    Xy: Tensor
    yy: Tensor

    @classmethod
    def of(cls, stack: Stack, Z: Tensor, W: Tensor, y: Tensor, folds: Tensor) -> "_Moments":
        F, J = int(folds.max()) + 1 if len(folds) else 1, len(stack)
        XX, Xy = torch.zeros(F, J, J, dtype=y.dtype), torch.zeros(F, J, dtype=y.dtype)
        yy = torch.zeros(F, dtype=y.dtype)
        for columns, X in _whitened(stack, Z, W, y.shape[1]):
            for f in range(F):
                rows = folds == f
                part, target = X[:, rows].flatten(1), y[rows, columns].reshape(-1)
                XX[f] += part @ part.T
                Xy[f] += part @ target
                yy[f] += target.square().sum()
        return cls(XX, Xy, yy)


def _whitened(stack: Stack, Z: Tensor, W: Tensor, N: int) -> Iterator[tuple[slice, Tensor]]:
    """W Z^T S_j for some examples at a time, (J, r, n)."""
    ZW = Z @ W.T
    step = max(1, _ENTRIES // max(1, len(stack) * len(W)))
    for start in range(0, N, step):
        columns = slice(start, min(start + step, N))
        yield columns, stack.seen_by(ZW, columns)


def _seen(stack: Stack, beta: Tensor, W: Tensor, Z: Tensor) -> Tensor:
    """W Z^T Σ_j β_j S_j, (r, N)."""
    N = stack.shapes.shape[1]
    parts = [torch.einsum("j,jan->an", beta, X) for _, X in _whitened(stack, Z, W, N)]
    return torch.cat(parts, dim=1)


def _weights(moments: _Moments, plain: Tensor) -> tuple[Tensor, dict[str, float], str]:
    """The weights with the least cross-validated error, all errors, and the name of the least."""
    XX, Xy, yy = moments.XX, moments.Xy, moments.yy
    errors = {"off": float(yy.sum())}
    found = {"off": torch.zeros(len(plain), dtype=Xy.dtype)}
    if len(yy) > 1:  # a single probe says nothing about others
        for name, subset in (("plain", plain), ("all", torch.ones_like(plain))):
            for ridge in _RIDGES:
                key, error = f"{name}, ridge {ridge:g}", 0.0
                for f in range(len(yy)):
                    beta = _solve(XX.sum(0) - XX[f], Xy.sum(0) - Xy[f], subset, ridge)
                    error += float(yy[f] - 2 * beta @ Xy[f] + beta @ XX[f] @ beta)
                errors[key] = max(error, 0.0)
                found[key] = _solve(XX.sum(0), Xy.sum(0), subset, ridge)
    chosen = min(errors, key=lambda key: errors[key])
    if errors[chosen] > _WORTH * errors["off"]:
        chosen = "off"
    return found[chosen], errors, chosen


def _solve(XX: Tensor, Xy: Tensor, subset: Tensor, ridge: float) -> Tensor:
    """Ridge regression on some of the surrogates, each scaled to unit energy."""
    energies = XX.diagonal()
    used = subset & (energies > 0)
    scale = energies[used].rsqrt()
    inner = scale[:, None] * XX[used][:, used] * scale
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    kept = values > _ROUNDING * values[-1] if len(values) else values > 0
    along = vectors[:, kept].T @ (scale * Xy[used])
    beta = torch.zeros_like(Xy)
    beta[used] = scale * (vectors[:, kept] @ (along / (values[kept] + ridge)))
    return beta


def _scales(X: Tensor, y: Tensor, folds: Tensor) -> Tensor:
    """A factor for each example, shrunk to 1 by as much as cross-validation asks for.

    s_i = (<x_i, y_i> + κ) / (‖x_i‖² + κ)
    """
    F = int(folds.max()) + 1
    picked = [folds == f for f in range(F)]
    xy = torch.stack([(X[p] * y[p]).sum(0) for p in picked])
    xx = torch.stack([X[p].square().sum(0) for p in picked])
    yy = torch.stack([y[p].square().sum(0) for p in picked])
    unit = float(xx.sum(0)[xx.sum(0) > 0].median()) if bool((xx > 0).any()) else 1.0

    def scales(kappa: float, without: Sequence[int] = ()) -> Tensor:
        if kappa == float("inf"):
            return torch.ones_like(xy[0])
        kept = [f for f in range(F) if f not in without]
        k = kappa * unit * len(kept) / F
        return (xy[kept].sum(0) + k) / (xx[kept].sum(0) + k)

    def error(kappa: float) -> float:
        held_out = [(f, scales(kappa, [f])) for f in range(F)]
        parts = [(yy[f] - 2 * s * xy[f] + s.square() * xx[f]).sum() for f, s in held_out]
        return max(float(sum(parts)), 0.0)

    errors: dict[float, float] = {kappa: error(kappa) for kappa in _SHRINKAGES}
    return scales(min(errors, key=lambda kappa: errors[kappa]))
