"""The geometry of an influence matrix: how unequal its rows are.

Where row norms span many orders of magnitude, the relative error sees the largest rows alone, and
the LDS sees every row alike: which of the two is wanted decides the method (appendix C).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metasketch.errors import ArgumentError
from metasketch.influence import Array
from metasketch.metrics import row_norms, spearman


@dataclass(frozen=True, eq=False)
class Geometry:
    """Row norms of Y and what follows from them.

    Attributes:
        row_norms: ‖Y_q‖ in the order of the queries, (K,).
        gradient_correlation: Spearman's ρ of ‖v_q‖ and ‖Y_q‖, where gradient norms were given:
            near 1 where the free norms of gradients rank the rows.
    """

    row_norms: Array = field(repr=False)
    gradient_correlation: float | None = None

    @property
    def sorted_norms(self) -> Array:
        """Row norms, the largest first, (K,)."""
        return np.sort(self.row_norms)[::-1]

    @property
    def cumulative_energy(self) -> Array:
        """Share of ‖Y‖_F² in the 1, 2, ..., K largest rows, (K,)."""
        energy = np.cumsum(np.square(self.sorted_norms))
        return energy / energy[-1]  # type: ignore[no-any-return]

    @property
    def orders_of_magnitude(self) -> float:
        """log10 of the ratio of the largest to the smallest norm that is not zero."""
        live = self.row_norms[self.row_norms > 0]
        return float(np.log10(live.max() / live.min()))

    @property
    def top_quartile_share(self) -> float:
        """Share of ‖Y‖_F² in the largest quarter of the rows (rounded up)."""
        return float(self.cumulative_energy[-(-len(self.row_norms) // 4) - 1])

    @property
    def num_zero(self) -> int:
        """Queries that no example influences."""
        return int((self.row_norms == 0).sum())


def geometry(Y: Any, gradient_norms: Any = None) -> Geometry:
    """The geometry of an influence matrix.

    Args:
        Y: a matrix (K, N) or an `Influence`; an estimate gives its own geometry, and a projection
            underestimates small rows.
        gradient_norms: ‖v_q‖, (K,), see `Queries.gradient_norms`.
    """
    norms = row_norms(Y)
    if not norms.any():
        raise ArgumentError("Y is zero: no query is influenced by any example")
    if gradient_norms is None:
        return Geometry(norms)
    gradients = np.asarray(gradient_norms, dtype=np.float64)
    if gradients.shape != norms.shape:
        raise ArgumentError(
            f"gradient_norms has shape {gradients.shape}; Y has {len(norms)} queries"
        )
    return Geometry(norms, spearman(gradients, norms))
