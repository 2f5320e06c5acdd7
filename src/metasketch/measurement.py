"""Measurements as functions of the final state: φ_q(θ_T, r_T), in eval mode and in float64.

The final state is cast to float64: at a margin of 18 a cross-entropy in float32 reads 0 and its
gradient is 93 % wrong. Training and sweeps stay as they are.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metasketch.data import Batch, Examples, map_tensors
from metasketch.errors import ArgumentError, MetasketchError
from metasketch.functional import FunctionalModel
from metasketch.randomness import seeded
from metasketch.run import Run
from metasketch.state import State

Measure = Callable[..., Tensor]

_AT_ONCE = 256
"""Queries that are measured at once, at most."""

_GRAPH_SHARE = 8
"""The graph of a batch of queries may take this share of a memory budget."""


@dataclass(frozen=True)
class Measurement:
    """The measurements of k queries at the final state of a run.

    Attributes:
        run: whose final state.
        examples: what is measured on.
        measure: ``measure(model, batch) -> (batch,)``.
        dtype: of the final state and the data; another than float64 shows what that is for.
    """

    run: Run
    examples: Examples
    measure: Measure
    dtype: torch.dtype = torch.float64

    @cached_property
    def functional(self) -> FunctionalModel:
        """The run's module in eval mode, in this precision."""
        return self.run.step.model.evaluation(self.dtype)

    @property
    def num_queries(self) -> int:
        """K."""
        return self.examples.n

    @cached_property
    def at_once(self) -> int:
        """Queries whose graph fits into a share of the memory budget of the run."""
        total = self.run.budget.total
        if total is None:
            return _AT_ONCE
        batch = len(self.run.recipe.order.batches[0])
        m = min(self.run.recipe.microbatch or batch, batch)
        wider = 8 // self.run.final.params.element_size()
        each = max(wider * self.run.sizes.graph // m, 1)
        return max(1, min(_AT_ONCE, total // _GRAPH_SHARE // each))

    def leaves(self, final: State | None = None) -> tuple[Tensor, Tensor]:
        """Parameters (P,) and statistics (R,) in this precision, as leaves of a graph.

        Args:
            final: another state than the run's, such as where retraining ends.
        """
        final = final or self.run.final
        params = final.params.detach().to(self.dtype).requires_grad_()
        return params, final.stats.detach().to(self.dtype).requires_grad_()

    def chunks(self, indices: Tensor | None = None) -> Iterator[Tensor]:
        """Queries (all by default) in batches that fit into memory."""
        every = torch.arange(self.num_queries) if indices is None else indices
        yield from every.split(self.at_once)

    @torch.no_grad()
    def all_values(self, final: State | None = None) -> Tensor:
        """φ of every query, (K,), float64, on the CPU."""
        state = self.leaves(final)
        return torch.cat([self.values(chunk, state) for chunk in self.chunks()]).cpu()

    def values(self, indices: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        """φ of some queries at a state given as flat leaves, (b,), float64."""
        batch = self._cast(self.examples.fetch(indices, epoch=0))
        with self._model(state) as model:
            generator = torch.get_rng_state()
            try:
                values = self.measure(model, batch)
            except MetasketchError:
                raise
            except Exception as error:
                raise ArgumentError(
                    f"measure(model, batch) failed on queries {int(indices[0])} to "
                    f"{int(indices[-1])}, of the data as Queries was given it, with the model in "
                    f"eval mode and float64: {type(error).__name__}: {error}"
                ) from error
        if not torch.equal(torch.get_rng_state(), generator):
            raise ArgumentError(
                "the measurement draws random numbers, so that a query's value would depend on the "
                "queries that are measured with it: measure something that does not, such as the "
                "mean"
            )
        if not isinstance(values, Tensor) or values.shape != indices.shape:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ArgumentError(
                f"the measurement must give one number for each query, ({len(indices)},) for a "
                f"batch of {len(indices)}; it gave {shape}"
            )
        return values.double()

    def differentiable_values(self, indices: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        """The same, refused where they do not depend on the state."""
        values = self.values(indices, state)
        if not values.requires_grad:
            raise ArgumentError(
                "the measurement does not depend on the model's parameters: it must compute with "
                "the model that it is given, without torch.no_grad() or detach()"
            )
        if int(indices[0]) == 0:  # what holds for one batch holds for all
            _refuse_other_parameters(values, state)
        return values

    def _cast(self, batch: Batch) -> Batch:
        device = self.run.recipe.device
        return map_tensors(
            lambda t: t.to(device, self.dtype if t.is_floating_point() else t.dtype), batch
        )

    @contextlib.contextmanager
    def _model(self, state: tuple[Tensor, Tensor]) -> Iterator[nn.Module]:
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


def _refuse_other_parameters(values: Tensor, state: tuple[Tensor, Tensor]) -> None:
    """Refuse a measurement that is differentiable in anything but the state: of another model."""
    nodes, seen, own = [values.grad_fn], set[Any](), {id(tensor) for tensor in state}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            raise ArgumentError(
                "the measurement depends on parameters that are not those of the model that it is "
                f"given (a tensor of shape {tuple(leaf.shape)}): measure(model, batch) must "
                "compute with its first argument, not with a model from outside"
            )
        nodes += [parent for parent, _ in node.next_functions]
