"""The update half of a step, (θ, g, slots) -> (θ', slots'), and its Jacobian on blocks.

The Jacobian comes from autograd on the optimiser's rule. For an elementwise rule it is diagonal:
its few coefficients are found once a step, and a row, in either direction, then costs one
multiplication for each. `push` and `pull` read the same coefficients, so they are adjoint by
construction.
"""

from collections.abc import Iterator, Sequence
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

    def _rule(self, segment: Segment, t: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        theta, g, *slots = inputs
        rate = segment.rule.lr * self.rates[t]
        theta, slots_after = segment.rule.rule(rate, t, theta, g, tuple(slots))
        return [theta, *slots_after]

    @torch.no_grad()
    def apply(
        self, state: State, g: Tensor, t: int, into: State | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Next parameters and slots, in the memory of a state that nobody needs, if given one."""
        if self.clip_norm is not None:
            g = g * optim.clip_factor(optim.norm(g), self.clip_norm)
        before = [state.params, g, *(state.slots[name] for name in self.slot_names)]
        if into is None:
            after = [torch.empty_like(state.params) for _ in (0, *self.slot_names)]
        else:
            after = [into.params, *(into.slots[name] for name in self.slot_names)]
        for segment in self.segments:
            for piece in _pieces(segment, g):
                outputs = self._rule(piece, t, [piece.of(x) for x in before])
                _assign([piece.of(x) for x in after], outputs)
        return after[0], dict(zip(self.slot_names, after[1:], strict=True))

    @torch.no_grad()
    def apply_rows(self, states: State, g: Tensor, t: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The same for b states, (b, P), which share nothing but the rule."""
        if self.clip_norm is not None:
            norms = optim.root(g.square().sum(1))
            g = g * optim.clip_factor(norms, self.clip_norm)[:, None]
        before = [states.params, g, *(states.slots[name] for name in self.slot_names)]
        after = [torch.empty_like(g) for _ in (0, *self.slot_names)]
        for segment in self.segments:
            for rows, piece in _blocks(segment, g):
                outputs = self._rule(piece, t, [_cut(x, rows, piece) for x in before])
                _assign([_cut(x, rows, piece) for x in after], outputs)
        return after[0], dict(zip(self.slot_names, after[1:], strict=True))

    def linearize(self, state: State, g: Tensor, t: int) -> "UpdateJacobian":
        """The Jacobian at a state and a gradient (before clipping)."""
        clip = None
        if self.clip_norm is not None:
            clip = ClipJacobian.at(g, self.clip_norm)
            g = g * clip.factor
        blocks: list[DiagonalJacobian | DenseJacobian] = []
        whole = [state.params, g, *(state.slots[name] for name in self.slot_names)]
        for segment in self.segments:
            inputs = [segment.of(x).detach().requires_grad_() for x in whole]
            with torch.enable_grad():
                outputs = self._rule(segment, t, inputs)
            kind = DiagonalJacobian if segment.rule.elementwise else DenseJacobian
            blocks.append(kind.of(inputs, outputs))
        return UpdateJacobian(self, tuple(blocks), clip)


_PIECE = 1 << 18
"""Entries of an elementwise update at once, so that its intermediate values stay in the cache."""


def _pieces(segment: Segment, like: Tensor) -> Iterator[Segment]:
    """A segment in pieces of a size that suits the device."""
    if not segment.rule.elementwise or like.is_cuda:
        yield segment
        return
    for start in range(segment.start, segment.stop, _PIECE):
        stop = min(start + _PIECE, segment.stop)
        yield Segment(start, stop, torch.Size([stop - start]), segment.rule)


def _blocks(segment: Segment, like: Tensor) -> Iterator[tuple[slice, Segment]]:
    """A segment of b rows, in blocks of a suitable size; row by row where entries of a rule mix."""
    for piece in _pieces(segment, like):
        at_once = max(1, _PIECE // (piece.stop - piece.start)) if piece.rule.elementwise else 1
        for start in range(0, len(like), at_once):
            yield slice(start, start + at_once), piece


def _cut(x: Tensor, rows: slice, segment: Segment) -> Tensor:
    """A segment of some rows: as they lie for an elementwise rule, else one in its own shape."""
    block = x[rows, segment.start : segment.stop]
    return block if segment.rule.elementwise else block.view(segment.shape)


@dataclass(frozen=True)
class UpdateJacobian:
    """d(θ', slots') / d(θ, g, slots), applied to blocks in both directions.

    Blocks are changed in place and row by row, so that what a row needs stays in the cache and a
    sweep allocates nothing of the size of a block.
    """

    update: Update
    blocks: "tuple[DiagonalJacobian | DenseJacobian, ...]"
    clip: "ClipJacobian | None"

    def push(self, dot: State, g_dot: Tensor) -> None:
        """Turn tangents of (θ, slots) into those of (θ', slots'), given the gradient's."""
        if self.clip is not None:
            self.clip.apply_(g_dot)
        outputs = [dot.params, *(dot.slots[name] for name in self.update.slot_names)]
        inputs = [dot.params, g_dot, *outputs[1:]]
        for segment, block in zip(self.update.segments, self.blocks, strict=True):
            at = slice(segment.start, segment.stop)
            for i in range(len(g_dot)):
                rows = block.push([x[i, at] for x in inputs])
                _assign([x[i, at] for x in outputs], rows)

    def pull(self, bar: State, g_bar: Tensor) -> None:
        """Turn cotangents of (θ', slots') into those of (θ, slots), and write the gradient's."""
        outputs = [bar.params, *(bar.slots[name] for name in self.update.slot_names)]
        inputs = [bar.params, g_bar, *outputs[1:]]
        for segment, block in zip(self.update.segments, self.blocks, strict=True):
            at = slice(segment.start, segment.stop)
            for i in range(len(g_bar)):
                rows = block.pull([x[i, at] for x in outputs])
                _assign([x[i, at] for x in inputs], rows)
        if self.clip is not None:
            self.clip.apply_(g_bar)


def _assign(targets: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    for target, value in zip(targets, values, strict=True):
        if value is not None:
            target.copy_(value)


Coefficient = Tensor | float
"""A diagonal: a vector, or one number where all entries are equal (as for SGD)."""


@dataclass(frozen=True)
class DiagonalJacobian:
    """The Jacobian of an elementwise rule: ``coefficients[out][in]``; 0.0 where it vanishes."""

    coefficients: list[list[Coefficient]]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> "DiagonalJacobian":
        rows: list[list[Coefficient]] = []
        for output in outputs:
            row: list[Tensor | None] = [None] * len(inputs)
            if output.requires_grad:
                ones = torch.ones_like(output)
                row = list(torch.autograd.grad(output, inputs, ones, True, allow_unused=True))
            rows.append([0.0 if c is None else _simplest(c) for c in row])
        return cls(rows)

    def push(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """New values of (θ, slots) from (θ, g, slots); None for one that stays as it is."""
        return [
            _combine(inputs, row, own=0 if out == 0 else out + 1)
            for out, row in enumerate(self.coefficients)
        ]

    def pull(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """New values of (θ, g, slots) from (θ, slots); None for one that stays as it is."""
        columns = zip(*self.coefficients, strict=True)
        own = (0, None, *range(1, len(outputs)))
        return [_combine(outputs, column, o) for column, o in zip(columns, own, strict=True)]


def _simplest(coefficient: Tensor) -> Coefficient:
    low, high = torch.aminmax(coefficient)
    return float(low) if bool(low == high) else coefficient


def _combine(
    rows: Sequence[Tensor], coefficients: Sequence[Coefficient], own: int | None
) -> Tensor | None:
    """Σ coefficient · row, or None where that is the row ``own`` itself."""
    constants = [c if isinstance(c, float) else None for c in coefficients]
    if own is not None and constants == [float(i == own) for i in range(len(rows))]:
        return None
    total: Tensor | None = None
    for row, c in zip(rows, coefficients, strict=True):
        if isinstance(c, float) and c == 0.0:
            continue
        if total is None:
            total = row * c
        elif isinstance(c, float):
            total = torch.add(total, row, alpha=c)
        else:
            total = torch.addcmul(total, row, c)
    return torch.zeros_like(rows[0]) if total is None else total


@dataclass(frozen=True)
class DenseJacobian:
    """The Jacobian of any rule, applied through its graph."""

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

    def push(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        # The pull is linear in its cotangent u, so its own pull in u is the push.
        u = [torch.zeros_like(x, requires_grad=True) for x in self.outputs]
        pulled = self._vjp(u, create_graph=True)
        shaped = [x.view(y.shape) for x, y in zip(inputs, self.inputs, strict=True)]
        pushed = torch.autograd.grad(pulled, u, shaped, allow_unused=True, materialize_grads=True)
        return [x.reshape(-1) for x in pushed]

    def pull(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        shaped = [x.view(y.shape) for x, y in zip(outputs, self.outputs, strict=True)]
        return [x.reshape(-1) for x in self._vjp(shaped, create_graph=False)]


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

    def apply_(self, block: Tensor) -> None:
        along = block @ self.g
        block.mul_(self.factor).addr_(along, self.g, alpha=2 * float(self.slope))
