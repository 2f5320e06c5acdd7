"""The examples that matter most, for every query at once, without the whole matrix."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metasketch.influence import Influence

Array = np.ndarray[Any, Any]

Effects = list[tuple[int, float]]
"""Examples by number, and what removing each alone does to a measurement; the strongest first."""

_BLOCK = 1 << 24
"""Scores that are held at once."""


@dataclass(frozen=True)
class Strong:
    """The examples that one measurement would miss most, and those that it would miss least.

    Attributes:
        helpful: without each of these the measurement is predicted to be worse.
        harmful: without each of these, better.
    """

    helpful: Effects
    harmful: Effects


@dataclass(frozen=True)
class Strongest:
    """What stands out in an influence.

    Attributes:
        norms: ‖Y_q‖ of every query, (K,).
        each: of the first queries, in their order.
        together: of the mean over all queries.
    """

    norms: Array = field(repr=False)
    each: list[Strong] = field(repr=False)
    together: Strong = field(repr=False)

    def examples(self) -> list[int]:
        """Every example that is named, the strongest of each query before the second strongest."""
        lists = [kind for s in (self.together, *self.each) for kind in (s.helpful, s.harmful)]
        longest = max((len(effects) for effects in lists), default=0)
        ranked = (effects[r][0] for r in range(longest) for effects in lists if r < len(effects))
        return list(dict.fromkeys(ranked))


def strongest(influence: Influence, n: int, most_queries: int) -> Strongest:
    """The n most helpful and n most harmful examples of the first queries, and of all together.

        Δ̂_q({i}) = -w_i Ŷ_qi

    They are ordered by the effect of their removal, which is that of `Influence.top` where all
    weights are equal.

    Cost: K × N × rank multiplications, a block of rows at a time.
    """
    K, N = influence.num_queries, influence.num_examples
    norms, each = np.zeros(K), []
    rows = max(1, _BLOCK // N)
    for start in range(0, K, rows):
        scores = influence.rows(slice(start, start + rows))
        norms[start : start + rows] = np.sqrt(np.square(scores).sum(1))
        for row in scores[: max(0, most_queries - start)]:
            each.append(_both_ends(removal(influence, row), n, influence.better))
    mean = removal(influence, influence.coefficients.mean(0) @ influence.basis)
    return Strongest(norms, each, _both_ends(mean, n, influence.better))


def removal(influence: Influence, scores: Array) -> Array:
    """What removing each example does, from its scores (..., N)."""
    return -scores if influence.weights is None else -scores * influence.weights


def _both_ends(effects: Array, n: int, better: str) -> Strong:
    worse = effects if better == "lower" else -effects
    return Strong(_top(worse, effects, n), _top(-worse, effects, n))


def _top(wanted: Array, effects: Array, n: int) -> Effects:
    """Where ``wanted`` is positive and largest, lower numbers first among equals."""
    n = min(n, len(wanted))
    least = np.partition(wanted, len(wanted) - n)[len(wanted) - n]
    some = np.flatnonzero(wanted >= max(least, np.finfo(np.float64).tiny))
    some = some[np.argsort(-wanted[some], kind="stable")][:n]
    return [(i, float(effects[i])) for i in some.tolist()]
