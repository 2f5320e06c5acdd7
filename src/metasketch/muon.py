"""Muon: momentum whose singular values are driven to one, for matrices; AdamW for the rest."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from metasketch.errors import ArgumentError
from metasketch.optim import (
    BELOW_ONE,
    INF,
    Adam,
    AdamW,
    Group,
    check_hyperparameters,
    in_group,
    root,
)

AdjustLR = Literal["original", "match_rms_adamw"]

_MATRIX = 2


@dataclass(frozen=True)
class Muon:
    """Muon, as ``torch.optim.Muon``, with the Newton-Schulz iteration in the run's own precision.

        m ← μm + (1-μ)g,   u ← (1-μ)g + μm  (or m),   θ ← (1 - ηλ)θ - η s NS(u),   s from θ's shape

    Parameters that are not matrices are updated by AdamW. The state has two slots as Adam's has;
    matrices use the first.

    NOTE: torch iterates in bfloat16, whatever the precision of the parameters. That has no
    derivative worth the name, so a run differs from torch's by the rounding of bfloat16.

    Args:
        lr: η, before the schedule's multiplier.
        momentum: μ.
        weight_decay: λ, decoupled.
        nesterov: orthogonalise (1-μ)g + μm instead of m.
        ns_steps: iterations X ← aX + (b XXᵀ + c (XXᵀ)²) X.
        ns_coefficients: (a, b, c).
        eps: the least norm that u is divided by before the iteration.
        adjust_lr: s, for a matrix A × B: "original" is √max(1, A/B), "match_rms_adamw" is
            0.2 √max(A, B).
        adamw: updates all parameters that are not matrices, with a rate and groups of its own.
        adamw_names: matrices that it updates too: names or patterns, such as ``"*embed*"``.
        groups: matrices with other hyperparameters.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = True
    ns_steps: int = 5
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    adjust_lr: AdjustLR = "original"
    adamw: Adam = field(default_factory=AdamW)
    adamw_names: str | Sequence[str] = ()
    groups: tuple[Group, ...] = ()
    elementwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        names = self.adamw_names
        names = (names,) if isinstance(names, str) else tuple(names)
        object.__setattr__(self, "adamw_names", names)
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "ns_coefficients", tuple(self.ns_coefficients))
        check_hyperparameters(
            self,
            lr=(0, INF),
            momentum=(0, BELOW_ONE),
            weight_decay=(0, INF),
            ns_steps=(0, 99),
            eps=(0, INF),
        )
        if len(self.ns_coefficients) != 3:
            raise ArgumentError(
                f"Muon(ns_coefficients={self.ns_coefficients!r}): three are needed, (a, b, c)"
            )
        if self.adjust_lr not in get_args(AdjustLR):
            raise ArgumentError(
                f"Muon(adjust_lr={self.adjust_lr!r}): give one of {list(get_args(AdjustLR))}"
            )
        if not isinstance(self.adamw, Adam):
            raise ArgumentError(
                f"Muon(adamw={self.adamw!r}): give ms.AdamW or ms.Adam for what is not a matrix"
            )

    def slot_names(self) -> tuple[str, ...]:
        return ("average", "average_sq")

    def of_parameter(self, name: str, shape: torch.Size) -> "Muon | Adam":
        if len(shape) != _MATRIX or any(fnmatchcase(name, p) for p in self.adamw_names):
            return self.adamw.of_parameter(name, shape)
        rule: Muon = in_group(self, name)
        return dataclasses.replace(rule, adamw=AdamW(), adamw_names=())

    def rule(
        self, lr: float, step: int, theta: Tensor, g: Tensor, slots: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        m, unused = slots
        m = torch.lerp(m, g, 1 - self.momentum)
        u = torch.lerp(g, m, self.momentum) if self.nesterov else m
        direction = orthogonalize(u, self.ns_coefficients, self.ns_steps, self.eps)
        theta = theta * (1 - lr * self.weight_decay)
        scale = self._scale(*theta.shape)
        return torch.add(theta, direction, alpha=-lr * scale), (m, unused)

    def _scale(self, rows: int, columns: int) -> float:
        if self.adjust_lr == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonalize(
    u: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The Newton-Schulz iteration on u / ‖u‖: singular vectors stay, singular values go near 1.

        X ← aX + (b XXᵀ + c (XXᵀ)²) X

    Its derivative at u = 0 is that of u / eps.
    """
    a, b, c = coefficients
    X = u.T if u.shape[0] > u.shape[1] else u  # the smaller Gram matrix
    X = X / root(X.square().sum()).clamp(min=eps)
    for _ in range(steps):
        gram = X @ X.T
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.T if u.shape[0] > u.shape[1] else X
