"""The doctor passes what is smooth and fails what is not; each check finds what it looks for."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import symptoms
from metasketch.double import doubled
from metasketch.jackknife import jackknife
from metasketch.remedies import remedies
from metasketch.verdict import Verdict, judged, warn
from tests import problems

N = 40

VERDICT = Verdict("smooth", 0.95, 0.9, 0.99, 0.01, 8, True)


def run_of(
    rate: float = 0.05, dtype: torch.dtype = torch.float64, store: Any = None, **options: Any
) -> ms.Run:
    """An MLP that is smooth at this rate."""
    recipe = problems.recipe("mlp", ms.SGD(lr=rate), "plain", epochs=4, batch_size=10)
    x, y = problems.inputs("mlp", N, seed=1)
    recipe = problems.with_options(
        recipe, model=recipe.model.to(dtype), data=(x.to(dtype), y), **options
    )
    return ms.train(recipe, store=store)


@pytest.fixture(scope="module")
def queries() -> ms.Queries:
    return ms.Queries(problems.inputs("mlp", 12, seed=2), ms.losses.cross_entropy)


def by_name(diagnosis: ms.Diagnosis) -> dict[str, symptoms.Finding]:
    return {finding.name: finding for finding in diagnosis.findings}


def test_a_smooth_run_passes(queries: ms.Queries, tmp_path: Path) -> None:
    """And carries its verdict, into its store and out of it."""
    run = run_of(dtype=torch.float32, store=tmp_path)
    assert run.verdict is None
    found = ms.diagnose(run, queries, 12, fractions=(0.05, 0.1))
    assert found.passed
    assert found.score > 0.95
    assert found.along > 0.95
    checks = by_name(found)
    assert {name: f.passed for name, f in checks.items()} == {
        **dict.fromkeys(("replay", "adjoint", "precision", "difference", "loss scale"), True),
        "interpolated": None,
    }
    assert checks["difference"].value is not None
    assert checks["difference"].value < 1e-4
    assert checks["precision"].value is not None
    assert 1e-9 < checks["precision"].value < 1e-3
    assert found.advice == ()
    assert "LDS of exact rows, 5 % removed" in str(found)
    loaded = ms.load_run(run.recipe, tmp_path)
    assert loaded.verdict == run.verdict == found.verdict


def test_predictions_are_those_of_exact_rows(queries: ms.Queries) -> None:
    """One forward sweep along a removal is what exact rows predict for it; the score is theirs."""
    run = run_of()
    Y = ms.attribute(run, queries, "exact")
    found = ms.diagnose(run, queries, 6, fractions=(0.1,), precision=False)
    removals = ms.evaluate.removals(run, queries, fraction=0.1, num_subsets=6)
    predicted = Y.predict_removal(removals.subsets)
    np.testing.assert_allclose(found.predicted, predicted, rtol=1e-8, atol=1e-13)
    np.testing.assert_allclose(found.true, removals.delta, rtol=1e-6, atol=1e-12)
    assert found.score == pytest.approx(ms.evaluate.lds(Y, removals).mean(), abs=0.05)


def test_a_rough_run_fails_and_is_told_what_to_change(queries: ms.Queries) -> None:
    """At a rate far too high training is chaotic, and no derivative predicts it."""
    run = run_of(rate=40.0, schedule=None)
    found = ms.diagnose(run, queries, 16, fractions=(0.05,), precision=False)
    assert found.verdict.word == "rough"
    assert not found.passed
    assert "a smaller learning rate: its peak is 40; try 10" in found.advice[0]
    assert "warm up" in found.advice[1]
    with pytest.warns(ms.MetasketchWarning, match="the doctor found this run rough") as said:
        result = ms.attribute(run, queries, "first", 2)
    assert len(said) == 1
    assert "rough" in result.notes[0]


def test_a_run_that_was_never_checked_is_warned_of(queries: ms.Queries) -> None:
    run = run_of()
    with pytest.warns(ms.MetasketchWarning, match="never checked: ms.diagnose"):
        result = ms.attribute(run, queries, "mage", 2)
    assert "never checked" in result.notes[0]
    run.judge(VERDICT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ms.attribute(run, queries, "mage", 2).notes == ()


def test_words_of_a_verdict() -> None:
    assert [judged(low, high) for low, high in ((0.8, 1), (0.79, 0.9), (0.2, 0.79))] == [
        "smooth",
        "unclear",
        "rough",
    ]
    assert warn(VERDICT) == []
    broken = dataclasses.replace(VERDICT, sound=False)
    assert not broken.passed
    with pytest.warns(ms.MetasketchWarning, match="check of its replay or of its derivatives"):
        warn(broken)
    assert Verdict.of(VERDICT.facts()) == VERDICT
    assert Verdict.of({"word": "of another version"}) is None


def test_hidden_state_breaks_the_replay(queries: ms.Queries) -> None:
    calls = iter(range(100_000))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return ms.losses.cross_entropy(model, batch) * (1 + 1e-9 * next(calls))

    finding = symptoms.replays(run_of(loss=loss))
    assert finding.passed is False
    assert "came out differently" in finding.words


def test_the_adjoint_check_sees_a_wrong_derivative() -> None:
    run = run_of()
    bar = torch.ones(len(run.final.params), dtype=torch.float64)
    row = run.replay(run.named(bar[None]))[0]
    tangent = run.flat(run.forward(row[None]))[0]
    good, bad = (
        symptoms.adjoint(run, bar, row, tangent),
        symptoms.adjoint(run, bar, row, 1.01 * tangent),
    )
    assert (good.passed, bad.passed) == (True, False)
    assert good.value is not None
    assert good.value < 1e-12
    assert bad.value == pytest.approx(0.01)


def test_a_wrong_direction_fails_the_difference(queries: ms.Queries) -> None:
    run = run_of()
    u = symptoms.signs(N, 1, 0)
    Y_u = torch.from_numpy(ms.attribute(run, queries, "exact").dense() @ u[0].numpy())
    precision, difference = symptoms.precise(run, queries, u[0], Y_u)
    assert (precision.passed, difference.passed) == (True, True)
    precision, difference = symptoms.precise(run, queries, u[0], 1.1 * Y_u)
    assert precision.passed is False
    assert precision.value == pytest.approx(0.1, rel=1e-3)


def test_the_twin_in_float64_is_the_same_training(queries: ms.Queries) -> None:
    single, double = run_of(dtype=torch.float32), run_of()
    twin = ms.train(doubled(single.recipe))
    assert twin.final.params.dtype == torch.float64
    # They begin at weights that were rounded to single precision.
    torch.testing.assert_close(twin.final.params, double.final.params, atol=1e-6, rtol=1e-5)
    scalar = problems.recipe("mlp", "sgd", "scalar")
    assert doubled(scalar).loss_form == "scalar"
    assert doubled(scalar).loss_takes_step


def test_another_function_in_float64_is_not_compared(queries: ms.Queries) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        temperature = 2.0 if batch[0].dtype == torch.float32 else 1.0
        return temperature * ms.losses.cross_entropy(model, batch)

    run = run_of(dtype=torch.float32, loss=loss)
    u = symptoms.signs(N, 1, 0)[0]
    for finding in symptoms.precise(run, queries, u, torch.ones(12, dtype=torch.float64)):
        assert finding.passed is None
        assert "first step has other losses" in finding.words


@pytest.mark.parametrize(("scale", "passed"), [(1.0, True), (1e-9, False), (1e8, False)])
def test_the_scale_of_the_loss(scale: float, passed: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return scale * ms.losses.cross_entropy(model, batch)

    finding = symptoms.loss_scale(run_of(rate=0.05 / scale, loss=loss))
    assert finding.passed is passed
    assert ("scale the loss" in finding.words) is not passed


def test_eps_that_decides_adams_steps() -> None:
    recipe = problems.recipe("mlp", ms.Adam(lr=1e-3, eps=1.0), "plain")
    finding = symptoms.loss_scale(ms.train(recipe))
    assert finding.passed is False
    assert "decided by eps" in finding.words
    rooted = problems.recipe("mlp", ms.Adam(lr=1e-3, eps=1.0, eps_root=1e-8), "plain")
    assert symptoms.loss_scale(ms.train(rooted)).passed


def test_interpolated_queries_are_counted() -> None:
    """A margin of 18 reads 0 in float32."""
    x, y = problems.inputs("mlp", 12, seed=2)

    def sharp(model: nn.Module, batch: Any) -> Tensor:
        x, y, scale = batch
        logits = torch.nn.functional.one_hot(y, problems.CLASSES) * scale[:, None]
        return ms.losses.cross_entropy(lambda _: logits + 0 * model(x), (x, y))

    scale = torch.tensor([18.0] * 5 + [3.0] * 7, dtype=torch.float64)
    finding = symptoms.interpolated(run_of(), ms.Queries((x, y, scale), sharp))
    assert finding.value == pytest.approx(5 / 12)
    assert "5 of 12" in finding.words


def test_remedies_name_what_is_there() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.MaxPool1d(2))
    net.append(nn.Flatten()).append(nn.Linear(4, 3))
    recipe = problems.recipe("mlp", ms.Adam(lr=0.1), "plain", schedule=None)
    words = " | ".join(remedies(problems.with_options(recipe, model=net.double())))
    for knob in ("peak is 0.1; try 0.025", "warm up", "eps_root", "GELU or SiLU in place of ReLU"):
        assert knob in words
    assert "average pooling in place of MaxPool1d" in words
    assert "the model has none" in words
    smooth = problems.recipe("cnn", ms.SGD(lr=0.1, momentum=0.99), "plain")
    words = " | ".join(remedies(smooth))
    assert "less momentum than 0.99" in words
    assert "eps_root" not in words
    assert "the model has none" not in words


def test_the_jackknife_of_a_mean_is_students() -> None:
    x = np.random.default_rng(0).standard_normal(7)
    centre, low, high = jackknife(lambda kept: x[kept].mean(), 7, 0.9)
    half = 1.9431802805153022 * x.std(ddof=1) / 7**0.5
    assert [float(v) for v in (centre, low, high)] == pytest.approx(
        [x.mean(), x.mean() - half, x.mean() + half]
    )


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"retrainings": 7}, "retrainings=7: a whole number of at least 8"),
    "no number": ({"retrainings": 8.0}, "retrainings=8.0"),
    "fraction": ({"fractions": (0.0, 0.5)}, "names 0.0"),
    "none": ({"fractions": ()}, "fractions is empty"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named_before_anything_is_trained(
    queries: ms.Queries, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, words = MISTAKES[what]
    run = run_of()
    monkeypatch.setattr(ms.Run, "_sweep", lambda *_: pytest.fail("a sweep was taken"))
    with pytest.raises(ms.ArgumentError, match=words):
        ms.diagnose(run, queries, **given)
