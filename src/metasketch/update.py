"""The update half of a step, (θ, g, slots) -> (θ', slots'), and its Jacobian on blocks.

The Jacobian comes from autograd on the optimiser's rule. For an elementwise rule it is diagonal:
its few coefficient vectors are found once a step, and a block of any number of rows, in either
direction, then costs one multiplication for each of them. `push` and `pull` read the same
coefficients, so they are adjoint by construction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasketch import optim
from metasketch.optim import Segment
from metasketch.state import State


@dataclass(frozen=True)
class Update:
    """The optimiser of a recipe, laid over the flat state."""

    segments: tuple[Segment, ...]
    slot_names: tuple[str, ...]
    rates: tuple[float, ...]
    clip_norm: float | None

    def init(self, params: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(params) for name in self.slot_names}

    def _inputs(self, segment: Segment, state: State, g: Tensor) -> list[Tensor]:
        whole = [state.params, g, *(state.slots[name] for name in self.slot_names)]
        return [x[segment.start : segment.stop].view(segment.shape) for x in whole]

    def _rule(self, segment: Segment, t: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        theta, g, *slots = inputs
        rate = segment.rule.lr * self.rates[t]
        theta, slots_after = segment.rule.rule(rate, t, theta, g, tuple(slots))
        return [theta, *slots_after]

    @torch.no_grad()
    def apply(self, state: State, g: Tensor, t: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Next parameters and slots."""
        if self.clip_norm is not None:
            g = g * optim.clip_factor(optim.norm(g), self.clip_norm)
        parts = [self._rule(s, t, self._inputs(s, state, g)) for s in self.segments]
        if len(parts) == 1:
            params, *slots = (out.reshape(-1) for out in parts[0])
        else:
            params, *slots = (
                torch.cat([out.reshape(-1) for out in outs]) for outs in zip(*parts, strict=True)
            )
        return params, dict(zip(self.slot_names, slots, strict=True))

    def linearize(self, state: State, g: Tensor, t: int) -> "UpdateJacobian":
        """The Jacobian at a state and a gradient (before clipping)."""
        clip = None
        if self.clip_norm is not None:
            clip = ClipJacobian.at(g, self.clip_norm)
            g = g * clip.factor
        blocks: list[DiagonalJacobian | DenseJacobian] = []
        for segment in self.segments:
            inputs = [x.detach().requires_grad_() for x in self._inputs(segment, state, g)]
            with torch.enable_grad():
                outputs = self._rule(segment, t, inputs)
            kind = DiagonalJacobian if segment.rule.elementwise else DenseJacobian
            blocks.append(kind.of(inputs, outputs))
        return UpdateJacobian(self, tuple(blocks), clip)


@dataclass(frozen=True)
class UpdateJacobian:
    """d(θ', slots') / d(θ, g, slots), applied to blocks in both directions."""

    update: Update
    blocks: "tuple[DiagonalJacobian | DenseJacobian, ...]"
    clip: "ClipJacobian | None"

    def push(self, dot: State, g_dot: Tensor) -> State:
        """Tangents of (θ', slots') from those of (θ, slots) and of the gradient."""
        if self.clip is not None:
            g_dot = self.clip.apply(g_dot)
        names = self.update.slot_names
        inputs = [dot.params, g_dot, *(dot.slots[name] for name in names)]
        outputs = [torch.empty_like(dot.params) for _ in range(1 + len(names))]
        for segment, block in zip(self.update.segments, self.blocks, strict=True):
            at = slice(segment.start, segment.stop)
            block.push([x[:, at] for x in inputs], [x[:, at] for x in outputs])
        params, *slots = outputs
        return State(params, dot.stats, dict(zip(names, slots, strict=True)))

    def pull(self, bar: State) -> tuple[State, Tensor]:
        """Cotangents of (θ, slots) and of the gradient from those of (θ', slots')."""
        names = self.update.slot_names
        outputs = [bar.params, *(bar.slots[name] for name in names)]
        inputs = [torch.empty_like(bar.params) for _ in range(2 + len(names))]
        for segment, block in zip(self.update.segments, self.blocks, strict=True):
            at = slice(segment.start, segment.stop)
            block.pull([x[:, at] for x in outputs], [x[:, at] for x in inputs])
        params, g_bar, *slots = inputs
        if self.clip is not None:
            g_bar = self.clip.apply(g_bar)
        return State(params, bar.stats, dict(zip(names, slots, strict=True))), g_bar


