"""The naive oracle: the whole unrolled run as one autograd graph.

Nothing clever happens here: no second-order trick, no Jacobian of an update, no checkpoints. It
shares with the library only the loss, the rules of the optimisers and the order of the data. Its
memory grows with the number of steps, so it is for tests, and for reading.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metasketch import optim
from metasketch.environment import computing
from metasketch.gradient import parts
from metasketch.probe import probe
from metasketch.recipe import Recipe, weights_of
from metasketch.state import State
from metasketch.step import Step


def unroll(recipe: Recipe, w: Tensor) -> tuple[Step, Tensor, Tensor]:
    """The final parameters (P,) and statistics (R,) as one graph that ends in w."""
    step = Step.of(recipe, probe(recipe, w.detach()).used)
    model = step.model
    state = step.initial()
    theta, stats = state.params.requires_grad_(), state.stats
    slots, counts = dict(state.slots), state.counts
    for t in range(recipe.num_steps):
        total, count = theta.new_zeros(()), theta.new_zeros(())
        for part in parts(recipe, t, step.batches.load(t), w):
            at = State(theta, stats, slots, counts)
            r = model.stats_layout.views(stats)
            value = step.function(part, model.layout.views(theta), r, at, part.w)
            total, count = total + value.total, count + value.count
            stats = torch.cat([s.reshape(-1) for s in value.stats]) if value.stats else stats
            counts = value.counts
        (g,) = torch.autograd.grad(total / count, theta, create_graph=True)
        if recipe.clip_norm is not None:
            g = g * optim.clip_factor(optim.norm(g), recipe.clip_norm)
        theta, slots = _update(step, t, theta, g, slots)
    return step, theta, stats


def _update(
    step: Step, t: int, theta: Tensor, g: Tensor, slots: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The optimiser's rules over every stretch of the state, inside the graph."""
    names = step.update.slot_names
    outputs = []
    for segment in step.update.segments:
        whole = [theta, g, *(slots[name] for name in names)]
        inputs = [segment.of(x) for x in whole]
        rate = segment.rule.lr * step.recipe.rates[t]
        after, slots_after = segment.rule.rule(rate, t, inputs[0], inputs[1], tuple(inputs[2:]))
        outputs.append([x.reshape(-1) for x in (after, *slots_after)])
    params, *rest = (torch.cat(list(parts)) for parts in zip(*outputs, strict=True))
    return params, dict(zip(names, rest, strict=True))


def replay(recipe: Recipe, theta_bar: Mapping[str, Tensor], weights: Any = None) -> Tensor:
    """theta_bar^T J, (b, N), by one backward pass a row through the whole run's graph."""
    with computing(recipe.device, torch.get_num_threads()):
        w = weights_of(recipe, weights).requires_grad_()
        step, theta, stats = unroll(recipe, w)
        named = step.model.layout.unpack(theta) | step.model.stats_layout.unpack(stats)
        rows = []
        for i in range(len(next(iter(theta_bar.values())))):
            pairs = [(named[n] * bar[i]).sum() for n, bar in theta_bar.items() if n in named]
            grads = torch.autograd.grad(sum(pairs, start=w.sum() * 0), w, retain_graph=True)
            rows.append(grads[0])
        return torch.stack(rows)


def forward(recipe: Recipe, w_dot: Tensor, weights: Any = None) -> tuple[Tensor, Tensor]:
    """J w_dot^T, (b, P) and (b, R), as the derivative of the backward pass in its cotangent."""
    with computing(recipe.device, torch.get_num_threads()):
        w = weights_of(recipe, weights).requires_grad_()
        _, theta, stats = unroll(recipe, w)
        final = torch.cat([theta, stats])
        bar = torch.zeros_like(final, requires_grad=True)
        (row,) = torch.autograd.grad(final, w, bar, create_graph=True)
        dots = [torch.autograd.grad(row, bar, dot, retain_graph=True)[0] for dot in w_dot]
        params, rest = torch.stack(dots).split([len(theta), len(stats)], dim=1)
        return params, rest
