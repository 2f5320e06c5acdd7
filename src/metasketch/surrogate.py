"""Cheap stand-ins for Y from gradients of single examples, kept by their spectrum. Pure algebra.

With g_i the gradient of example i at a checkpoint, Φ the matrix of the g_i (N, P) and w their data
weights, the surrogate of damping λ is the influence function of a Gauss-Newton-like Hessian:

    S(λ) = -V^T (Φ^T W Φ + λ N μ)^-1 Φ^T = -L (E + λ N μ)^-1 R,    L (K, r),  E (r,),  R (r, N)

with μ the mean of w_i ‖g_i‖², so that λ has no unit. One decomposition serves every damping.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DAMPINGS = (1e-4, 1e-3, 1e-2, 1e-1)
"""λ of the surrogates that are combined: a factor of ten apart."""

MIDDLE = 1e-3
"""λ of a surrogate that stands alone, with nothing measured to choose it by."""


@dataclass(frozen=True)
class Surrogate:
    """The surrogates of one checkpoint, for every damping.

    Attributes:
        left: L, (K, r), float64.
        right: R, (r, N); zero in columns of examples that training never saw.
        energies: E, (r,), float64, positive.
        sizes: ‖g_i‖, (N,), float64; 0 for examples that training never saw.
        mean: N μ.
    """

    left: Tensor
    right: Tensor
    energies: Tensor
    sizes: Tensor
    mean: float

    @classmethod
    def of(
        cls, cross: Tensor, features: Tensor, weights: Tensor, places: Tensor, sizes: Tensor
    ) -> "Surrogate":
        """From features Φ of some examples.

        Args:
            cross: V^T Φ^T in the same features, (K, n), float64.
            features: Φ, (n, d).
            weights: of the examples, (n,).
            places: their numbers, (n,).
            sizes: ‖g_i‖ of all examples, (N,).

        Cost: min(n, d)³ and n d min(n, d) operations.
        """
        root = weights.double().sqrt()
        A = features
        if not bool((weights == 1).all()):
            A = features * root[:, None].to(features)
        energies, vectors, total = _spectrum(A)
        left = (cross * root) @ vectors / energies.sqrt()
        right = energies.sqrt()[:, None] * (vectors / root.clamp(min=1e-300)[:, None]).T
        if bool((root == 0).any()):  # examples that were left out still have an influence
            out = root == 0
            F = A.T.double() @ vectors / energies.sqrt()
            right[:, out] = (features[out].double() @ F).T
        whole = torch.zeros(len(energies), len(sizes), dtype=features.dtype)
        whole[:, places] = right.to(features.dtype).cpu()
        return cls(left.cpu(), whole, energies.cpu(), sizes, total)

    def filtered(self, left: Tensor, dampings: Tensor) -> Tensor:
        """-L (E + λ N μ)^-1 for rows ``left`` (m, r) and each λ: (len(dampings), m, r)."""
        return -left / (self.energies + dampings[:, None, None] * self.mean)

    def dense(self, damping: float = MIDDLE) -> Tensor:
        """S(λ), (K, N), float64."""
        S: Tensor = self.filtered(self.left, torch.tensor([damping]).double())[0]
        return S @ self.right.double()


def _spectrum(A: Tensor) -> tuple[Tensor, Tensor, float]:
    """Eigenvalues and eigenvectors of A A^T that are more than rounding, (r,) and (n, r), float64,
    and its trace.

    In the precision of A: what that loses lies far below every damping.
    """
    n, d = A.shape
    small = A if n <= d else A.T
    inner = small @ small.T
    energies, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    kept = energies > energies[-1].clamp(min=0) * torch.finfo(A.dtype).eps
    energies, vectors = energies[kept].double(), vectors[:, kept]
    if n > d:
        vectors = (A @ vectors).double() / energies.sqrt()
    return energies, vectors.double(), float(inner.diagonal().double().sum())


@dataclass(frozen=True)
class Stack:
    """Surrogates side by side: every checkpoint, damping and shape over examples.

        S_j = S_c(λ) diag(h),    j = (c, λ, h)

    Attributes:
        checkpoints: one for each state at which gradients were taken.
        shapes: h, functions over the examples, (H, N), float64; the first one is constant.
        cost: what they cost, in sweeps.
    """

    checkpoints: Sequence[Surrogate]
    shapes: Tensor
    cost: float
    dampings: tuple[float, ...] = DAMPINGS

    def __len__(self) -> int:
        return len(self.checkpoints) * len(self.dampings) * len(self.shapes)

    @property
    def plain(self) -> Tensor:
        """Which of them have the constant shape, (J,)."""
        index = torch.arange(len(self))
        return index % len(self.shapes) == 0

    def seen_by(self, Z: Tensor, columns: slice) -> Tensor:
        """Z^T S_j for some examples, (J, a, n)."""
        lam = torch.tensor(self.dampings, dtype=torch.float64)
        blocks = []
        for surrogate in self.checkpoints:
            rows = surrogate.filtered(Z.T @ surrogate.left, lam)
            blocks.append(rows @ surrogate.right[:, columns].double())
        seen = torch.cat(blocks)[:, None] * self.shapes[:, None, columns]
        return seen.flatten(0, 1)

    def combined(self, beta: Tensor) -> Tensor:
        """Σ_j β_j S_j, (K, N), float64."""
        lam = torch.tensor(self.dampings, dtype=torch.float64)
        shared = beta.view(len(self.checkpoints), len(lam), len(self.shapes))
        total = torch.zeros(
            len(self.checkpoints[0].left), self.shapes.shape[1], dtype=torch.float64
        )
        for surrogate, weights in zip(self.checkpoints, shared, strict=True):
            filters = weights.T @ (1 / (surrogate.energies + lam[:, None] * surrogate.mean))
            right = surrogate.right.double()
            for shape, one in zip(self.shapes, filters, strict=True):
                if bool(one.any()):
                    total -= ((surrogate.left * one) @ right) * shape
        return total


def shapes_of(sizes: Tensor, exposure: Tensor) -> Tensor:
    """Functions over the examples by which surrogates are bent, (H, N).

        1,  c,  c²,  e    with c = log ‖g_i‖ and e the summed learning rates, both standardised

    A surrogate's error depends smoothly on how large an example's gradient is and on when training
    saw it. Those that are constant are left out.
    """
    shapes = [torch.ones(len(sizes), dtype=torch.float64)]
    positive = sizes > 0
    c = torch.zeros_like(sizes)
    c[positive] = sizes[positive].log()
    for values, powers in ((c, (1, 2)), (exposure, (1,))):
        used = values[positive]
        spread = used.std(correction=0) if len(used) else used.sum()
        if not bool(spread > 1e-3 * used.abs().max()):
            continue
        standard = torch.zeros_like(values)
        standard[positive] = (used - used.mean()) / spread
        shapes += [standard**power for power in powers]
    return torch.stack(shapes)
