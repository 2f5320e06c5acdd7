"""The loss of one step, and the second derivatives through which both sweeps pass.

Everything expensive in a step is one scalar function of the parameters θ and running statistics r
(together x), the data weights w, and a multiplier y for each running statistic:

    F(x, w, y) = (1/m) Σ_i w_i ℓ_i(x) + <y, r'(x)>        (at y = 0)

Its gradient holds all that a step computes: ∂F/∂θ is the training gradient, ∂F/∂y the next
statistics. Its Hessian is symmetric, and one product with it serves both modes:

    push:  (θ_dot, r_dot, w_dot, 0)  ->  g_dot in the θ block,  r_dot' in the y block
    pull:  (g_bar, 0, 0, r_bar')     ->  θ_bar, r_bar, w_bar in the θ, r and w blocks

So replay and the forward sweep cost the same, 2 gradients a row beyond the one that is shared.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metasketch.data import Batch, map_tensors, microbatch, tensors_of
from metasketch.errors import LossError, NumericalError
from metasketch.functional import FunctionalModel
from metasketch.randomness import seeded
from metasketch.recipe import Recipe
from metasketch.state import State
from metasketch.tuned import TunedRules


@dataclass(frozen=True)
class Part:
    """One microbatch of one step.

    Attributes:
        rows: which rows of the step's batch these are.
        w: data weights of the rows, (m,).
        whole: this is the whole step, so what F is divided by is known at once.
    """

    t: int
    number: int
    rows: slice
    batch: Batch
    w: Tensor
    whole: bool


def parts(recipe: Recipe, t: int, batch: Batch, w: Tensor) -> Iterator[Part]:
    """The microbatches of a step, with the weights of their examples."""
    w = w[recipe.order.batches[t].to(w.device)]
    m = len(w)
    size = recipe.microbatch or m
    if size >= m:
        rows = slice(0, m)
        yield Part(t, 0, rows, microbatch(batch, 0, rows, m), w, whole=True)
        return
    for number, start in enumerate(range(0, m, size)):
        rows = slice(start, min(start + size, m))
        cut = microbatch(batch, number, rows, m)
        yield Part(t, number, rows, cut, w[rows], whole=False)


@dataclass(frozen=True)
class Evaluation:
    """Σ w_i ℓ_i, what is left to divide it by, the losses, and the statistics afterwards."""

    total: Tensor
    count: Tensor | float
    losses: Tensor
    stats: list[Tensor]
    counts: dict[str, int]


@dataclass(frozen=True)
class LossFunction:
    """The loss of a recipe as a function of parameters, statistics and data weights.

    Attributes:
        fused: first derivatives may use torch's fused attention, which has no second ones. It was
            checked to compute the same function here, and a run records it.
    """

    recipe: Recipe
    functional: FunctionalModel
    fused: bool = False

    def __call__(
        self,
        part: Part,
        params: Sequence[Tensor],
        stats: Sequence[Tensor],
        state: State,
        w: Tensor,
        first_order: bool = False,
    ) -> Evaluation:
        recipe = self.recipe
        keywords = {"step": part.t} if recipe.loss_takes_step else {}
        versions = [t._version for t in tensors_of(part.batch)]
        batch = map_tensors(lambda t: t, part.batch)  # containers that the loss may take apart
        # The fused attention kernels have neither a double backward nor a forward derivative.
        fused = first_order and self.fused
        with (
            seeded(w.device, recipe.seed, "model", part.t, part.number),
            contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH),
            self.functional.bound(params, stats, state.counts, not first_order) as model,
        ):
            if recipe.loss_form == "scalar":
                output = recipe.loss(model, batch, w, **keywords)
            else:
                output = recipe.loss(model, batch, **keywords)
        if [t._version for t in tensors_of(part.batch)] != versions:
            raise LossError(
                f"the loss changes its batch in place (step {part.t}): work on a copy, or sweeps "
                "would see other data than training did"
            )
        total, count, losses = _reduce(output, w, recipe.loss_form == "scalar")
        if part.whole:
            total, count = total / require_positive(count, part.t), 1.0
        return Evaluation(total, count, losses, *self.functional.statistics_after())


def _reduce(output: Any, w: Tensor, scalar: bool) -> tuple[Tensor, Tensor | float, Tensor]:
    """(Σ w_i ℓ_i, normaliser, losses) from what a loss returned, in any of its three forms."""
    m = len(w)
    if scalar:
        if not isinstance(output, Tensor) or output.numel() != 1:
            raise LossError(
                "loss(model, batch, weights) must return one scalar tensor; it returned "
                f"{_describe(output)}"
            )
        return output.reshape(()), 1.0, output.reshape(1)
    if isinstance(output, tuple | list) and len(output) == 2:
        sums, counts = output
        if not all(isinstance(t, Tensor) and t.shape == (m,) for t in (sums, counts)):
            raise LossError(
                f"(sums, counts) must both have shape ({m},), one entry for each example of the "
                f"batch; they are {_describe(sums)} and {_describe(counts)}"
            )
        return (w * sums).sum(), counts.detach().sum().to(w.dtype), sums
    if isinstance(output, Tensor) and output.dim() == 0:
        raise LossError(
            "the loss is already reduced to a scalar: return one loss for each example "
            "(reduction='none'), so that each can carry its data weight"
        )
    if not isinstance(output, Tensor) or output.shape != (m,):
        raise LossError(
            f"the loss must have shape ({m},), one entry for each example of the batch; it is "
            f"{_describe(output)}"
        )
    if not output.is_floating_point():
        raise LossError(f"the loss must be real floating point; it is {output.dtype}")
    return (w * output).sum(), float(m), output


def require_positive(count: Tensor | float, t: int) -> Tensor | float:
    """What a step's loss is divided by."""
    if not count > 0:
        raise NumericalError(
            f"step {t} counts {float(count)} examples or tokens: its loss would be divided by "
            "zero. Leave out batches in which nothing counts"
        )
    return count


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Gradient:
    """What one microbatch adds to a step: unnormalised gradient, count, statistics after it."""

    g: Tensor
    count: Tensor | float
    stats: Tensor
    counts: dict[str, int]
    losses: Tensor


