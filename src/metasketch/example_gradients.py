"""Gradients of single training examples at a state of the run: the raw material of a prior.

    g_i = ∇_θ ℓ_i(θ),    in eval mode, so that no example depends on others through BatchNorm

They are made a few at a time, either for several examples at once (vmap) or, where a model or loss
does not allow that, one after the other.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metasketch.data import Batch, map_tensors, slice_batch
from metasketch.errors import LossError, MetasketchError, NumericalError
from metasketch.functional import FunctionalModel
from metasketch.randomness import seeded
from metasketch.run import Run
from metasketch.state import State

_AGREEMENT = 1e-3
"""How near gradients made at once have to be to one made alone, relative to its size."""

_CANNOT = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, MetasketchError)
"""What code raises that cannot be batched over examples."""


@dataclass(frozen=True)
class ExampleGradients:
    """The gradients g_i of the training examples of a run at one of its states.

    Attributes:
        run: whose data, loss and model.
        state: where the gradients are taken.
        at_once: examples that are differentiated together.
    """

    run: Run
    state: State
    at_once: int

    @cached_property
    def functional(self) -> FunctionalModel:
        """The run's module in eval mode."""
        return self.run.step.model.evaluation(self.state.params.dtype)

    def blocks(self, indices: Tensor) -> Generator[tuple[Tensor, Tensor], None, None]:
        """(indices, gradients (b, P)) in blocks. Cost: one gradient for each example."""
        together: bool | None = None
        for chunk in indices.split(self.at_once):
            batch = self._fetched(chunk)
            if together is None:
                together = self._agrees(batch, len(chunk))
            rows = self._together(batch) if together else self._alone(batch, len(chunk))
            if not bool(torch.isfinite(rows).all()):
                bad = int(chunk[int((~torch.isfinite(rows).all(1)).nonzero()[0])])
                raise NumericalError(
                    f"the gradient of training example {bad} holds NaN or infinity in eval mode: "
                    "look at that example, or take a method without a prior"
                )
            yield chunk, rows

    def _fetched(self, indices: Tensor) -> Batch:
        device = self.run.recipe.device
        batch = self.run.recipe.examples.fetch(indices, epoch=0)
        return map_tensors(lambda t: t.to(device), batch)

    def _loss(self, params: Any, batch: Batch) -> Tensor:
        """ℓ of a batch of one example; the sum, where the loss gives sums and counts."""
        recipe = self.run.recipe
        keywords = {"step": recipe.num_steps - 1} if recipe.loss_takes_step else {}
        stats = self.functional.stats_layout.views(self.state.stats)
        with (
            seeded(recipe.device, recipe.seed, "prior"),
            sdpa_kernel(SDPBackend.MATH),
            self.functional.bound(params, stats, self.state.counts) as model,
        ):
            output = recipe.loss(model, batch, **keywords)
        losses: Tensor = output[0] if isinstance(output, tuple | list) else output
        return losses.reshape(())

    def _together(self, batch: Batch) -> Tensor:
        def one(params: Any, example: Batch) -> Tensor:
            return self._loss(params, map_tensors(lambda t: t[None], example))

        layout = self.functional.layout
        gradients = torch.func.vmap(torch.func.grad(one), (None, 0), randomness="same")
        g = gradients(tuple(layout.views(self.state.params)), batch)
        return layout.pack(g, (len(g[0]),)).detach()

    def _alone(self, batch: Batch, m: int) -> Tensor:
        layout, rows = self.functional.layout, []
        for i in range(m):
            theta = [v.detach().requires_grad_() for v in layout.views(self.state.params)]
            value = self._loss(theta, slice_batch(batch, i, i + 1, m))
            grads = torch.autograd.grad(value, theta, allow_unused=True, materialize_grads=True)
            rows.append(layout.pack(grads))
        return torch.stack(rows)

    def _agrees(self, batch: Batch, m: int) -> bool:
        """Whether gradients at once are those of each alone, to rounding."""
        try:
            found = self._together(batch)[0]
        except _CANNOT:
            return False
        expected = self._alone(slice_batch(batch, 0, 1, m), 1)[0]
        gap = torch.linalg.vector_norm(found - expected)
        return bool(gap <= _AGREEMENT * torch.linalg.vector_norm(expected))


def check_separable(run: Run) -> None:
    """Refuse a loss that is no sum over examples: it has no gradients of single examples."""
    if run.recipe.loss_form == "scalar":
        raise LossError(
            "loss(model, batch, weights) is one scalar for the whole batch, so no example has a "
            "gradient of its own to make a prior of: return one loss for each example, or take a "
            'method that needs replays alone, such as "spell"'
        )


Metric = Callable[[Tensor], Tensor]


def adam_metric(run: Run, state: State) -> Tensor | None:
    """The square root of Adam's step for each unit of gradient, by parameter, scaled to a mean
    square of 1; None for optimisers that treat all parameters alike.

        √P_j = (√(v_j + ε_root) + ε)^(-1/2),    ε at least a millionth of the largest √v

    v is taken as it stands: the correction for the first steps is one factor for all parameters,
    which the scale takes off.
    """
    v = state.slots.get("exp_avg_sq")
    if v is None or not bool(v.any()):
        return None
    eps_root = float(getattr(run.recipe.optimizer, "eps_root", 0.0))
    eps = float(getattr(run.recipe.optimizer, "eps", 0.0))
    step = (v.double() + eps_root).sqrt() + max(eps, float(v.double().sqrt().max()) * 1e-6)
    scale = step.rsqrt()
    metric: Tensor = (scale / scale.square().mean().sqrt()).to(v)
    return metric


def visited(run: Run) -> Tensor:
    """The examples that training saw, sorted: no other has any influence."""
    seen: Tensor = torch.unique(torch.cat(list(run.recipe.order.batches)))
    return seen


def exposure(run: Run) -> Tensor:
    """The learning rates under which training saw each example, summed, (N,), float64."""
    total = torch.zeros(run.num_examples, dtype=torch.float64)
    for rate, batch in zip(run.recipe.rates, run.recipe.order.batches, strict=True):
        total.index_add_(0, batch, torch.full((len(batch),), float(rate), dtype=torch.float64))
    return total


def gradients_of_training(run: Run) -> int:
    """Gradients of single examples that training took."""
    return sum(len(batch) for batch in run.recipe.order.batches)


def in_blocks(gradients: ExampleGradients, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of gradients with the indices' own numbers: see `ExampleGradients.blocks`."""
    start = 0
    for chunk, rows in gradients.blocks(indices):
        yield torch.arange(start, start + len(chunk)), rows
        start += len(chunk)
