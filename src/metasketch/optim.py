"""Optimisers as pure update rules, their parameter groups, and gradient clipping.

A rule maps one parameter tensor, its gradient and its slots to their next values. It is written
once, in plain torch operations; training runs it without a graph, the sweeps differentiate it with
autograd. Nothing about derivatives is written by hand here, save the square root at zero.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from metasketch.errors import ArgumentError
from metasketch.layout import Layout


@dataclass(frozen=True, init=False)
class Group:
    """Parameters that train with other hyperparameters than the rest.

    Args:
        match: names of parameters, or patterns such as ``"*.bias"``; the first group of an
            optimiser that matches a name takes it.
        **overrides: hyperparameters of the optimiser, such as ``lr`` or ``weight_decay``.
    """

    match: tuple[str, ...]
    overrides: Mapping[str, float]

    def __init__(self, match: str | Sequence[str], **overrides: float) -> None:
        object.__setattr__(self, "match", (match,) if isinstance(match, str) else tuple(match))
        object.__setattr__(self, "overrides", dict(overrides))

    def takes(self, name: str) -> bool:
        return name in self._names or any(fnmatch.fnmatchcase(name, p) for p in self._patterns)

    @cached_property
    def _names(self) -> frozenset[str]:
        """What matches itself alone: looked up, since a converted group may name hundreds."""
        return frozenset(m for m in self.match if not set(m) & set("*?["))

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(m for m in self.match if m not in self._names)


class Optimizer(Protocol):
    """What the step needs of an optimiser.

    ``elementwise`` promises that entry j of every output depends on entry j of the inputs alone;
    the rule is then applied to whole stretches of the flat state, and its Jacobian is diagonal.
    """

    elementwise: ClassVar[bool]

    @property
    def lr(self) -> float: ...
    @property
    def groups(self) -> tuple[Group, ...]: ...
    def slot_names(self) -> tuple[str, ...]: ...
    def of_parameter(self, name: str, shape: torch.Size) -> "Optimizer":
        """The optimiser, without groups, whose rule updates one parameter."""

    def rule(
        self, lr: float, step: int, theta: Tensor, g: Tensor, slots: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...


def root(x: Tensor) -> Tensor:
    """√x, with derivative 0 where x = 0.

    A second moment that is exactly zero belongs to a gradient that is identically zero (an
    embedding row that no batch uses), so nothing upstream varies; autograd alone would make NaN
    of it.
    """
    if not x.requires_grad:
        return x.sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def check_hyperparameters(optimizer: Any, **ranges: tuple[float, float]) -> None:
    """Refuse hyperparameters, and those that groups override, outside of their ranges."""
    for name, (low, high) in ranges.items():
        values = [getattr(optimizer, name)]
        values += [g.overrides[name] for g in optimizer.groups if name in g.overrides]
        for value in values:
            if not (isinstance(value, int | float) and low <= value <= high):
                raise ArgumentError(
                    f"{type(optimizer).__name__}({name}={value!r}): must be a number in "
                    f"[{low:g}, {high:g}]"
                )
    known = {f.name for f in dataclasses.fields(optimizer)} - {"groups"}
    for group in optimizer.groups:
        if unknown := set(group.overrides) - known:
            raise ArgumentError(
                f"Group({', '.join(group.match)}) overrides {sorted(unknown)}, which "
                f"{type(optimizer).__name__} does not have; it has {sorted(known)}"
            )


def in_group(optimizer: Any, name: str) -> Any:
    """An optimiser with the hyperparameters of the first group that takes the parameter."""
    taken = (group.overrides for group in optimizer.groups if group.takes(name))
    return dataclasses.replace(optimizer, groups=(), **next(taken, {}))


INF = float("inf")
BELOW_ONE = 1 - 1e-12


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as ``torch.optim.SGD``.

        g ← g + λθ,   m ← μm + (1-d)g  (m ← g at the first step),   θ ← θ - η(g + μm  or  m)

    Args:
        lr: η, before the schedule's multiplier.
        momentum: μ.
        weight_decay: λ, coupled (added to the gradient).
        nesterov: step along g + μm instead of m.
        dampening: d.
        groups: parameters with other hyperparameters.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    groups: tuple[Group, ...] = ()
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        check_hyperparameters(
            self, lr=(0, INF), momentum=(0, 1), weight_decay=(0, INF), dampening=(0, 1)
        )
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ArgumentError("SGD(nesterov=True) needs a positive momentum and no dampening")

    def slot_names(self) -> tuple[str, ...]:
        momenta = [self.momentum, *(g.overrides.get("momentum", 0.0) for g in self.groups)]
        return ("momentum",) if any(momenta) else ()

    def of_parameter(self, name: str, shape: torch.Size) -> "SGD":
        rule: SGD = in_group(self, name)
        return rule

    def rule(
        self, lr: float, step: int, theta: Tensor, g: Tensor, slots: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.weight_decay:
            g = torch.add(g, theta, alpha=self.weight_decay)
        if self.momentum == 0:  # other groups may have a momentum, and so a slot
            return torch.add(theta, g, alpha=-lr), slots
        damped = g * (1 - self.dampening) if self.dampening and step > 0 else g
        m = torch.add(damped, slots[0], alpha=self.momentum)
        if self.nesterov:
            g = torch.add(g, m, alpha=self.momentum)
        else:
            g = m
        return torch.add(theta, g, alpha=-lr), (m,)


@dataclass(frozen=True)
class Adam:
    """Adam, as ``torch.optim.Adam``, with ``eps_root`` besides.

        g ← g + λθ,   m ← β₁m + (1-β₁)g,   v ← β₂v + (1-β₂)g²,
        θ ← θ - η (m / (1-β₁ᵗ)) / (√(v / (1-β₂ᵗ) + ε_root) + ε)

    Args:
        lr: η, before the schedule's multiplier.
        beta1, beta2: decay of the two moments.
        eps: ε, outside the square root.
        eps_root: ε_root, inside it; a value around 1e-8 makes a run much smoother in its data
            weights where gradients are small.
        weight_decay: λ, coupled in Adam, decoupled (θ ← θ - ηλθ first) in AdamW.
        groups: parameters with other hyperparameters.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 0.0
    groups: tuple[Group, ...] = ()
    elementwise: ClassVar[bool] = True
    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        check_hyperparameters(
            self,
            lr=(0, INF),
            beta1=(0, BELOW_ONE),
            beta2=(0, BELOW_ONE),
            eps=(0, INF),
            eps_root=(0, INF),
            weight_decay=(0, INF),
        )

    def slot_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def of_parameter(self, name: str, shape: torch.Size) -> "Adam":
        rule: Adam = in_group(self, name)
        return rule

    def rule(
        self, lr: float, step: int, theta: Tensor, g: Tensor, slots: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        m, v = slots
        if self.weight_decay and self.decoupled:
            theta = theta * (1 - lr * self.weight_decay)
        elif self.weight_decay:
            g = torch.add(g, theta, alpha=self.weight_decay)
        m = torch.lerp(m, g, 1 - self.beta1)
        v = torch.addcmul(v * self.beta2, g, g, value=1 - self.beta2)
        v_hat = v / (1 - self.beta2 ** (step + 1))
        denominator = root(v_hat + self.eps_root if self.eps_root else v_hat) + self.eps
        theta = torch.addcdiv(theta, m, denominator, value=-lr / (1 - self.beta1 ** (step + 1)))
        return theta, (m, v)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``: see `Adam`."""

    weight_decay: float = 1e-2
    decoupled: ClassVar[bool] = True


@dataclass(frozen=True)
class Segment:
    """A stretch of the flat state that one rule with one set of hyperparameters updates."""

    start: int
    stop: int
    shape: torch.Size
    rule: Optimizer

    def of(self, flat: Tensor) -> Tensor:
        """This stretch of a flat vector, in the shape that the rule takes."""
        return flat[self.start : self.stop].view(self.shape)


def ordered(optimizer: Optimizer, layout: Layout) -> tuple[str, ...]:
    """The names of a layout, those of one rule side by side, so that they make one segment."""
    rules: list[Optimizer] = []
    places = []
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        rule = optimizer.of_parameter(name, shape)
        if rule not in rules:
            rules.append(rule)
        places.append(rules.index(rule))
    pairs = sorted(zip(places, layout.names, strict=True), key=lambda pair: pair[0])
    return tuple(name for _, name in pairs)


def segments(optimizer: Optimizer, layout: Layout) -> tuple[Segment, ...]:
    """The stretches of a layout, as `ordered` puts it."""
    found: list[Segment] = []
    spans = zip(layout.names, layout.shapes, layout.offsets, layout.offsets[1:], strict=False)
    for name, shape, start, stop in spans:
        rule = optimizer.of_parameter(name, shape)
        if rule.elementwise and found and found[-1].rule == rule:
            start = found.pop().start
        flat = torch.Size([stop - start])
        found.append(Segment(start, stop, flat if rule.elementwise else shape, rule))
    return tuple(found)


def norm(g: Tensor) -> Tensor:
    """‖g‖, with derivative 0 at g = 0."""
    return root(g.dot(g))


def clip_factor(g_norm: Tensor, clip_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies a gradient of this norm by."""
    return (clip_norm / (g_norm + 1e-6)).clamp(max=1.0)
