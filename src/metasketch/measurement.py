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
class Leaves:
    """A final state as leaves of a graph, in the order of its layouts."""

    params: list[Tensor]
    stats: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        return [*self.params, *self.stats]

    def gradient(self, values: Tensor, z: Tensor, again: bool = False) -> Tensor:
        """Σ_q z_q ∇φ_q, (P + R,); with a graph of its own where z has one.

        Args:
            again: the graph of the values is needed once more.
        """
        grads = torch.autograd.grad(
            values,
            self.all,
            z,
            retain_graph=again or z.requires_grad,
            create_graph=z.requires_grad,
            allow_unused=True,
            materialize_grads=True,
        )
        return torch.cat([grad.reshape(-1) for grad in grads])


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

    @cached_property
    def _own(self) -> tuple[Tensor, Tensor]:
        """The final state of the run in this precision, flat."""
        return self._cast_state(self.run.final)

    def _cast_state(self, state: State) -> tuple[Tensor, Tensor]:
        return state.params.detach().to(self.dtype), state.stats.detach().to(self.dtype)

    def leaves(self, final: State | None = None) -> Leaves:
        """Parameters and statistics in this precision, each tensor a leaf of a graph.

        Leaves of their own, since a flat one would get a gradient of its whole size from each.

        Args:
            final: another state than the run's, such as where retraining ends.
        """
        params, stats = self._own if final is None else self._cast_state(final)
        layouts = self.functional.layout, self.functional.stats_layout
        theta, r = (
            [view.detach().requires_grad_() for view in layout.views(flat)]
            for layout, flat in zip(layouts, (params, stats), strict=True)
        )
        return Leaves(theta, r)

    def chunks(self, indices: Tensor | None = None) -> Iterator[Tensor]:
        """Queries (all by default) in batches that fit into memory."""
        every = torch.arange(self.num_queries) if indices is None else indices
        yield from every.split(self.at_once)

    @torch.no_grad()
    def all_values(self, final: State | None = None) -> Tensor:
        """φ of every query, (K,), float64, on the CPU."""
        state = self.leaves(final)
        return torch.cat([self.values(chunk, state) for chunk in self.chunks()]).cpu()

    def values(self, indices: Tensor, state: Leaves) -> Tensor:
        """φ of some queries at a state, (b,), float64."""
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

    def differentiable_values(self, indices: Tensor, state: Leaves) -> Tensor:
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
    def _model(self, state: Leaves) -> Iterator[nn.Module]:
        """The module with parameters and statistics in place."""
        functional, run = self.functional, self.run
        with (
            seeded(run.recipe.device, run.recipe.seed, "query"),
            sdpa_kernel(SDPBackend.MATH),
            functional.bound(state.params, state.stats, run.final.counts) as model,
        ):
            yield model


def _refuse_other_parameters(values: Tensor, state: Leaves) -> None:
    """Refuse a measurement that is differentiable in anything but the state: of another model."""
    nodes, seen, own = [values.grad_fn], set[Any](), {id(tensor) for tensor in state.all}
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
