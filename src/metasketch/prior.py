"""The prior: surrogates of Y from gradients of single training examples at a few checkpoints.

One gradient for each example and checkpoint, and no sweep. Gradients are streamed: what is held is
their features (n, d), the gradients themselves where these fit into the memory budget, else a
projection of them that does.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from metasketch.example_gradients import (
    ExampleGradients,
    adam_metric,
    exposure,
    gradients_of_training,
    in_blocks,
    visited,
)
from metasketch.query_gradients import QueryGradients, power_of_two
from metasketch.randomness import generator
from metasketch.run import Run
from metasketch.state import State
from metasketch.surrogate import Stack, Surrogate, shapes_of

FRACTIONS = (1.0, 0.4)
"""Where in the run gradients are taken. A third and a fifth checkpoint were tried: they add a
hundredth and nothing, and what they cost shows on short runs."""

_SHARE = 0.25
"""Checkpoints beside the final one are used where all together take at most this share of the
gradients that training took."""

_QUERIES_AT_ONCE = 32


@dataclass(frozen=True)
class CountSketch:
    """A projection R^P -> R^d that keeps inner products on average: each entry goes, with a random
    sign, to a random place. Cost: P operations a row, and nothing is stored but the places."""

    places: Tensor
    signs: Tensor
    width: int

    @classmethod
    def of(cls, P: int, width: int, like: Tensor) -> "CountSketch":
        g = generator("count sketch", P, width)
        places = torch.randint(width, (P,), generator=g)
        signs = torch.randint(2, (P,), generator=g) * 2 - 1
        return cls(places.to(like.device), signs.to(like), width)

    def __call__(self, rows: Tensor) -> Tensor:
        out = rows.new_zeros(len(rows), self.width)
        return out.index_add_(1, self.places, rows * self.signs)


def width_of_features(n: int, P: int, item: int, memory: int | None) -> int:
    """d: P where whole gradients of n examples fit into a quarter of the memory, else less.

    A symmetric matrix of size min(n, d) is decomposed besides, in three times its own memory.

    >>> width_of_features(1000, 10**6, 4, 4 * 2**30)
    268435
    >>> width_of_features(10**6, 10**8, 4, 4 * 2**30)
    268
    """
    if memory is None:
        return P
    fits = memory // 4 // (n * item)
    largest = isqrt(memory // 4 // (3 * 8))
    return max(1, min(P, fits, P if n <= largest else largest))


def checkpoints_of(run: Run) -> list[tuple[int, State]]:
    """States at which gradients are taken, the final one first, with their steps.

    Those that the run keeps and that are nearest to the fractions, as far as a short run allows.
    """
    n, T = len(visited(run)), run.num_steps
    affordable = int(_SHARE * gradients_of_training(run) / n)
    kept = run.trajectory.kept_states()
    chosen: dict[int, State] = {T: run.final}
    for fraction in FRACTIONS[1 : max(1, min(affordable, len(FRACTIONS)))]:
        near = min(kept, key=lambda t: abs(t - fraction * T), default=0)
        if near > 0 and near not in chosen:
            chosen[near] = run.trajectory.kept_state(near)
    return list(chosen.items())


def cost(run: Run, num_checkpoints: int) -> float:
    """What surrogates at so many checkpoints cost, in sweeps: at most one.

    A row of a sweep costs two gradients for each example that a step sees, the floor. The gradient
    of a single example counts as two as well: made apart from others, it costs about that.
    """
    return num_checkpoints * len(visited(run)) / gradients_of_training(run)


def surrogate(
    run: Run, V: QueryGradients, state: State, memory: int | None
) -> Generator[int, None, Surrogate]:
    """The surrogates of one checkpoint; yields after each block of examples.

    Cost: one gradient for each example, and one for each query where V is not held.
    """
    seen, like = visited(run), state.params
    n, P, item = len(seen), run.num_params, like.element_size()
    width = width_of_features(n, P, item, memory)
    sketch = CountSketch.of(P, width, like) if width < P else None
    metric = adam_metric(run, state)

    def features(rows: Tensor) -> Tensor:
        rows = rows if metric is None else rows * metric
        return rows if sketch is None else sketch(rows)

    Phi = like.new_empty(n, width)
    sizes = torch.zeros(run.num_examples, dtype=torch.float64)
    gradients = ExampleGradients(run, state, _at_once(run, memory))
    for places, rows in in_blocks(gradients, seen):
        Phi[places] = features(rows)
        sizes[seen[places]] = torch.linalg.vector_norm(rows, dim=1).double().cpu()
        yield len(places)
    cross = torch.empty(V.num_queries, n, dtype=torch.float64, device=like.device)
    for some in torch.arange(V.num_queries).split(_QUERIES_AT_ONCE):
        block = torch.stack([V.one(q)[:P] for q in some.tolist()])
        scale = power_of_two(torch.linalg.vector_norm(block, dim=1))[:, None]
        cross[some] = (features((block / scale).to(like)) @ Phi.T).double() * scale
    return Surrogate.of(cross, Phi, run.weights[seen], seen, sizes)


def _at_once(run: Run, memory: int | None) -> int:
    """Examples that are differentiated together: a microbatch, or fewer where memory is short."""
    batch = min(run.recipe.microbatch or run.num_examples, len(run.recipe.order.batches[0]))
    if memory is None:
        return batch
    row = run.num_params * run.final.params.element_size()
    return max(1, min(batch, memory // 8 // row))


def stack_of(run: Run, surrogates: list[Surrogate]) -> Stack:
    """The surrogates of several checkpoints with the shapes by which they are bent."""
    shapes = shapes_of(surrogates[0].sizes, exposure(run))
    return Stack(surrogates, shapes, cost(run, len(surrogates)))
