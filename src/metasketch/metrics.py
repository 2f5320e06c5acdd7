"""How good an estimate Ŷ is: against retraining (LDS), and against the exact Y.

    LDS_q = Spearman over subsets S of (Δ̂_q(S), Δ_q(S)),    Δ̂_q(S) = - Σ_{i in S} w_i Ŷ_qi

Rows are weighted equally by the LDS and the error per query, and by their squared norms by the
relative error and the captured energy.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from scipy.stats import rankdata

from metasketch.errors import ArgumentError, MetasketchWarning
from metasketch.influence import Array, Influence
from metasketch.randomness import derive_seed
from metasketch.removals import Removals

Oracle = Literal["svd", "spherical"]

_ROUNDING = 64 * np.finfo(np.float64).eps
"""Values that spread by no more than this share of their size are one value."""


def lds(influence: Any, removals: Removals) -> Array:
    """Linear datamodelling score of each query: do predictions rank removals as retraining does?

        LDS_q = ρ_S(Δ̂_q(S), Δ_q(S)),    ρ Spearman's rank correlation, ties at their mean rank

    The ceiling, MAGIC's, is the score of the exact Y.

    Args:
        influence: Ŷ as an `Influence`, or as a matrix (K, N).
        removals: of the same run and queries.

    Returns:
        (K,), in [-1, 1]; its mean is the score. A query whose predictions (or true changes) are all
        the same ranks nothing: it scores 0, where scipy says NaN, and a warning says so.
    """
    predicted, true = _ranks(influence, removals)
    _remark(predicted, "predicted")
    _remark(true, "true")
    return _correlation(predicted, true)


def rank_correlation(predicted: Array, true: Array) -> Array:
    """Spearman's ρ of predicted and true changes (M, K) over subsets, (K,)."""
    ranks = (rankdata(_flattened(x), axis=0) for x in (predicted, true))
    return _correlation(*ranks)


@dataclass(frozen=True)
class Interval:
    """A mean with a bootstrap interval.

    Attributes:
        mean: the score.
        low, high: ends of the interval.
        level: its nominal coverage.
    """

    mean: float
    low: float
    high: float
    level: float


