"""Quality without ground truth: intervals that cover as often as they say, from real sweeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import metasketch as ms
from metasketch import quality
from tests import problems

Array = np.ndarray[Any, Any]

K, N = 24, 40


def rows(kind: str) -> tuple[Array, Array, bool]:
    """Y, an estimate of it, and whether that is a projection: rows of sizes over four orders."""
    rng = np.random.default_rng(0)
    Y = np.logspace(0, -4, K)[:, None] * (rng.standard_normal((K, N)) + 0.3 * rng.random((K, 1)))
    if kind == "projection":
        Q = np.linalg.qr((rng.standard_normal((18, K)) @ Y).T)[0]
        return Y, Y @ Q @ Q.T, True
    scale = np.abs(Y).mean(1, keepdims=True)
    return (
        Y,
        0.8 * Y + np.linspace(0.05, 2, K)[:, None] * scale * rng.standard_normal((K, N)),
        False,
    )


def sampled(Y: Array, Y_hat: Array, projection: bool, m: int, seed: int) -> quality.Sampled:
    """Both as m random directions see them."""
    g = np.random.default_rng(seed).standard_normal((N, m))
    u = g - g.mean(0)
    sums, energy = (Y.sum(1), Y_hat.sum(1)), np.square(Y_hat).sum(1)
    return quality.Sampled(Y @ u, Y_hat @ u, *sums, energy, N, projection)


def truth(Y: Array, Y_hat: Array) -> tuple[Array, Array, float]:
    """captured, lds, and captured of the whole."""
    captured = 1 - np.square(Y - Y_hat).sum(1) / np.square(Y).sum(1)
    lds = np.array([np.corrcoef(y, a)[0, 1] for y, a in zip(Y, Y_hat, strict=True)])
    return captured, lds, float(1 - np.square(Y - Y_hat).sum() / np.square(Y).sum())


@pytest.mark.parametrize("kind", ["projection", "other"])
def test_intervals_cover_as_often_as_they_say(kind: str) -> None:
    Y, Y_hat, projection = rows(kind)
    captured, lds, total = truth(Y, Y_hat)
    means = captured.mean(), lds.mean(), total
    inside = []
    for seed in range(500):
        q = quality.estimate(sampled(Y, Y_hat, projection, m=7, seed=seed))
        over_all = (q.mean_captured, q.mean_lds, q.total_captured)
        inside.append(
            [
                np.mean((q.captured_low <= captured) & (captured <= q.captured_high)),
                np.mean((q.lds_low <= lds) & (lds <= q.lds_high)),
                *(i.low <= mean <= i.high for i, mean in zip(over_all, means, strict=True)),
            ]
        )
    covered = np.mean(inside, axis=0)
    assert covered[:2] == pytest.approx(0.9, abs=0.02)
    assert covered[2:] == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("kind", ["projection", "other"])
def test_many_directions_give_the_truth(kind: str) -> None:
    Y, Y_hat, projection = rows(kind)
    captured, lds, _ = truth(Y, Y_hat)
    q = quality.estimate(sampled(Y, Y_hat, projection, m=400, seed=1))
    np.testing.assert_allclose(1 - q.captured, 1 - captured, rtol=0.3)
    np.testing.assert_allclose(q.lds, lds, atol=0.15)
    assert (q.lds_high - q.lds_low).max() < 0.2


def test_a_projection_by_hand() -> None:
    """One query, Y = (3, -3, 4, -4) and Ŷ = (3, -3, 0, 0): residual (0, 0, 4, -4), ‖·‖² = 32, and
    one direction seen twice, u = (1, -1, 2, -2) and -u: Σ⟨r, u⟩² = 2 · 16²."""
    Y, Y_hat = np.array([[3.0, -3, 4, -4]]), np.array([[3.0, -3, 0, 0]])
    u = np.array([[1.0, -1, 2, -2], [-1, 1, -2, 2]]).T
    zero = np.zeros(1)
    q = quality.estimate(
        quality.Sampled(Y @ u, Y_hat @ u, zero, zero, np.array([18.0]), 4, True), level=0.5
    )
    low, high = (512 / stats.chi2.ppf(p, 2) for p in (0.75, 0.25))
    assert q.captured[0] == pytest.approx(18 / (18 + 256))
    assert q.lds[0] == pytest.approx((18 / (18 + 256)) ** 0.5)
    assert (q.captured_low[0], q.captured_high[0]) == pytest.approx(
        (18 / (18 + high), 18 / (18 + low))
    )
    assert q.lds_high[0] == pytest.approx((18 / (18 + low)) ** 0.5)


def test_ends_are_those_of_the_noncentral_t() -> None:
    s = sampled(*rows("other"), m=7, seed=3)
    q = quality.estimate(s)
    xx = np.square(s.Y_hat_u).sum(1)
    slope = (s.Y_u * s.Y_hat_u).sum(1) / xx
    t = slope * np.sqrt(xx * 6 / np.square(s.Y_u - slope[:, None] * s.Y_hat_u).sum(1))
    for end, tail in ((q.lds_low, 0.05), (q.lds_high, 0.95)):
        delta = end / np.sqrt(1 - end**2) * np.sqrt(xx / s.a2)
        np.testing.assert_allclose(stats.nct.sf(t, 6, delta), tail, atol=0.003)


def test_rows_that_vanish() -> None:
    """Nothing to capture; nothing predicted; everything captured."""
    Y, Y_hat, _ = rows("other")
    Y[0] = Y_hat[0] = 0.0
    Y_hat[1] = 0.0
    Y_hat[2] = Y[2]
    for projection in (False, True):
        q = quality.estimate(sampled(Y, Y_hat, projection, 5, seed=0))
        ends = (q.captured_low, q.captured, q.captured_high), (q.lds_low, q.lds, q.lds_high)
        for captured, lds in zip(*ends, strict=True):
            assert np.isnan([captured[0], lds[0]]).all()
            assert lds[1] == 0.0
            assert [captured[2], lds[2]] == pytest.approx([1.0, 1.0])
        assert np.isfinite([q.mean_lds.low, q.mean_captured.high, q.total_captured.low]).all()
        again = quality.Quality.of(q.facts())
        np.testing.assert_array_equal(again.captured, q.captured)
        assert again.mean_lds == q.mean_lds


@pytest.fixture(scope="module")
def asked() -> tuple[ms.Run, ms.Queries]:
    return problems.asked(30, 12)


@pytest.mark.parametrize("method", ["spell", "pca", "exact"])
def test_an_audit_measures_rows_of_y(
    asked: tuple[ms.Run, ms.Queries], method: str, tmp_path: Path
) -> None:
    """What comes with an attribution is what an audit of it finds, and survives a file."""
    run, queries = asked
    Y = ms.attribute(run, queries, "exact").dense()
    budget = None if method == "exact" else 11
    found = ms.attribute(run, queries, method, budget, audit=6)
    assert found.quality is not None
    assert found.sweeps["audit"] == found.quality.sweeps == 6
    plain = ms.attribute(run, queries, method, budget)
    assert plain.quality is None
    audited = ms.audit(run, queries, plain, sweeps=6)
    loaded = ms.Influence.load(found.save(tmp_path / "x.safetensors"))
    for other in (audited, loaded):
        assert other.quality is not None
        np.testing.assert_allclose(other.quality.lds_low, found.quality.lds_low, rtol=1e-6)
        assert str(other.quality) == str(found.quality)
    captured, _, _ = truth(Y, found.dense())
    if method == "exact":
        np.testing.assert_allclose(found.quality.captured_low, 1, atol=1e-12)
    elif method == "spell":
        error = (1 - found.quality.captured) / (1 - captured)
        assert error.min() > stats.chi2.ppf(1e-5, 5) / 5
        assert error.max() < stats.chi2.isf(1e-5, 5) / 5


def test_a_store_keeps_what_an_audit_measured(
    asked: tuple[ms.Run, ms.Queries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queries = asked
    first = ms.attribute(run, queries, "spell", 4, tmp_path, audit=5)
    assert (tmp_path / "audit" / "000005.safetensors").exists()
    monkeypatch.setattr(ms.Run, "_sweep", lambda *_: pytest.fail("a sweep was taken"))
    again = ms.attribute(run, queries, "spell", 4, tmp_path, audit=5)
    assert str(again.quality) == str(first.quality)
    assert ms.attribute(run, queries, "spell", 4, tmp_path).quality is None


def test_mistakes_are_named(asked: tuple[ms.Run, ms.Queries]) -> None:
    run, queries = asked
    found = ms.attribute(run, queries, "mage", 3)
    with pytest.raises(ms.ArgumentError, match="audit of 3 sweeps"):
        ms.audit(run, queries, found, sweeps=3)
    with pytest.raises(ms.ArgumentError, match="audit of 2 sweeps"):
        ms.attribute(run, queries, "mage", 3, audit=2)
    with pytest.raises(ms.ArgumentError, match="level=1"):
        ms.audit(run, queries, found, level=1)
    few = ms.Queries(problems.inputs("mlp", 5, seed=2), ms.losses.cross_entropy)
    with pytest.raises(ms.ArgumentError, match="12 queries and 30 examples; these are 5 queries"):
        ms.audit(run, few, found)
    others = ms.Queries(problems.inputs("mlp", 12, seed=5), ms.losses.cross_entropy)
    with pytest.raises(ms.ArgumentError, match="another run, or of other queries: .* query data"):
        ms.audit(run, others, found)
    unmarked = ms.Influence.from_dense(np.ones((12, 30)))  # which says nothing of its origin
    assert ms.audit(run, queries, unmarked).quality is not None
    assert torch.is_grad_enabled()