def gradient(
    function: LossFunction, part: Part, state: State, into: Tensor | None = None
) -> Gradient:
    """The first derivative alone, as training needs it, in the memory of ``into``. Cost: 1."""
    model = function.functional
    theta = [view.detach().requires_grad_() for view in model.layout.views(state.params)]
    stats = model.stats_layout.views(state.stats)
    value = function(part, theta, stats, state, part.w, first_order=True)
    require_differentiable(value.total)
    idle = model.idle
    grads = torch.autograd.grad(value.total, [*theta, *idle.values()], allow_unused=True)
    for name, grad in zip(idle, grads[len(theta) :], strict=True):
        if grad is not None:
            raise _now_and_then(name, part.t)
    used = require_used(grads[: len(theta)], model.layout.names, part.t)
    g = model.layout.pack(used, into=into)
    losses = value.losses.detach()
    return Gradient(g, value.count, flat(value.stats, state), value.counts, losses)


def require_differentiable(total: Tensor) -> None:
    """Refuse a loss without a graph."""
    if not total.requires_grad:
        raise LossError(
            "the loss does not depend on the model's trainable parameters: it must compute with "
            "the model that it is given, without torch.no_grad() or detach()"
        )


def require_used(grads: Sequence[Tensor | None], names: Sequence[str], t: int) -> list[Tensor]:
    """Gradients of parameters that took part in the first step have to be there in every step."""
    for name, grad in zip(names, grads, strict=True):
        if grad is None:
            raise _now_and_then(name, t)
    return [g for g in grads if g is not None]


def _now_and_then(name: str, t: int) -> LossError:
    return LossError(
        f"parameter {name!r} takes part in the loss in some steps and not in others (as step {t} "
        "shows), where torch would skip its update: give it a zero share in the loss "
        "(+ 0 * parameter.sum())"
    )


def flat(stats: Sequence[Tensor], state: State) -> Tensor:
    """Statistics end to end, without a graph."""
    if not stats:
        return state.stats
    return torch.cat([s.detach().reshape(-1) for s in stats])


class Linearization(Protocol):
    """The Hessian of F at one microbatch: see the module's docstring. All blocks have b rows."""

    def gradient(self) -> Gradient: ...

    def pull(self, g_bar: Tensor, r_bar: Tensor, theta_bar: Tensor) -> tuple[Tensor, Tensor]:
        """Add to θ_bar, and return (r_bar, w_bar)."""

    def push(self, theta_dot: Tensor, r_dot: Tensor, w_dot: Tensor, g_dot: Tensor) -> Tensor:
        """Add to g_dot, and return r_dot'."""


