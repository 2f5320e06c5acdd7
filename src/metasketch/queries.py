"""Questions asked of a trained model: measurements, their values and their gradients.

The final state is cast to float64 for both: at a margin of 18 a cross-entropy in float32 reads 0
and its gradient is 93 % wrong. Training and sweeps stay as they are.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metasketch.data import Batch, Collate, Examples, map_tensors
from metasketch.errors import ArgumentError, DataError, NumericalError
from metasketch.randomness import seeded
from metasketch.run import Run

Measure = Callable[..., Tensor]

_VALUES_AT_ONCE = 256


class Queries:
    """k measurements of a trained model.

        f_q = φ_q(θ_T),    v_q = ∇_θ φ_q(θ_T)

    Args:
        data: what is measured on, one item a query: tensors or a Dataset, as in a recipe.
        measure: ``measure(model, batch) -> (batch,)``, one number for each query, with the model
            in eval mode and in float64.
        collate: items of a Dataset to a batch.
        ids, show: names of queries, and item -> text or image, for reports.
    """

    def __init__(
        self,
        data: Any,
        measure: Measure,
        collate: Collate | None = None,
        ids: Sequence[str] | None = None,
        show: Callable[[Any], Any] | None = None,
    ) -> None:
        if not callable(measure):
            raise ArgumentError(f"measure is a {type(measure).__name__}; it must be a function")
        self.measure, self.ids, self.show = measure, ids, show
        self.examples = Examples(data, collate, seed=0)
        if ids is not None and len(ids) != self.examples.n:
            raise DataError(f"ids names {len(ids)} queries; there are {self.examples.n}")

    @property
    def num_queries(self) -> int:
        """K."""
        return self.examples.n

    def values(self, run: Run) -> Tensor:
        """f(w) at the run's weights, (K,), float64. Cost: one forward pass over the queries."""
        with run.computing(), torch.no_grad():
            at = _Final(run)
            order = torch.arange(self.num_queries).split(_VALUES_AT_ONCE)
            return torch.cat([self._measured(at, indices, at.leaves()) for indices in order])

    def gradients(self, run: Run, indices: Sequence[int] | None = None) -> dict[str, Tensor]:
        """v_q of some queries (all by default), by name: (b, *shape), in the run's precision.

        Running statistics of BatchNorm count as part of the final state, so their gradients are
        here too: the result is what `Run.replay` takes.
        """
        chosen = range(self.num_queries) if indices is None else indices
        with run.computing():
            at = _Final(run)
            rows = [torch.cat(self._gradient(at, q)) for q in chosen]
        if not rows:
            raise ArgumentError("indices is empty: name at least one query")
        block = torch.stack(rows).to(run.final.params)
        params, stats = block.split([run.num_params, len(run.final.stats)], dim=1)
        layouts = (run.step.model.layout, run.step.model.stats_layout)
        return layouts[0].unpack(params) | layouts[1].unpack(stats)

    def _gradient(self, at: "_Final", q: int) -> tuple[Tensor, Tensor]:
        if not 0 <= q < self.num_queries:
            raise ArgumentError(f"there is no query {q}: there are {self.num_queries}, from 0")
        params, stats = at.leaves()
        value = self._measured(at, torch.tensor([q]), (params, stats))
        if not value.requires_grad:
            raise ArgumentError(
                "the measurement does not depend on the model's parameters: it must compute with "
                "the model that it is given, without torch.no_grad() or detach()"
            )
        grads = torch.autograd.grad(
            value.sum(), (params, stats), allow_unused=True, materialize_grads=True
        )
        for grad in grads:
            if not bool(torch.isfinite(grad).all()):
                raise NumericalError(
                    f"the gradient of query {q} holds NaN or infinity (its value is "
                    f"{float(value.sum())}): leave that query out, or mend the measurement"
                )
        return grads[0], grads[1]

    def _measured(self, at: "_Final", indices: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        """φ of some queries at a state given as flat leaves."""
        batch = at.cast(self.examples.fetch(indices, epoch=0))
        with at.model(state) as model:
            values = self.measure(model, batch)
        if not isinstance(values, Tensor) or values.shape != indices.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ArgumentError(
                f"the measurement must give one number for each query, ({len(indices)},) for a "
                f"batch of {len(indices)}; it gave {shape}"
            )
        return values.double()


class _Final:
    """The final state of a run in eval mode and float64."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.functional = run.step.model.evaluation(torch.float64)

    def leaves(self) -> tuple[Tensor, Tensor]:
        final = self.run.final
        params = final.params.detach().double().requires_grad_()
        return params, final.stats.detach().double().requires_grad_()

    def cast(self, batch: Batch) -> Batch:
        device = self.run.recipe.device
        return map_tensors(
            lambda t: t.to(device, torch.float64 if t.is_floating_point() else t.dtype), batch
        )

    @contextlib.contextmanager
    def model(self, state: tuple[Tensor, Tensor]) -> Iterator[nn.Module]:
        """The module with flat parameters and statistics in place."""
        functional, run = self.functional, self.run
        params = functional.layout.views(state[0])
        stats = functional.stats_layout.views(state[1])
        with (
            seeded(run.recipe.device, run.recipe.seed, "query"),
            sdpa_kernel(SDPBackend.MATH),
            functional.bound(params, stats, run.final.counts) as model,
        ):
            yield model
