"""Scores against numbers worked out by hand, scipy, simulation, and the properties of oracles."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
from scipy import stats

import metasketch as ms
from metasketch.removals import Removals, draw

Array = np.ndarray[Any, Any]


def matrix(K: int = 8, N: int = 40, seed: int = 0) -> Array:
    """Rows over three orders of magnitude."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((K, N)) * np.logspace(0, -3, K)[:, None]


def of(Y: Array, M: int = 30, size: int = 6, noise: float = 0.0) -> Removals:
    """Removals whose true effects are those of Y, with noise relative to their spread."""
    subsets = np.stack([S.numpy() for S in draw(Y.shape[1], size, M, seed=0)])
    delta = -Y[:, subsets].sum(2).T
    rng = np.random.default_rng(1)
    delta = delta + noise * delta.std(0) * rng.standard_normal(delta.shape)
    return Removals(subsets, delta, np.zeros(len(Y)))


def test_lds_is_scipys_spearman() -> None:
    Y, Y_hat = matrix(), matrix(seed=5) + matrix()
    removals = of(Y, noise=0.5)
    removals.delta[4:9, 2] = removals.delta[4, 2]  # ties
    removals.delta[:, 3] = np.round(removals.delta[:, 3] / removals.delta[:, 3].std())
    scores = ms.evaluate.lds(Y_hat, removals)
    for q in range(len(Y)):
        predicted = -Y_hat[q][removals.subsets].sum(1)
        expected = stats.spearmanr(predicted, removals.delta[:, q]).statistic
        assert scores[q] == pytest.approx(expected, abs=1e-12)


def test_lds_by_hand() -> None:
    """One example a subset, so predictions are -Y: ranks 4 2 3 1 and 4 1 3 2, Σd² = 2."""
    Y_hat = [[-4.0, -2.0, -3.0, -1.0], [0.0, 0.0, 1.0, 2.0]]
    delta = np.array([[9.0, 0.0, 5.0, 4.0], [1.0, 1.0, 0.0, -3.0]]).T
    removals = Removals(np.arange(4)[:, None], delta, np.zeros(2))
    scores = ms.evaluate.lds(Y_hat, removals)
    np.testing.assert_allclose(scores, [1 - 6 * 2 / (4 * 15), 1.0], rtol=1e-14)


def test_what_ranks_nothing_scores_zero() -> None:
    Y = matrix()
    removals = of(Y)
    Y_hat = Y.copy()
    Y_hat[1], Y_hat[4] = 0.0, 0.1  # a row of zeros, and one of equal entries
    removals.delta[:, 6] = 0.25
    with pytest.warns(ms.MetasketchWarning) as said:
        scores = ms.evaluate.lds(Y_hat, removals)
    assert np.flatnonzero(scores == 0).tolist() == [1, 4, 6]
    np.testing.assert_allclose(scores[[0, 2, 3, 5, 7]], 1.0)
    assert [str(w.message).split(" are")[0] for w in said] == [
        "the predicted changes of 2 queries (1, 4)",
        "the true changes of 1 queries (6)",
    ]


def test_the_identity_of_appendix_a() -> None:
    """Pearson over subsets of the effects of two rows = Pearson of the rows; the simulation's
    error is that of a correlation from M pairs, (1 - ρ²) / √M."""
    rng = np.random.default_rng(3)
    M, N = 40_000, 30
    a = rng.gamma(0.5, size=N)  # skewed, and far from mean zero
    b = a + 0.8 * rng.standard_normal(N)
    subsets = np.argsort(rng.random((M, N)), axis=1)[:, :6]
    simulated = np.corrcoef(-a[subsets].sum(1), -b[subsets].sum(1))[0, 1]
    rows = np.corrcoef(a, b)[0, 1]
    assert abs(simulated - rows) < 4 * (1 - rows**2) / math.sqrt(M)
    assert abs(rows - stats.spearmanr(a, b).statistic) > 0.05  # not any correlation would do


def test_subsets_are_uniform() -> None:
    """Cov(1_S) = α H: each example is in a share p of subsets, each pair equally often."""
    N, size, M = 10, 3, 4000
    member = np.zeros((M, N))
    for j, S in enumerate(draw(N, size, M, seed=7)):
        assert len(set(S.tolist())) == size
        member[j, S] = 1
    p = size / N
    alpha = p * (1 - p) * N / (N - 1)
    expected = alpha * (np.eye(N) - 1 / N)
    assert np.abs(np.cov(member.T) - expected).max() < 5 * 0.25 / math.sqrt(M)


