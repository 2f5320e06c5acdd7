"""One training step of many runs at once: the same batch, each with its own state and data weights.

The layers of b small models become batched operations (`torch.func.vmap`), which cost little more
than those of one where overhead dominates. Dropout draws the mask that a run alone would draw;
BatchNorm keeps statistics for each run.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metasketch.data import Batch
from metasketch.gradient import LossFunction, Part, parts
from metasketch.state import State
from metasketch.step import Step


@dataclass(frozen=True)
class Gradients:
    """What one microbatch adds to a step of b runs; see `metasketch.gradient.Gradient`.

    Attributes:
        g: unnormalised gradients, (b, P).
        counts: what is left to divide them by, (b,).
        losses: their sums without weights, (b,), to see where they stop being finite.
        stats: BatchNorm statistics afterwards, (b, R), and its numbers of batches.
    """

    g: Tensor
    counts: Tensor
    losses: Tensor
    stats: Tensor
    batches_seen: dict[str, int]


def repeated(state: State, b: int) -> State:
    """b copies of a state, as a block (b, ·)."""
    slots = {name: slot.repeat(b, 1) for name, slot in state.slots.items()}
    return State(state.params.repeat(b, 1), state.stats.repeat(b, 1), slots, state.counts)


def gradients(function: LossFunction, part: Part, states: State, W: Tensor) -> Gradients:
    """First derivatives of one microbatch for b runs with weights W (b, m). Cost: b."""
    model = function.functional

    def total(theta: Any, stats: Any, w: Tensor) -> Any:
        # Not as a first derivative alone: the fused kernels know no batches of weights.
        value = function(part, theta, stats, states, w)
        count = w.new_ones(()) * value.count
        return value.total, (value.losses.sum(), count, tuple(value.stats))

    one = torch.func.grad(total, has_aux=True)
    with warnings.catch_warnings():
        # Operations without a rule of their own are looped over: right, and measured to be slow.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        g, (losses, counts, stats) = torch.func.vmap(one, randomness="same")(
            tuple(model.layout.views(states.params)),
            tuple(model.stats_layout.views(states.stats)),
            W,
        )
    return Gradients(
        model.layout.pack(g, (len(W),)),
        counts,
        losses,
        model.stats_layout.pack(stats, (len(W),)) if stats else states.stats,
        function.functional.statistics_after()[1],
    )


def advance(step: Step, states: State, t: int, W: Tensor, batch: Batch) -> tuple[State, Tensor]:
    """The states of b runs with data weights W (b, N) after step t. Cost: b.

    Returns:
        The states, and which of the runs are still finite, (b,). The others go on without a word:
        what is not a number stays in its own row.
    """
    recipe = step.recipe
    W = W[:, recipe.order.batches[t].to(W.device)]
    found: list[Gradients] = []
    at = states
    for part in parts(recipe, t, batch, W.new_ones(recipe.num_examples)):
        found.append(gradients(step.function, part, at, W[:, part.rows]))
        at = State(states.params, found[-1].stats, states.slots, found[-1].batches_seen)
    g = found[0].g if len(found) == 1 else torch.stack([f.g for f in found]).sum(0)
    if not part.whole:
        g = g / sum(f.counts for f in found)[:, None]  # type: ignore[index]
    finite = torch.isfinite(sum(f.losses for f in found) + g.sum(1))
    params, slots = step.update.apply_rows(states, g, t)
    return State(params, at.stats, slots, at.counts), finite