Linearize = Callable[[LossFunction, Part, State, bool], Linearization]


class DoubleBackward:
    """Reverse over reverse: one graph of the gradient, walked back once for each row.

    Args:
        pushes: whether the graph is for `push` (with the multiplier y) or for `pull`.
        batched: walk back for all rows at once (vmap) instead of one after the other.
        rules: take the second derivatives of common layers from `metasketch.tuned`.
    """

    def __init__(
        self,
        function: LossFunction,
        part: Part,
        state: State,
        pushes: bool,
        batched: bool = False,
        rules: bool = False,
    ) -> None:
        model = function.functional
        self.model, self.state, self.batched = model, state, batched
        self.theta = [v.detach().requires_grad_() for v in model.layout.views(state.params)]
        self.r = [v.detach().requires_grad_() for v in model.stats_layout.views(state.stats)]
        self.w = part.w.detach().requires_grad_()
        with TunedRules() if rules else contextlib.nullcontext():
            self.value = value = function(part, self.theta, self.r, state, self.w)
        total = value.total
        self.y = [torch.zeros_like(r, requires_grad=True) for r in self.r] if pushes else []
        for y, after in zip(self.y, value.stats, strict=False):
            total = total + (y * after).sum()
        inputs = [*self.theta, *self.r, self.w] if pushes else self.theta
        require_differentiable(total)
        grads = list(torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True))
        self.g = require_used(grads[: len(self.theta)], model.layout.names, part.t)
        self.rest = grads[len(self.theta) :]

    def check_twice(self) -> None:
        """Refuse a graph whose walk would leave out a share of the second derivative."""
        if stops_short([*self.g, *self.rest]):
            raise RuntimeError("it goes through a function that is marked @once_differentiable")

    def gradient(self) -> Gradient:
        g = self.model.layout.pack([g.detach() for g in self.g])
        value = self.value
        return Gradient(
            g, value.count, flat(value.stats, self.state), value.counts, value.losses.detach()
        )

    def pull(self, g_bar: Tensor, r_bar: Tensor, theta_bar: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [*self.g, *self.value.stats]
        bars = [*self.model.layout.views(g_bar), *self.model.stats_layout.views(r_bar)]
        w_bar = self.w.new_zeros(len(g_bar), len(self.w))
        before = torch.zeros_like(r_bar)
        self._rows(outputs, bars, [(self.theta, theta_bar), (self.r, before), ([self.w], w_bar)])
        return before, w_bar

    def push(self, theta_dot: Tensor, r_dot: Tensor, w_dot: Tensor, g_dot: Tensor) -> Tensor:
        outputs = [*self.g, *self.rest]
        dots = [*self.model.layout.views(theta_dot), *self.model.stats_layout.views(r_dot), w_dot]
        after = torch.zeros_like(r_dot)
        self._rows(outputs, dots, [(self.theta, g_dot), (self.y, after)])
        return after

    def _rows(
        self,
        outputs: Sequence[Tensor | None],
        blocks: Sequence[Tensor],
        targets: Sequence[tuple[Sequence[Tensor], Tensor]],
    ) -> None:
        """Pull every row of the outputs' blocks back, and add it to the blocks of the targets."""
        pairs = [
            (o, x)
            for o, x in zip(outputs, blocks, strict=True)
            if o is not None and o.requires_grad
        ]
        inputs = [leaf for leaves, _ in targets for leaf in leaves]
        if not pairs or not inputs:
            return
        live = [o for o, _ in pairs]
        walk = functools.partial(
            torch.autograd.grad, live, inputs, retain_graph=True, allow_unused=True
        )
        if self.batched:
            _add(targets, walk([x for _, x in pairs], is_grads_batched=True))
            return
        for i in range(len(blocks[0])):
            row = [(leaves, block[i]) for leaves, block in targets]
            _add(row, walk([x[i] for _, x in pairs]))


def _add(
    targets: Sequence[tuple[Sequence[Tensor], Tensor]], grads: Sequence[Tensor | None]
) -> None:
    """Add gradients of the leaves to where they lie side by side in flat rows or blocks."""
    remaining = iter(grads)
    for leaves, flat in targets:
        start = 0
        for leaf in leaves:
            grad, stop = next(remaining), start + leaf.numel()
            if grad is not None:
                flat[..., start:stop].view(*flat.shape[:-1], *leaf.shape).add_(grad)
            start = stop


class ForwardOverReverse:
    """Forward over reverse: the tangent of the gradient map, all rows at once (vmap of jvp)."""

    def __init__(self, function: LossFunction, part: Part, state: State, pushes: bool) -> None:
        self.function, self.part, self.state = function, part, state
        self.layouts = (function.functional.layout, function.functional.stats_layout)
        self.first: Gradient | None = None

    def gradient(self) -> Gradient:
        if self.first is None:
            self.first = gradient(self.function, self.part, self.state)
        return self.first

    def _gradient_map(self, theta: Any, r: Any, w: Tensor, y: Any) -> Any:
        """(∂F/∂θ, ∂F/∂r, ∂F/∂w, ∂F/∂y)."""

        def total(theta: Any, r: Any, w: Tensor, y: Any) -> Any:
            value = self.function(self.part, theta, r, self.state, w)
            pairing = sum(((a * b).sum() for a, b in zip(y, value.stats, strict=True)), start=0.0)
            return value.total + pairing, tuple(value.stats)

        grads, after = torch.func.grad(total, argnums=(0, 1, 2), has_aux=True)(theta, r, w, y)
        return (*grads, after)

    def _product(self, theta: Tensor, r: Tensor, w: Tensor, y: Tensor) -> Any:
        """The Hessian of F times a block."""
        layout, stats_layout = self.layouts
        state = self.state
        stats = tuple(stats_layout.views(state.stats))
        point = (
            tuple(layout.views(state.params)),
            stats,
            self.part.w,
            tuple(torch.zeros_like(s) for s in stats),
        )
        block = (
            tuple(layout.views(theta)),
            tuple(stats_layout.views(r)),
            w,
            tuple(stats_layout.views(y)),
        )

        def one(*directions: Any) -> Any:
            return torch.func.jvp(self._gradient_map, point, directions)[1]

        return torch.func.vmap(one, randomness="same")(*block)

    def pull(self, g_bar: Tensor, r_bar: Tensor, theta_bar: Tensor) -> tuple[Tensor, Tensor]:
        zeros = self.part.w.new_zeros(len(g_bar), len(self.part.w))
        theta, r, w, _ = self._product(g_bar, torch.zeros_like(r_bar), zeros, r_bar)
        _add([(self.layouts[0].views(self.state.params), theta_bar)], theta)
        return self._pack(r, len(g_bar)), w

    def push(self, theta_dot: Tensor, r_dot: Tensor, w_dot: Tensor, g_dot: Tensor) -> Tensor:
        theta, _, _, y = self._product(theta_dot, r_dot, w_dot, torch.zeros_like(r_dot))
        _add([(self.layouts[0].views(self.state.params), g_dot)], theta)
        return self._pack(y, len(theta_dot))

    def _pack(self, stats: Sequence[Tensor], b: int) -> Tensor:
        if not stats:
            return self.state.stats.new_zeros(b, 0)
        return self.layouts[1].pack(stats, (b,))


def stops_short(gradients: Iterable[Tensor | None]) -> bool:
    """Whether a graph of gradients ends in an operation that can be differentiated only once.

    Torch marks such places with a node that raises when it is reached; a walk to given inputs
    never reaches it, and would leave out its share of the second derivative in silence.
    """
    waiting = [g.grad_fn for g in gradients if g is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if node.name() == "torch::autograd::Error":
            return True
        following = {f for f, _ in node.next_functions} - seen
        seen |= following
        waiting += following
    return False


IMPLEMENTATIONS: dict[str, Linearize] = {
    "loop": DoubleBackward,
    "tuned": functools.partial(DoubleBackward, rules=True),
    "batched": functools.partial(DoubleBackward, batched=True),
    "forward": ForwardOverReverse,
}
"""The implementations of the Hessian product, by the name that a run records."""

VMAPPED = frozenset({"batched", "forward"})
"""Those that hold the intermediate values of all rows of a block at once."""
