"""A run that was trained elsewhere: its checkpoints, without the way between them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metasketch import checkpoints
from metasketch.errors import ArgumentError
from metasketch.layout import Layout
from metasketch.memory import Budget, Sizes
from metasketch.probe import probe
from metasketch.recipe import Recipe, weights_of
from metasketch.run import Run, computing_as
from metasketch.state import State
from metasketch.step import Step
from metasketch.trajectory import Trajectory


def attach(
    recipe: Recipe,
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    weights: Any = None,
    memory: int | float | str = "4GiB",
) -> Run:
    """A run known by its checkpoints alone: `attribute` takes it with ``method="prior"``.

    Args:
        recipe: what was trained, as far as it is known: the model, loss and data are used, and
            the order, which says which examples were seen.
        states: the trained weights by name, as ``model.state_dict()`` gives them; or those of
            several checkpoints in the order of training, the last one final.
        weights: the data weights, (N,); ones by default.
        memory: budget for gradients.

    Returns:
        A run that has a final state and no sweeps. Cost: one gradient of a microbatch.
    """
    given = [states] if isinstance(states, Mapping) else list(states)
    if not given:
        raise ArgumentError("states is empty: give the weights of the final checkpoint at least")
    budget, num_threads = Budget.parse(memory), torch.get_num_threads()
    with computing_as(recipe, num_threads):
        w = weights_of(recipe, weights)
        first = probe(recipe, w)
        step = Step.of(recipe, first.used, first.fused)
        found = [_state(step, named, number) for number, named in enumerate(given)]
    T = recipe.num_steps
    trajectory = Trajectory(step, w, checkpoints.plan(T, T))
    final = found.pop()
    for number, state in enumerate(found):
        trajectory.memory[round(T * (number + 1) / len(given))] = state
    item = final.params.element_size()
    sizes = Sizes(final.nbytes, final.params.numel() * item, first.graph_bytes, len(w) * item)
    return Run(recipe, trajectory, final, budget, sizes, num_threads, most_rows=1, attached=True)


def _state(step: Step, named: Mapping[str, Any], number: int) -> State:
    """A checkpoint as a flat state; the optimiser's memory is not known."""
    initial = step.initial()
    counts = {n: int(named.get(n, count)) for n, count in initial.counts.items()}
    params = _flat(step.model.layout, named, initial.params, number)
    stats = _flat(step.model.stats_layout, named, initial.stats, number)
    return State(params, stats, {}, counts)


def _flat(layout: Layout, named: Mapping[str, Any], like: Tensor, number: int) -> Tensor:
    tensors = []
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in named:
            raise ArgumentError(
                f"states[{number}] has no {name!r}: give the whole state_dict of the trained model"
            )
        tensor = torch.as_tensor(named[name]).detach().to(like)
        if tensor.shape != shape:
            raise ArgumentError(
                f"states[{number}][{name!r}] has shape {tuple(tensor.shape)}; the recipe's model "
                f"has {tuple(shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ArgumentError(f"states[{number}][{name!r}] holds NaN or infinity")
        tensors.append(tensor)
    return layout.pack(tensors) if tensors else like.clone()
