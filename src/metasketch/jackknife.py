"""Intervals by leaving out one draw at a time."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

Array = np.ndarray[Any, Any]


def jackknife(
    summary: Callable[[Array], Array], m: int, level: float
) -> tuple[Array, Array, Array]:
    """Estimates with the bias of order 1/m taken off, and the ends of their intervals.

        pseudo_j = m s - (m - 1) s_(-j),    mean ± t_{m-1} sd / √m

    Args:
        summary: values, any number of them, of the draws with these numbers.
        m: draws, at least 2.
        level: of the intervals.

    >>> draws = np.array([0.0, 0.5, 0.25, 0.25])
    >>> estimate, low, high = jackknife(lambda kept: draws[kept].mean(), 4, 0.9)
    >>> float(estimate), bool(low < estimate < high)
    (0.25, True)
    """
    every = np.arange(m)
    whole = np.asarray(summary(every))
    left_out = np.stack([np.asarray(summary(np.delete(every, j))) for j in range(m)])
    pseudo = m * whole - (m - 1) * left_out
    centre = pseudo.mean(0)
    half = stats.t.ppf((1 + level) / 2, m - 1) * pseudo.std(0, ddof=1) / math.sqrt(m)
    return centre, centre - half, centre + half
