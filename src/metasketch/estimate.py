"""Estimators: from what was measured to an estimate of every row, as two factors Ŷ = C Q.

An estimator is independent of how the probes were chosen. It says along which directions it wants
forward passes, and makes the factors of whatever was measured.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from metasketch.calibrate import calibrated
from metasketch.measured import Measured
from metasketch.probes import deflation


class Estimator(Protocol):
    """What the loop needs of an estimator."""

    @property
    def pairs(self) -> bool:
        """Whether it takes forward passes."""

    def directions(self, Q: Tensor, U: Tensor) -> tuple[Tensor, list[int]]:
        """Directions (r, N) for forward passes after new measurements U, beside those in Q, and
        the rows of U from which they came."""

    def factors(self, measured: Measured) -> tuple[Tensor, Tensor]:
        """(C, Q) with Ŷ = C Q."""


@dataclass(frozen=True)
class Projection:
    """Ŷ = Y Π, the projection of every row onto the span of the measurements.

        Q = orth(U),    C = Y Q^T = V^T (J Q^T),    Ŷ = C Q

    A projection never makes a row worse than nothing: ‖Y_q - Ŷ_q‖ ≤ ‖Y_q‖.

    NOTE: the paper sends u itself through the forward pass and takes off the part that is known;
    the part that is new is sent here. It is the same in exact arithmetic, and does not lose the
    digits that the subtraction costs.
    """

    pairs: bool = True

    def directions(self, Q: Tensor, U: Tensor) -> tuple[Tensor, list[int]]:
        return extend_basis(Q, U)

    def factors(self, measured: Measured) -> tuple[Tensor, Tensor]:
        return measured.C, measured.Q


@dataclass(frozen=True)
class Expansion:
    """Ŷ = Z Z^T Y for orthonormal probes Z: the measurements themselves, without a forward pass.

    With eigenvectors of G it is the paper's PCA, V_B^T J with V_B the rank-B SVD of V. With every
    query for itself it is Y.
    """

    pairs: bool = False

    def directions(self, Q: Tensor, U: Tensor) -> tuple[Tensor, list[int]]:
        return Q[:0], []

    def factors(self, measured: Measured) -> tuple[Tensor, Tensor]:
        return measured.Z, measured.U


@dataclass(frozen=True)
class Regression:
    """Gram regression, without a forward pass: rows of Y as those of V predict them.

        Ŷ = G Z (Z^T G Z)^+ Z^T Y

    It is the best linear prediction of every row where the columns of J have independent entries,
    so that rows of Y correlate as query gradients do. A projection takes an exact inner product
    with every row instead, at the price of a second sweep for each probe.
    """

    pairs: bool = False

    def directions(self, Q: Tensor, U: Tensor) -> tuple[Tensor, list[int]]:
        return Q[:0], []

    def factors(self, measured: Measured) -> tuple[Tensor, Tensor]:
        return deflation(measured.G, measured.Z).T.contiguous(), measured.U


@dataclass(frozen=True)
class Augmented:
    """Gram regression around surrogates S_j that the replays calibrate.

        S = Σ_j β_j S_j diag(s),    Ŷ = S + G Z (Z^T G Z)^+ (Z^T Y - Z^T S)

    β, s and whether surrogates are used at all are chosen by `metasketch.calibrate`. Where they
    are, the rank is min(K, N): the surrogates have no fewer.
    """

    pairs: bool = False

    def directions(self, Q: Tensor, U: Tensor) -> tuple[Tensor, list[int]]:
        return Q[:0], []

    def factors(self, measured: Measured) -> tuple[Tensor, Tensor]:
        assert measured.surrogates is not None
        G, Z, U, stack = measured.G, measured.Z, measured.U, measured.surrogates()
        found = calibrated(stack, G, Z, U)
        if found.off:
            return Regression().factors(measured)
        Y_hat = stack.combined(found.beta).mul_(found.scales)
        Y_hat += deflation(G, Z).T @ (U - Z.T @ Y_hat)
        return trivial_factors(Y_hat)


@dataclass(frozen=True)
class Uncalibrated:
    """The surrogate of the last checkpoint as it stands, at a middling damping: Ŷ = S(λ)."""

    pairs: bool = False

    def directions(self, Q: Tensor, U: Tensor) -> tuple[Tensor, list[int]]:
        return Q[:0], []

    def factors(self, measured: Measured) -> tuple[Tensor, Tensor]:
        assert measured.surrogates is not None
        return trivial_factors(measured.surrogates().checkpoints[0].dense())


def trivial_factors(Y_hat: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (K, N) as two factors, one of which is the identity of the smaller size."""
    K, N = Y_hat.shape
    identity = torch.eye(min(K, N), dtype=Y_hat.dtype)
    return (identity, Y_hat) if K <= N else (Y_hat, identity)


def extend_basis(Q: Tensor, U: Tensor) -> tuple[Tensor, list[int]]:
    """Orthonormal directions that the rows of U add to the span of the rows of Q.

    Gram-Schmidt in float64, row by row and twice over, so that the basis is orthonormal to rounding
    however dependent the rows are. A row that adds nothing beyond the rounding of its measurement
    adds no direction.

    Args:
        Q: orthonormal rows, (r, N), float64.
        U: measured rows, (b, N), in the precision in which they were measured.

    Returns:
        The new directions, (at most b, N), and which rows of U they came from.
    """
    negligible = torch.finfo(U.dtype).eps ** 0.75
    basis, rows = Q, []
    for i, u in enumerate(U.double()):
        size = torch.linalg.vector_norm(u)
        if not bool(size > 0):
            continue
        q = u / size
        for _ in range(2):
            q = q - basis.T @ (basis @ q)
            left = torch.linalg.vector_norm(q)
            if not bool(left > negligible):
                break
            q = q / left
        else:
            basis = torch.cat([basis, q[None]])
            rows.append(i)
    return basis[len(Q) :], rows