def lds_interval(
    influence: Any,
    removals: Removals,
    level: float = 0.9,
    num_samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean LDS with a percentile bootstrap interval, over subsets and queries both.

    Each sample draws M subsets and K queries with replacement. Ranks are taken once, over all
    subsets; a sample correlates the ranks of the subsets that it drew. Drawing both makes the
    interval a little wide.

    Args:
        influence, removals: see `lds`.
        level: nominal coverage.
        num_samples: of the bootstrap.
        seed: of its draws.
    """
    if not 0 < level < 1:
        raise ArgumentError(f"level={level!r}: a coverage lies between 0 and 1")
    if num_samples < 2:
        raise ArgumentError(f"num_samples={num_samples!r}: at least 2 samples")
    predicted, true = _ranks(influence, removals)
    M, K = predicted.shape
    x, y = (_standardized(ranks) for ranks in (predicted, true))
    moments = np.concatenate([x, y, x * x, y * y, x * y], axis=1)
    generator = np.random.default_rng(derive_seed(seed, "bootstrap"))
    means = np.empty(num_samples)
    for i in range(num_samples):
        share = np.bincount(generator.integers(M, size=M), minlength=M) / M
        mx, my, xx, yy, xy = (share @ moments).reshape(5, K)
        scores = _ratio(xy - mx * my, np.sqrt(np.maximum((xx - mx**2) * (yy - my**2), 0)))
        means[i] = scores[generator.integers(K, size=K)].mean()
    tail = 50 * (1 - level)
    low, high = np.percentile(means, [tail, 100 - tail])
    return Interval(float(_correlation(predicted, true).mean()), float(low), float(high), level)


def relative_error(influence: Any, Y: Any) -> float:
    """Relative Frobenius error, ‖Y - Ŷ‖_F / ‖Y‖_F.

    Args:
        influence: Ŷ as an `Influence`, or as a matrix (K, N).
        Y: the exact matrix, or an `Influence` that holds it.
    """
    missed, size = _residuals(influence, Y)
    total = math.sqrt(size.sum())
    if total == 0:
        raise ArgumentError("Y is zero: an error relative to it means nothing")
    return math.sqrt(missed.sum()) / total


def per_query_error(influence: Any, Y: Any) -> Array:
    """‖Y_q - Ŷ_q‖ / ‖Y_q‖ of each query, (K,).

    For a row of Y that is zero: 0 if the estimate is zero too, else infinity.
    """
    missed, size = (np.sqrt(x) for x in _residuals(influence, Y))
    return np.where(size > 0, _ratio(missed, size), np.where(missed > 0, np.inf, 0.0))


def captured_energy(influence: Any, Y: Any) -> Array:
    """Share of each row's energy that the estimate captures, 1 - ‖Y_q - Ŷ_q‖² / ‖Y_q‖², (K,).

    For a projection, Ŷ = Y Π, it is ‖Ŷ_q‖² / ‖Y_q‖². It is at most 1, and negative for an estimate
    that is worse than none. 1 for a row of zeros that is estimated as such.
    """
    return 1 - per_query_error(influence, Y) ** 2


def oracle(Y: Any, rank: int, kind: Oracle = "svd") -> Influence:
    """The best estimate of a rank, which only somebody who has Y can compute.

        svd:        Ŷ = Y Π,  Π on the leading right-singular subspace of Y
        spherical:  the same of Ỹ = D^-1 Y, D = diag ‖Y_q‖; then rescaled: Ŷ = D Ỹ Π = Y Π

    The first is optimal for reconstruction, the second for the captured energy of Ỹ, which stands
    in for the LDS (eq. 5 of the paper). Rows of zeros stay zero.

    Args:
        Y: the exact matrix (K, N), or an `Influence` that holds it.
        rank: B, at most min(K, N).
        kind: which.
    """
    if kind not in get_args(Oracle):
        raise ArgumentError(f"kind={kind!r}: give one of {list(get_args(Oracle))}")
    exact = _influence(Y, "Y")
    Y = exact.dense()
    if isinstance(rank, bool) or not 1 <= rank <= min(Y.shape):
        raise ArgumentError(
            f"rank={rank!r}: a matrix of {Y.shape[0]} queries and {Y.shape[1]} examples has ranks "
            f"1 to {min(Y.shape)}"
        )
    norms = np.linalg.norm(Y, axis=1)
    scale = norms[:, None] if kind == "spherical" else np.ones((len(Y), 1))
    U, s, Vt = np.linalg.svd(_ratio(Y, scale), full_matrices=False)
    return Influence(
        scale * U[:, :rank] * s[:rank],
        Vt[:rank],
        method=f"oracle-{kind}",
        better=exact.better,
        outputs=exact.outputs,
        weights=exact.weights,
        budget=rank,
        facts=exact.facts,
        query_ids=exact.query_ids,
        example_ids=exact.example_ids,
    )


def by_quartile(values: Any, row_norms: Any) -> Array:
    """Means of a score over the quartiles of queries by row norm, (4,): Q1 has the smallest norms.

    Args:
        values: a score of each query, (K,).
        row_norms: ‖Y_q‖, (K,).
    """
    values, norms = (np.asarray(x, dtype=np.float64) for x in (values, row_norms))
    if values.ndim != 1 or values.shape != norms.shape or len(values) < 4:
        raise ArgumentError(
            f"values has shape {values.shape} and row_norms {norms.shape}: give one of each for "
            "every query, and at least four queries"
        )
    order = np.argsort(norms, kind="stable")
    return np.array([values[quarter].mean() for quarter in np.array_split(order, 4)])


def row_norms(Y: Any) -> Array:
    """‖Y_q‖, (K,), of a matrix or an `Influence`."""
    exact = _influence(Y, "Y")
    parts = [np.linalg.norm(exact.rows(part), axis=1) for part in _parts(exact)]
    return np.concatenate(parts)


def spearman(x: Any, y: Any) -> float:
    """Spearman's rank correlation of two vectors; 0 where one of them is constant."""
    ranks = (rankdata(_flattened(np.asarray(v, dtype=np.float64)[:, None]), axis=0) for v in (x, y))
    return float(_correlation(*ranks)[0])


def _ranks(influence: Any, removals: Removals) -> tuple[Array, Array]:
    """Ranks of predicted and true changes among the subsets, (M, K) each."""
    if removals.num_subsets < 2:
        raise ArgumentError(
            f"there are {removals.num_subsets} removals: a rank correlation needs at least two"
        )
    predicted = removals.predicted(_influence(influence, "influence"))
    return tuple(rankdata(_flattened(x), axis=0) for x in (predicted, removals.delta))


def _flattened(values: Array) -> Array:
    """The same, (M, K), with columns that differ by rounding alone made constant."""
    spread = np.ptp(values, axis=0)
    same = spread <= _ROUNDING * np.abs(values).max(axis=0)
    return np.where(same, 0.0, values)


def _remark(ranks: Array, what: str) -> None:
    constant = np.flatnonzero(np.ptp(ranks, axis=0) == 0)
    if len(constant):
        few = ", ".join(map(str, constant[:5])) + (", ..." if len(constant) > 5 else "")
        warnings.warn(
            f"the {what} changes of {len(constant)} queries ({few}) are the same for every subset: "
            "they score 0",
            MetasketchWarning,
            stacklevel=3,
        )


def _standardized(ranks: Array) -> Array:
    """Columns with mean 0 and norm 1; zero where they are constant."""
    centred = ranks - ranks.mean(0)
    return _ratio(centred, np.linalg.norm(centred, axis=0))


def _correlation(x: Array, y: Array) -> Array:
    """Pearson's correlation of columns, (K,); 0 where one is constant."""
    return np.clip((_standardized(x) * _standardized(y)).sum(0), -1.0, 1.0)  # type: ignore[no-any-return]


def _ratio(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape), where=b != 0)


def _residuals(influence: Any, Y: Any) -> tuple[Array, Array]:
    """‖Y_q - Ŷ_q‖² and ‖Y_q‖², (K,) each, block by block."""
    estimate, exact = _influence(influence, "influence"), _influence(Y, "Y")
    ours = (estimate.num_queries, estimate.num_examples)
    theirs = (exact.num_queries, exact.num_examples)
    if ours != theirs:
        raise ArgumentError(
            f"the estimate is {ours} and Y is {theirs} (queries, examples): they are of different "
            "query sets or runs"
        )
    missed, size = [], []
    for part in _parts(exact):
        rows = exact.rows(part)
        missed.append(np.square(rows - estimate.rows(part)).sum(1))
        size.append(np.square(rows).sum(1))
    return np.concatenate(missed), np.concatenate(size)


_ROWS = 256
"""Rows of a matrix that are made at once."""


def _parts(influence: Influence) -> list[slice]:
    K = influence.num_queries
    return [slice(start, min(start + _ROWS, K)) for start in range(0, K, _ROWS)]


def _influence(given: Any, what: str) -> Influence:
    if isinstance(given, Influence):
        return given
    if given is None:
        raise ArgumentError(f"{what} is None; give an Influence or a matrix (K, N)")
    return Influence.from_dense(given)
