"""Advice: a rehearsal on Y itself is the method; what is recommended is what reaches a target."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import metasketch as ms
from metasketch.methods import make
from metasketch.rehearse import Outcome, rehearse, stand_ins
from tests import problems

K, N = 20, 40


@pytest.fixture(scope="module")
def asked() -> tuple[ms.Run, ms.Queries]:
    return problems.asked(N, K)


@pytest.fixture(scope="module")
def Y(asked: tuple[ms.Run, ms.Queries]) -> np.ndarray[Any, Any]:
    return ms.attribute(*asked, "exact").dense()


@pytest.fixture(scope="module")
def advice(asked: tuple[ms.Run, ms.Queries]) -> ms.Advice:
    return ms.advise(*asked, budgets=[2, 5, 12])


def outcome(Y: Any, Y_hat: Any) -> Outcome:
    """The scores, written out."""
    share = 1 - np.square(Y - Y_hat).sum(1) / np.square(Y).sum(1)
    total = 1 - np.square(Y - Y_hat).sum() / np.square(Y).sum()
    cosines = (Y * Y_hat).sum(1) / np.linalg.norm(Y, axis=1) / np.linalg.norm(Y_hat, axis=1)
    return Outcome(total, share.mean(), cosines.mean())


@pytest.mark.parametrize("method", ["mage", "random", "first", "pca"])
def test_a_rehearsal_on_y_is_the_method(
    asked: tuple[ms.Run, ms.Queries], Y: np.ndarray[Any, Any], method: str
) -> None:
    G = asked[1].gram(asked[0])
    budgets = [2, 5, 12]
    found = rehearse([torch.from_numpy(Y)], G, make(method), budgets)
    for B, rehearsed in zip(budgets, found, strict=True):
        expected = outcome(Y, ms.attribute(*asked, method, B).dense())
        np.testing.assert_allclose(rehearsed, expected, atol=1e-7)


@pytest.mark.parametrize("B", [6, 14])
def test_so_is_an_adaptive_one(
    asked: tuple[ms.Run, ms.Queries], Y: np.ndarray[Any, Any], B: int
) -> None:
    G = asked[1].gram(asked[0])
    (found,) = rehearse([torch.from_numpy(Y)], G, make("spell"), [B])
    expected = outcome(Y, ms.attribute(*asked, "spell", B).dense())
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_two_stand_ins() -> None:
    """Projections get the mean of both, other estimators the worse."""
    g = torch.Generator().manual_seed(0)
    one, two = (torch.randn(K, 30, generator=g, dtype=torch.float64) for _ in range(2))
    G = one @ one.T
    for method in ("mage", "pca"):
        (first,), (second,) = (rehearse([L], G, make(method), [6]) for L in (one, two))
        (both,) = rehearse([one, two], G, make(method), [6])
        worse = min(first, second, key=lambda o: o.lds)
        mean = Outcome(*np.mean([first, second], axis=0))
        np.testing.assert_allclose(both, mean if method == "mage" else worse)


def test_a_stand_in_has_the_products_of_gradients_or_the_measured_energies() -> None:
    g = torch.Generator().manual_seed(1)
    V = torch.randn(30, K, generator=g, dtype=torch.float64) * torch.logspace(0, -2, K).double()
    G = V.T @ V
    (alone,) = stand_ins(G, None)
    torch.testing.assert_close(alone @ alone.T, G)
    # Training that damps the leading direction of G, as measured by many directions.
    leading = torch.linalg.eigh(G).eigenvectors[:, -1]
    Y = (torch.eye(K) - 0.9 * torch.outer(leading, leading)).double() @ V.T
    U = torch.randn(30, 4000, generator=g, dtype=torch.float64)
    raw, unit = stand_ins(G, Y @ U)
    energy = float(leading @ Y @ Y.T @ leading)
    assert float((leading @ raw).square().sum()) == pytest.approx(energy, rel=0.1)
    for L, D in ((raw, 1.0), (unit, G.diagonal().sqrt()[:, None])):
        expected = float((Y / D).square().sum())
        assert float((L / D).square().sum()) == pytest.approx(expected, rel=0.1)


def test_advice_covers_every_method_and_budget(
    asked: tuple[ms.Run, ms.Queries], advice: ms.Advice
) -> None:
    """Save those with surrogates: a stand-in has no training examples to make them of."""
    run, queries = asked
    left_out = {"exact", "sage", "prior"}
    expected = {(m, B) for m in {*ms.methods()} - left_out for B in (2, 5, 12)}
    assert {(o.method, o.budget) for o in advice.options} == expected
    np.testing.assert_allclose(
        advice.gradients.row_norms, queries.gradient_norms(run).numpy(), rtol=1e-10
    )
    assert advice.rank_correlation is not None
    assert -1 <= advice.rank_correlation <= 1
    for o in advice.options:
        assert o.plan.budget == o.budget
        assert o.outcome.total <= 1
    text = str(advice)
    assert f"budget={advice.best('attribution').budget}" in text
    assert len([line for line in text.splitlines() if line.startswith("mage ")]) == 3


def test_what_is_captured_is_near_to_what_was_said(
    asked: tuple[ms.Run, ms.Queries], Y: np.ndarray[Any, Any], advice: ms.Advice
) -> None:
    """Within a fifth where most of it is captured."""
    checked = 0
    for o in advice.options:
        if o.method in ("mage", "spell"):
            true = outcome(Y, ms.attribute(*asked, o.method, o.budget).dense())
            if true.total > 0.5:
                assert o.outcome.total == pytest.approx(true.total, rel=0.2)
                checked += 1
    assert checked >= 2


def test_the_best_is_the_quickest_that_is_enough(advice: ms.Advice) -> None:
    mage, pca = (
        next(o for o in advice.options if (o.method, o.budget) == (m, 5)) for m in ("mage", "pca")
    )
    quick = dataclasses.replace(pca.plan, seconds=1.0)
    slow = dataclasses.replace(mage.plan, seconds=2.0)
    pca = dataclasses.replace(pca, plan=quick, outcome=Outcome(0.6, 0.5, 0.4))
    mage = dataclasses.replace(mage, plan=slow, outcome=Outcome(0.9, 0.3, 0.3))
    both = dataclasses.replace(advice, options=(pca, mage))
    assert both.best("reconstruction", 0.5) == pca
    assert both.best("reconstruction", 0.8) == mage
    assert both.best("reconstruction", 0.95) == mage  # nothing is enough
    assert both.best("attribution", 0.95) == pca
    assert 'that is below 0.8: take a larger budget, or method="exact"' in str(both)


def test_without_sweeps_it_says_so(asked: tuple[ms.Run, ms.Queries]) -> None:
    found = ms.advise(*asked, sweeps=0, budgets=[3])
    assert found.rank_correlation is None
    assert "No sweep was taken" in str(found)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "sweeps": ({"sweeps": 2}, "sweeps=2: give at least 4, or 0"),
    "budget": ({"budgets": [3, K + 1]}, f"from 1 to the {K} queries"),
    "no budgets": ({"budgets": []}, "budgets="),
    "fraction": ({"budgets": [0.1]}, "whole numbers"),
    "workers": ({"workers": 0}, "workers=0"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named(asked: tuple[ms.Run, ms.Queries], what: str) -> None:
    given, words = MISTAKES[what]
    with pytest.raises(ms.ArgumentError, match=words):
        ms.advise(*asked, **given)


def test_an_unknown_objective(advice: ms.Advice) -> None:
    with pytest.raises(ms.ArgumentError, match="objective='speed'"):
        advice.best("speed")  # type: ignore[arg-type]
