"""The query gradients V = [v_1 ... v_k] as an operator, held whole only where they fit.

    V z (P,),    V^T t (K,),    ‖v_q‖,    G = V^T V (K, K)

v_q is the gradient of the measurement of query q with respect to the whole final state: the
parameters (P) and BatchNorm's running statistics (R). G, the norms and everything else that
compares queries are over parameters alone.

Where V fits into its share of the memory budget it is made once and all products are matrix
products. Otherwise `combine` is one backward pass over the queries, `pair` one pass forward and
back, and the Gram matrix is made of tiles: some rows are held, the rows after them are made one
after the other. Everything is summed in float64.
"""

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metasketch.errors import MemoryBudgetError, NumericalError
from metasketch.measurement import Measurement
from metasketch.progress import exhaust
from metasketch.sizes import format_bytes

_DOUBLE = 8
_SLICE = 1 << 18
"""Parameters whose products are summed at once, in float64."""

_STREAMED = 4
"""A held tile has this many rows for each of those that are compared with it at once. Each such
product reads the whole tile in float64, which took longer than the gradients with eight of 90."""


@dataclass
class QueryGradients:
    """V of some measurements.

    Attributes:
        measurement: φ.
        memory: bytes that rows of V may take; None for as many as there are.
    """

    measurement: Measurement
    memory: int | None = None
    _V: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def num_queries(self) -> int:
        """K."""
        return self.measurement.num_queries

    @property
    def num_params(self) -> int:
        """P."""
        return self.measurement.run.num_params

    @property
    def size(self) -> int:
        """P + R."""
        return self.num_params + len(self.measurement.run.final.stats)

    @property
    def whole(self) -> int:
        """Bytes of all rows."""
        return self.num_queries * self.size * _DOUBLE

    @property
    def held(self) -> bool:
        """Whether V is held whole, in half of the memory."""
        return self.memory is None or 2 * self.whole <= self.memory

    def hold(self) -> Generator[int, None, Tensor]:
        """All rows v_q, (K, P + R), float64, made once; yields after each."""
        if self._V is None:
            rows = []
            for q in range(self.num_queries):
                rows.append(self.row(q))
                yield q
            self._V = torch.stack(rows)
        return self._V

    @property
    def V(self) -> Tensor:
        """All rows v_q, (K, P + R), float64."""
        return exhaust(self.hold())

    def one(self, q: int) -> Tensor:
        """v_q, (P + R,), float64: from V where it is held, else made anew."""
        return self.V[q] if self.held else self.row(q)

    def row(self, q: int) -> Tensor:
        """v_q, (P + R,), float64. Cost: one backward pass of one query."""
        state = self.measurement.leaves()
        value = self.measurement.differentiable_values(torch.tensor([q]), state)
        row = state.gradient(value, torch.ones_like(value))
        if not bool(torch.isfinite(row).all()):
            raise NumericalError(
                f"the gradient of query {q} holds NaN or infinity (its value is "
                f"{float(value.detach().sum())}): leave that query out, or mend the measurement"
            )
        return row

    def combine(self, Z: Tensor) -> Tensor:
        """Σ_q z_q v_q for each column of Z (K, b): (b, P + R), float64.

        Cost: one pass over the queries, forward once and back b times.
        """
        Z = Z.to(torch.float64)
        asked = Z.any(dim=1)
        if self.held:
            return Z[asked].T.to(self.V.device) @ self.V[asked.to(self.V.device)]
        total = torch.zeros(Z.shape[1], self.size, dtype=torch.float64)
        total = total.to(self.measurement.run.recipe.device)
        for indices in self.measurement.chunks(asked.nonzero()[:, 0]) if bool(asked.any()) else ():
            part = Z[indices].T.to(total.device)
            state = self.measurement.leaves()
            values = self.measurement.differentiable_values(indices, state)
            for z, row in zip(part, total, strict=True):
                row += state.gradient(values, z, again=True)
        if not bool(torch.isfinite(total).all()):
            for q in asked.nonzero()[:, 0].tolist():
                self.row(q)  # names the one that is not finite
        return total

    def pair(self, t: Tensor) -> Tensor:
        """<v_q, t_j> for tangents t (b, P + R) of the final state: (K, b), float64.

        Cost: one pass over the queries, of a forward and a backward pass and b derivatives.
        """
        t = t.to(torch.float64)
        if self.held:
            return (self.V @ t.T).cpu()
        parts = [self.pair_some(indices, t) for indices in self.measurement.chunks()]
        return torch.cat(parts).cpu()

    def pair_some(self, indices: Tensor, t: Tensor) -> Tensor:
        """The same for some of the queries, as a forward derivative made of two backward ones:
        u ↦ V u is linear, and its own backward pass takes t to V^T t."""
        state = self.measurement.leaves()
        values = self.measurement.differentiable_values(indices, state)
        u = torch.zeros_like(values, requires_grad=True)
        try:
            V_u = state.gradient(values, u)
            columns = [torch.autograd.grad(V_u, u, row, retain_graph=True)[0] for row in t]
            return torch.stack(columns, dim=1)
        except RuntimeError:
            # A module that has no second derivative in eval mode: row by row instead.
            return torch.stack([t @ self.row(q) for q in indices.tolist()])

    def _tile_rows(self) -> int:
        """Rows of a tile that fit into memory beside those that are streamed."""
        assert self.memory is not None
        item = self.measurement.run.final.params.element_size()
        # The leaves, a gradient, its parts, its quotient and what made them; and, of each row, a
        # slice in float64.
        besides = 6 * self.size * _DOUBLE + 2 * self.measurement.run.sizes.graph
        each = self.num_params * item + 2 * min(_SLICE, self.num_params) * _DOUBLE
        rows = (self.memory - besides) // each
        if rows < 2:
            needed = besides + 2 * each
            raise MemoryBudgetError(
                f"memory={format_bytes(self.memory)} is too small for the Gram matrix of the "
                f"query gradients, which needs {format_bytes(needed)} for two of them: give more "
                "memory"
            )
        return min(rows - max(1, rows // (_STREAMED + 1)), self.num_queries)

    @staticmethod
    def _streamed_rows(a: int) -> int:
        """Rows that are compared at once with a tile of ``a``."""
        return max(1, a // _STREAMED)

    def gram(self) -> Generator[int, None, Tensor]:
        """G = V^T V over parameters, (K, K), float64; yields after each gradient.

        Cost: K gradients where V is held, and about K (K / a + 1) / 2 with tiles of a rows.
        """
        K = self.num_queries
        if self.held:
            params = (yield from self.hold())[:, : self.num_params]
            G = params @ params.T
            return (G + G.T).cpu() / 2
        a = self._tile_rows()
        streamed = self._streamed_rows(a)
        G = torch.zeros(K, K, dtype=torch.float64)
        for start in range(0, K, a):
            stop = min(start + a, K)
            tile = yield from self._scaled_rows(start, stop)
            G[start:stop, start:stop] = _products(tile, tile)
            for first in range(stop, K, streamed):
                last = min(first + streamed, K)
                other = yield from self._scaled_rows(first, last)
                G[start:stop, first:last] = _products(tile, other)
                del other
            del tile  # before the next one is made: there is no room for two
        upper = G.triu()
        return upper + upper.triu(1).T

    def num_gradients(self) -> int:
        """Gradients that `gram` makes."""
        K = self.num_queries
        if self.held:
            return K if self._V is None else 0
        a = self._tile_rows()
        return sum(K - start for start in range(0, K, a))

    def _scaled_rows(self, start: int, stop: int) -> Generator[int, None, tuple[Tensor, Tensor]]:
        """Rows in the run's precision, and the power of two that each was divided by, without
        which the gradients of interpolated queries would leave the range of float32."""
        like = self.measurement.run.final.params
        rows, scales = like.new_empty(stop - start, self.num_params), []
        for i, q in enumerate(range(start, stop)):
            row = self.row(q)[: self.num_params]
            scale = power_of_two(torch.linalg.vector_norm(row))
            rows[i] = row.div_(scale)
            scales.append(scale)
            yield q
        return rows, torch.stack(scales)

    def norms(self) -> Generator[int, None, Tensor]:
        """‖v_q‖ over parameters, (K,), float64; yields after each gradient."""
        found = []
        for q in range(self.num_queries):
            row = self.row(q) if self._V is None else self._V[q]
            found.append(torch.linalg.vector_norm(row[: self.num_params]))
            yield q
        return torch.stack(found).cpu()


def power_of_two(size: Tensor) -> Tensor:
    """The power of two next to a size, by which a vector is divided without rounding; 1 for 0."""
    return torch.where(size > 0, torch.exp2(torch.frexp(size).exponent.to(size.dtype)), 1.0)


def _products(tile: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products of the rows of two tiles, summed in float64."""
    (rows, scales), (columns, factors) = tile, other
    total = torch.zeros(len(rows), len(columns), dtype=torch.float64, device=rows.device)
    for left, right in zip(rows.split(_SLICE, 1), columns.split(_SLICE, 1), strict=True):
        total += left.double() @ right.double().T
    return (total * scales[:, None] * factors).cpu()