@dataclass(frozen=True)
class DiagonalJacobian:
    """The Jacobian of an elementwise rule: ``coefficients[out][in]`` (n,), None where zero."""

    coefficients: list[list[Tensor | None]]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> "DiagonalJacobian":
        rows: list[list[Tensor | None]] = []
        for output in outputs:
            row: list[Tensor | None] = [None] * len(inputs)
            if output.requires_grad:
                ones = torch.ones_like(output)
                row = list(torch.autograd.grad(output, inputs, ones, True, allow_unused=True))
            rows.append(row)
        return cls(rows)

    def push(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for output, row in zip(outputs, self.coefficients, strict=True):
            _combine(output, inputs, row)

    def pull(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for i, target in enumerate(inputs):
            _combine(target, outputs, [row[i] for row in self.coefficients])


def _combine(target: Tensor, blocks: Sequence[Tensor], row: Sequence[Tensor | None]) -> None:
    """target ← Σ coefficient · block, over the coefficients that are not zero."""
    terms = [(x, c) for x, c in zip(blocks, row, strict=True) if c is not None]
    if not terms:
        target.zero_()
        return
    torch.mul(terms[0][0], terms[0][1], out=target)
    for block, coefficient in terms[1:]:
        target.addcmul_(block, coefficient)


@dataclass(frozen=True)
class DenseJacobian:
    """The Jacobian of any rule, applied row by row through its graph."""

    inputs: list[Tensor]
    outputs: list[Tensor]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> "DenseJacobian":
        return cls(list(inputs), list(outputs))

    def _vjp(self, outputs_bar: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
        grads = torch.autograd.grad(
            self.outputs,
            self.inputs,
            list(outputs_bar),
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        return list(grads)

    def push(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        # The pull is linear in its cotangent u, so its own pull in u is the push.
        u = [torch.zeros_like(x, requires_grad=True) for x in self.outputs]
        pulled = self._vjp(u, create_graph=True)
        for i in range(len(outputs[0])):
            rows = [x[i].view(y.shape) for x, y in zip(inputs, self.inputs, strict=True)]
            pushed = torch.autograd.grad(
                pulled, u, rows, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for target, row in zip(outputs, pushed, strict=True):
                target[i].copy_(row.reshape(-1))

    def pull(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for i in range(len(outputs[0])):
            rows = [x[i].view(y.shape) for x, y in zip(outputs, self.outputs, strict=True)]
            for target, row in zip(inputs, self._vjp(rows, create_graph=False), strict=True):
                target[i].copy_(row.reshape(-1))


@dataclass(frozen=True)
class ClipJacobian:
    """The Jacobian of g ↦ s(‖g‖²) g, which is s I + 2 s' g gᵀ: symmetric, one for both modes."""

    factor: Tensor
    slope: Tensor
    g: Tensor

    @classmethod
    def at(cls, g: Tensor, clip_norm: float) -> "ClipJacobian":
        squared = g.dot(g).detach().requires_grad_()
        with torch.enable_grad():
            factor = optim.clip_factor(optim.root(squared), clip_norm)
        (slope,) = torch.autograd.grad(factor, squared)
        return cls(factor.detach(), slope, g)

    def apply(self, block: Tensor) -> Tensor:
        return torch.addr(block * self.factor, block @ self.g, self.g, alpha=2 * float(self.slope))
