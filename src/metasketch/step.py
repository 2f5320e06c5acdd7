"""One training step as a map of states: forward, and its derivative in both directions.

    advance:  s_t -> s_{t+1}
    push:     tangents      (s_dot_t, w_dot)  ->  s_dot_{t+1}
    pull:     cotangents    s_bar_{t+1}       ->  (s_bar_t, w_bar)

`push` and `pull` read as mirror images: the loss gradient's Hessian product, then the update's
Jacobian; and the same two transposed, in the other order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        layout = recipe.functional.ordered(names).layout
        model = recipe.functional.ordered(optim.ordered(recipe.optimizer, layout))
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
        # The update reads a gradient before it writes parameters over it.
        total = self._total(state, t, w, batch, None if into is None else into.params)[0]
        self._check_finite(total, t)
        params, slots = self.update.apply(state, total.g, t, into)
        return State(params, total.stats, slots, total.counts)

    def _total(
        self, state: State, t: int, w: Tensor, batch: Batch, into: Tensor | None = None
    ) -> tuple[Gradient, Tensor | float, list[tuple[Part, State]]]:
        """The normalised gradient, what it was divided by, and where each microbatch started."""
        starts: list[tuple[Part, State]] = []
        found: Gradient | None = None
        at = state
        for part in parts(self.recipe, t, batch, w):
            starts.append((part, at))
            new = gradient(self.function, part, at, into if found is None else None)
            found = _add(found, new)
            at = State(state.params, new.stats, state.slots, new.counts)
        assert found is not None
        return *_normalized(found, len(starts), t), starts

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
        found: Gradient | None = None
        at, r_dot, number = state, dot.stats, 0
        g_dot.zero_()
        for part in parts(self.recipe, t, batch, w):
            linear = IMPLEMENTATIONS[how](self.function, part, at, True)
            r_dot = linear.push(dot.params, r_dot, w_dot[:, part.rows], g_dot)
            new = linear.gradient()
            del linear
            found, number = _add(found, new), number + 1
            at = State(state.params, new.stats, state.slots, new.counts)
        assert found is not None
        total, count = _normalized(found, number, t)
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
            total = linear.gradient()
            count = total.count
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


def _add(total: Gradient | None, part: Gradient) -> Gradient:
    """The sum over microbatches so far, in the memory of the first."""
    if total is None:
        return part
    losses = torch.cat([total.losses, part.losses])
    return Gradient(total.g.add_(part.g), total.count + part.count, part.stats, part.counts, losses)


def _normalized(total: Gradient, number: int, t: int) -> tuple[Gradient, Tensor | float]:
    """The gradient of a whole step of so many microbatches, and what divides their sum still."""
    if number == 1:
        return total, total.count
    count = require_positive(total.count, t)
    return replace(total, g=total.g.div_(count)), count


def _divided_(block: Tensor, count: Tensor | float) -> Tensor:
    """A block divided in place by what divides a step's sum."""
    return block if isinstance(count, float) and count == 1.0 else block.div_(count)
