"""One training step as a map of states: forward, and its derivative in both directions.

    advance:  s_t -> s_{t+1}
    push:     tangents      (s_dot_t, w_dot)  ->  s_dot_{t+1}
    pull:     cotangents    s_bar_{t+1}       ->  (s_bar_t, w_bar)

`push` and `pull` read as mirror images: the loss gradient's Hessian product, then the update's
Jacobian; and the same two transposed, in the other order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasketch import optim
from metasketch.data import Batch, Batches
from metasketch.errors import NumericalError
from metasketch.functional import FunctionalModel
from metasketch.gradient import (
    IMPLEMENTATIONS,
    Gradient,
    Linearization,
    LossFunction,
    Part,
    gradient,
    parts,
    require_positive,
)
from metasketch.recipe import Recipe
from metasketch.state import State
from metasketch.update import Update


@dataclass(frozen=True)
class Step:
    """The steps of a recipe.

    Attributes:
        recipe: what is trained.
        model: its module as a function, parameters in the order of the flat state.
        update: its optimiser over that state.
        batches: its data.
        fused: training may use torch's fused attention: see `metasketch.gradient.LossFunction`.
    """

    recipe: Recipe
    model: FunctionalModel
    update: Update
    batches: Batches
    fused: bool = False

    @classmethod
    def of(cls, recipe: Recipe, used: Sequence[str] | None = None, fused: bool = False) -> "Step":
        """The steps of a recipe, over the parameters that take part in its loss (all, if None)."""
        names = recipe.functional.layout.names if used is None else used
        ordered = sorted(names, key=lambda name: optim.group_of(recipe.optimizer, name))
        model = recipe.functional.ordered(ordered)
        update = Update(
            optim.segments(recipe.optimizer, model.layout),
            recipe.optimizer.slot_names(),
            recipe.rates,
            recipe.clip_norm,
        )
        batches = Batches(recipe.examples, recipe.order, recipe.augment, recipe.seed, recipe.device)
        return cls(recipe, model, update, batches, fused)

    @property
    def function(self) -> LossFunction:
        return LossFunction(self.recipe, self.model, self.fused)

    def initial(self) -> State:
        """The state before the first step."""
        params, stats, counts = self.model.initial()
        return State(params, stats, self.update.init(params), counts)

    def advance(
        self, state: State, t: int, w: Tensor, batch: Batch, into: State | None = None
    ) -> State:
        """The state after step t, in the memory of ``into``, which is used up. Cost: 1."""
        total = self._total(state, t, w, batch)[0]
        self._check_finite(total, t)
        params, slots = self.update.apply(state, total.g, t, into)
        return State(params, total.stats, slots, total.counts)

    def _total(
        self, state: State, t: int, w: Tensor, batch: Batch
    ) -> tuple[Gradient, Tensor | float, list[tuple[Part, State]]]:
        """The normalised gradient, what it was divided by, and where each microbatch started."""
        starts: list[tuple[Part, State]] = []
        found: list[Gradient] = []
        at = state
        for part in parts(self.recipe, t, batch, w):
            starts.append((part, at))
            found.append(gradient(self.function, part, at))
            at = State(state.params, found[-1].stats, state.slots, found[-1].counts)
        return *_sum(found, t), starts

    def push(
        self,
        state: State,
        t: int,
        w: Tensor,
        batch: Batch,
        dot: State,
        w_dot: Tensor,
        how: str,
        g_dot: Tensor,
    ) -> State:
        """Tangents of s_{t+1} from those of s_t, (b, ·), and of the weights of the batch, (b, m).

        ``dot`` is used up: its memory holds the result. ``g_dot`` is scratch, (b, P).
        Cost: 1 + 2b.
        """
        found: list[Gradient] = []
        at, r_dot = state, dot.stats
        g_dot.zero_()
        for part in parts(self.recipe, t, batch, w):
            linear = IMPLEMENTATIONS[how](self.function, part, at, True)
            r_dot = linear.push(dot.params, r_dot, w_dot[:, part.rows], g_dot)
            found.append(linear.gradient())
            at = State(state.params, found[-1].stats, state.slots, found[-1].counts)
            del linear
        total, count = _sum(found, t)
        jacobian = self.update.linearize(state, total.g, t)
        jacobian.push(dot, _divided_(g_dot, count))
        return State(dot.params, r_dot, dot.slots)

    def pull(
        self,
        state: State,
        t: int,
        w: Tensor,
        batch: Batch,
        bar: State,
        how: str,
        g_bar: Tensor,
    ) -> tuple[State, Tensor]:
        """Cotangents of s_t and of the weights of the batch, (b, m), from those of s_{t+1}.

        ``bar`` is used up: its memory holds the result. ``g_bar`` is scratch, (b, P).
        Cost: 1 + 2b, and one gradient more with microbatches, because the update's Jacobian
        needs the whole gradient before the first of them can be walked back.
        """
        linear: Linearization | None = None
        pieces = list(parts(self.recipe, t, batch, w))
        if len(pieces) == 1:
            linear = IMPLEMENTATIONS[how](self.function, pieces[0], state, False)
            total, count = _sum([linear.gradient()], t)
            starts = [(pieces[0], state)]
        else:
            total, count, starts = self._total(state, t, w, batch)
        jacobian = self.update.linearize(state, total.g, t)
        jacobian.pull(bar, g_bar)
        _divided_(g_bar, count)
        r_bar = bar.stats
        w_bar = g_bar.new_zeros(len(g_bar), pieces[-1].rows.stop)
        for part, at in reversed(starts):
            if linear is None:
                linear = IMPLEMENTATIONS[how](self.function, part, at, False)
            r_bar, w_bar[:, part.rows] = linear.pull(g_bar, r_bar, bar.params)
            linear = None
        return State(bar.params, r_bar, bar.slots), w_bar

    def _check_finite(self, total: Gradient, t: int) -> None:
        if bool(torch.isfinite(total.g.sum() + total.losses.sum())):
            return
        bad = ~torch.isfinite(total.losses)
        if bool(bad.any()) and len(bad) == len(self.recipe.order.batches[t]):
            where = int(torch.nonzero(bad)[0])
            raise NumericalError(
                f"the loss of example {int(self.recipe.order.batches[t][where])} is "
                f"{float(total.losses[where])} at step {t} of {self.recipe.num_steps}: lower the "
                "learning rate or clip gradients (clip_norm), and look at that example"
            )
        if bool(bad.any()):
            raise NumericalError(
                f"the loss is not finite at step {t} of {self.recipe.num_steps}: lower the "
                "learning rate or clip gradients (clip_norm)"
            )
        spans = zip(self.model.layout.names, self.model.layout.views(total.g), strict=True)
        names = [name for name, g in spans if not bool(torch.isfinite(g).all())]
        if not names:
            return  # finite, but with a sum beyond the largest number
        raise NumericalError(
            f"the gradient of {names[0]!r} is not finite at step {t} of {self.recipe.num_steps}: "
            "lower the learning rate, clip gradients (clip_norm), or look for √0 or log 0 in the "
            "loss"
        )


def _sum(found: Sequence[Gradient], t: int) -> tuple[Gradient, Tensor | float]:
    """The gradient of a whole step from those of its microbatches, and what divides it still."""
    if len(found) == 1:
        return found[0], found[0].count
    count = require_positive(sum((p.count for p in found[1:]), start=found[0].count), t)
    g = found[0].g
    for part in found[1:]:
        g = g + part.g
    losses = torch.cat([part.losses for part in found]).detach()
    return Gradient(g / count, count, found[-1].stats, found[-1].counts, losses), count


def _divided_(block: Tensor, count: Tensor | float) -> Tensor:
    """A block divided in place by what divides a step's sum."""
    return block if isinstance(count, float) and count == 1.0 else block.div_(count)