def test_errors_by_hand() -> None:
    Y = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    Y_hat = np.array([[3.0, 1.0], [0.0, 0.0], [0.5, 1.0], [0.0, 2.0]])
    assert ms.evaluate.relative_error(Y_hat, Y) == pytest.approx(math.sqrt(13.25 / 26))
    np.testing.assert_allclose(ms.evaluate.per_query_error(Y_hat, Y), [0.6, 0.0, 0.5, np.inf])
    np.testing.assert_allclose(ms.evaluate.captured_energy(Y_hat, Y)[:3], [0.64, 1.0, 0.75])
    exact = ms.Influence.from_dense(Y)
    assert ms.evaluate.relative_error(exact, exact) == 0.0
    np.testing.assert_array_equal(ms.evaluate.row_norms(exact), [5.0, 0.0, 1.0, 0.0])


def test_a_projection_captures_its_own_energy() -> None:
    Y = matrix()
    projected = ms.evaluate.oracle(Y, 3, "spherical")
    share = np.square(projected.dense()).sum(1) / np.square(Y).sum(1)
    np.testing.assert_allclose(ms.evaluate.captured_energy(projected, Y), share, rtol=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_oracles_are_optimal_for_their_objective(rank: int) -> None:
    """Eckart-Young: the error of either is the tail of the singular values that it truncates."""
    Y = matrix()
    norms = np.linalg.norm(Y, axis=1, keepdims=True)
    best, spherical = (ms.evaluate.oracle(Y, rank, kind) for kind in ("svd", "spherical"))
    s, s_tilde = (np.linalg.svd(X, compute_uv=False) for X in (Y, Y / norms))
    assert ms.evaluate.relative_error(best, Y) == pytest.approx(
        math.sqrt(np.square(s[rank:]).sum() / np.square(s).sum()), abs=1e-12
    )
    captured = ms.evaluate.captured_energy(spherical, Y).sum()
    assert captured == pytest.approx(np.square(s_tilde[:rank]).sum(), rel=1e-12)
    assert best.rank == spherical.rank == rank
    if rank < 8:
        assert ms.evaluate.captured_energy(best, Y).sum() < captured - 1e-3
        assert ms.evaluate.relative_error(spherical, Y) > ms.evaluate.relative_error(best, Y)
    # rescaled to Y's row norms: a projection of Y, not of its normalised rows
    Pi = spherical.basis.T @ spherical.basis
    np.testing.assert_allclose(spherical.dense(), Y @ Pi, atol=1e-12)


def test_the_spherical_oracle_leaves_zero_rows_alone() -> None:
    Y = matrix()
    Y[5] = 0.0
    found = ms.evaluate.oracle(Y, 4, "spherical")
    np.testing.assert_array_equal(found.dense()[5], np.zeros(40))


def test_an_oracle_is_an_influence_of_the_same_run() -> None:
    exact = ms.Influence.from_dense(matrix(), better="higher", facts={"data": 3}, outputs=range(8))
    found = ms.evaluate.oracle(exact, 2)
    assert (found.better, found.facts, found.budget) == ("higher", {"data": 3}, 2)
    np.testing.assert_array_equal(found.outputs, np.arange(8.0))


def test_quartiles() -> None:
    norms = np.array([5.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0])
    np.testing.assert_array_equal(ms.evaluate.by_quartile(norms, norms), [1.5, 3.5, 5.5, 7.5])
    nine = np.arange(9.0)
    np.testing.assert_array_equal(ms.evaluate.by_quartile(nine, nine), [1.0, 3.5, 5.5, 7.5])


def test_the_interval_covers_the_true_score() -> None:
    """Over 200 problems of the same kind: subsets and queries are drawn anew, and the interval
    should hold the mean over all of them about as often as it says."""
    rng = np.random.default_rng(0)
    M, K, rho = 60, 15, 0.6

    def problem() -> tuple[Array, Removals]:
        strength = np.clip(rho + 0.2 * rng.standard_normal(K), -0.95, 0.95)
        Y_hat = rng.standard_normal((K, M))  # one example a subset
        noise = rng.standard_normal((K, M))
        delta = -(strength[:, None] * Y_hat + np.sqrt(1 - strength[:, None] ** 2) * noise).T
        return Y_hat, Removals(np.arange(M)[:, None], delta, np.zeros(K))

    found = [ms.evaluate.lds_interval(*problem(), num_samples=200) for _ in range(200)]
    truth = np.mean([interval.mean for interval in found])
    covered = np.mean([i.low <= truth <= i.high for i in found])
    assert 0.82 <= covered <= 0.98
    assert all(i.low < i.mean < i.high for i in found)


def test_an_interval_narrows_with_subsets_and_repeats_by_its_seed() -> None:
    Y, Y_hat = matrix(K=40), matrix(K=40) + matrix(K=40, seed=9)
    few, many = (ms.evaluate.lds_interval(Y_hat, of(Y, M), num_samples=300) for M in (20, 400))
    assert many.high - many.low < few.high - few.low
    assert few == ms.evaluate.lds_interval(Y_hat, of(Y, 20), num_samples=300)
    assert few != ms.evaluate.lds_interval(Y_hat, of(Y, 20), num_samples=300, seed=1)
    assert few.mean == pytest.approx(ms.evaluate.lds(Y_hat, of(Y, 20)).mean())


def test_geometry_by_hand() -> None:
    Y = np.diag([3.0, 0.0, 4.0, 0.003, 0.0])
    found = ms.evaluate.geometry(Y, gradient_norms=[2.0, 0.5, 3.0, 1.0, 0.1])
    np.testing.assert_array_equal(found.sorted_norms, [4.0, 3.0, 0.003, 0.0, 0.0])
    total = 25 + 9e-6
    np.testing.assert_allclose(
        found.cumulative_energy, [16 / total, 25 / total, 1.0, 1.0, 1.0], rtol=1e-14
    )
    assert found.orders_of_magnitude == pytest.approx(math.log10(4 / 0.003))
    assert found.top_quartile_share == pytest.approx(25 / total)  # two of five
    assert found.num_zero == 2
    expected = stats.spearmanr([2.0, 0.5, 3.0, 1.0, 0.1], np.linalg.norm(Y, axis=1)).statistic
    assert found.gradient_correlation == pytest.approx(expected)
    assert ms.evaluate.geometry(Y).gradient_correlation is None


MISTAKES: dict[str, tuple[Any, str]] = {
    "queries": (lambda Y: ms.evaluate.lds(Y[:3], of(Y)), "3 queries, the removals measured 8"),
    "examples": (lambda Y: ms.evaluate.lds(Y[:, :9], of(Y)), "of another run"),
    "one subset": (lambda Y: ms.evaluate.lds(Y, of(Y, M=1)), "at least two"),
    "level": (lambda Y: ms.evaluate.lds_interval(Y, of(Y), level=90), "level=90"),
    "samples": (lambda Y: ms.evaluate.lds_interval(Y, of(Y), num_samples=0), "num_samples=0"),
    "shapes": (lambda Y: ms.evaluate.relative_error(Y[:2], Y), "different query sets or runs"),
    "zero": (lambda Y: ms.evaluate.relative_error(Y, 0 * Y), "Y is zero"),
    "nothing": (lambda Y: ms.evaluate.relative_error(Y, None), "Y is None"),
    "rank": (lambda Y: ms.evaluate.oracle(Y, 9), "rank=9"),
    "no rank": (lambda Y: ms.evaluate.oracle(Y, 0), "rank=0"),
    "kind": (lambda Y: ms.evaluate.oracle(Y, 2, "round"), "kind='round'"),
    "quartiles": (lambda Y: ms.evaluate.by_quartile(Y[0], Y[:, 0]), r"\(40,\) and row_norms \(8,"),
    "three": (lambda Y: ms.evaluate.by_quartile([1, 2, 3], [1, 2, 3]), "four queries"),
    "no geometry": (lambda Y: ms.evaluate.geometry(0 * Y), "no query is influenced"),
    "gradients": (lambda Y: ms.evaluate.geometry(Y, [1.0]), r"shape \(1,\)"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named(what: str) -> None:
    call, words = MISTAKES[what]
    with pytest.raises(ms.ArgumentError, match=words):
        call(matrix())


def test_different_runs_and_queries_are_refused() -> None:
    Y = matrix()
    asked = of(Y)
    facts = {"data": 1, "steps": 5, "query data": 7, "measure": "loss"}
    removals = Removals(asked.subsets, asked.delta, asked.full, facts=facts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ms.evaluate.lds(ms.Influence.from_dense(Y, facts=facts), removals)
    for name, words in (("query data", "different queries"), ("steps", "different runs")):
        other = ms.Influence.from_dense(Y, facts={**facts, name: 0})
        with pytest.raises(ms.ArgumentError, match=f"{words} .they differ in {name}"):
            ms.evaluate.lds(other, removals)
