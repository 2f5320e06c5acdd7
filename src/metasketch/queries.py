"""Questions asked of a trained model: measurements, their values and their gradients."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from metasketch.data import Collate, Examples, batch_digest
from metasketch.errors import ArgumentError, DataError, NumericalError
from metasketch.measurement import Measure, Measurement
from metasketch.progress import drive
from metasketch.query_gradients import QueryGradients
from metasketch.randomness import preserved
from metasketch.run import Run
from metasketch.sizes import parse_bytes

Better = Literal["lower", "higher"]


class Queries:
    """k measurements of a trained model.

        f_q = φ_q(θ_T),    v_q = ∇_θ φ_q(θ_T)

    Args:
        data: what is measured on, one item a query: tensors or a Dataset, as in a recipe.
        measure: ``measure(model, batch) -> (batch,)``, one number for each query, with the model
            in eval mode and in float64; see `metasketch.measures` for ready ones.
        collate: items of a Dataset to a batch.
        ids, show: names of queries, and item -> text or image, for reports.
        better: which values of the measurement are good: "lower" (a loss) or "higher" (a margin).
            It decides what a helpful example is. By default what the measure says of itself in an
            attribute ``better``, and "lower" where it says nothing.
    """

    def __init__(
        self,
        data: Any,
        measure: Measure,
        collate: Collate | None = None,
        ids: Sequence[str] | None = None,
        show: Callable[[Any], Any] | None = None,
        better: Better | None = None,
    ) -> None:
        if not callable(measure):
            raise ArgumentError(f"measure is a {type(measure).__name__}; it must be a function")
        self.measure, self.ids, self.show = measure, ids, show
        said: Any = better or getattr(measure, "better", "lower")
        self.better: Better = said
        if self.better not in get_args(Better):
            raise ArgumentError(f"better={self.better!r}: give one of {list(get_args(Better))}")
        self.examples = Examples(data, collate, seed=0)
        if ids is not None and len(ids) != self.examples.n:
            raise DataError(f"ids names {len(ids)} queries; there are {self.examples.n}")

    @property
    def num_queries(self) -> int:
        """K."""
        return self.examples.n

    def of(self, run: Run) -> Measurement:
        """The measurements as functions of the final state of a run."""
        return Measurement(run, self.examples, self.measure)

    def values(self, run: Run) -> Tensor:
        """f(w) at the run's weights, (K,), float64. Cost: one forward pass over the queries."""
        with run.computing():
            return self.of(run).all_values()

    def gradients(self, run: Run, indices: Sequence[int] | None = None) -> dict[str, Tensor]:
        """v_q of some queries (all by default), by name: (b, *shape), in the run's precision.

        Running statistics of BatchNorm count as part of the final state, so their gradients are
        here too: the result is what `Run.replay` takes.
        """
        chosen = range(self.num_queries) if indices is None else indices
        for q in chosen:
            if not 0 <= q < self.num_queries:
                raise ArgumentError(f"there is no query {q}: there are {self.num_queries}, from 0")
        if len(chosen) == 0:
            raise ArgumentError("indices is empty: name at least one query")
        with run.computing():
            V = QueryGradients(self.of(run))
            block = torch.stack([V.row(q) for q in chosen])
        return run.named(block)

    def gram(
        self, run: Run, memory: int | float | str = "4GiB", progress: bool | None = None
    ) -> Tensor:
        """G = V^T V over parameters, (K, K), float64. V is held whole only where it fits.

        Args:
            run: at whose final state the gradients are taken.
            memory: budget for gradients; a smaller one costs more gradients, K (K / a + 1) / 2
                where a of them fit.
            progress: show a bar; by default on a terminal.
        """
        with run.computing():
            V = QueryGradients(self.of(run), parse_bytes(memory, "memory"))
            return drive(V.gram(), V.num_gradients(), "Gram matrix", progress, "gradient").cpu()

    def gradient_norms(self, run: Run, progress: bool | None = None) -> Tensor:
        """‖v_q‖ over parameters, (K,), float64. Cost: K gradients."""
        with run.computing():
            V = QueryGradients(self.of(run), memory=0)
            return drive(V.norms(), V.num_queries, "gradient norms", progress, "gradient")

    def facts(self) -> dict[str, int | str]:
        """What identifies the queries, as a flat table: see `metasketch.Recipe.facts`.

        Items of a Dataset are all read, since nothing else tells two sets of questions apart.
        """
        if self.examples.tensors:
            data = self.examples.fingerprint()
        else:
            every = torch.arange(self.num_queries)
            with preserved(torch.device("cpu")):  # items are read under seeds
                data = batch_digest([self.examples.fetch(i, epoch=0) for i in every.split(1)])
        name = getattr(self.measure, "__qualname__", type(self.measure).__qualname__)
        return {
            "queries": self.num_queries,
            "query data": data,
            "measure": name,
            "better": self.better,
        }


def check_outputs(queries: Queries, outputs: Tensor) -> None:
    """Refuse measurements (K,) that are not finite, before anything is spent on them."""
    bad = (~torch.isfinite(outputs)).nonzero()
    if len(bad):
        q = int(bad[0])
        name = "" if queries.ids is None else f" ({queries.ids[q]!r})"
        raise NumericalError(
            f"the measurement of query {q}{name} is {float(outputs[q])}: leave it out, or mend the "
            "measurement"
        )
