"""Removals: true effects, their store, and what is refused."""

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import retrain
from metasketch.removals import draw
from tests import problems

F64 = torch.float64
N, M = problems.NUM_EXAMPLES, 7
OPTIONS: dict[str, Any] = {"fraction": 0.2, "num_subsets": M, "together": 3}
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.test_removals"])


def trained(**changes: Any) -> ms.Run:
    return ms.train(problems.recipe("mlp", "adamw", "dropout", **changes))


def removed(run: ms.Run, store: Path | None = None, seed: int = 2, **options: Any) -> Any:
    queries = ms.Queries(problems.inputs("mlp", 3, seed), ms.losses.cross_entropy)
    return ms.evaluate.removals(run, queries, store=store, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def run() -> ms.Run:
    return trained()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were trained, call by call."""
    seen: list[int] = []
    original = retrain.final_states

    def counted(run: ms.Run, W: Tensor, together: int) -> Any:
        seen.append(len(W))
        return original(run, W, together)

    monkeypatch.setattr(retrain, "final_states", counted)
    return seen


def test_the_effect_is_that_of_training_with_weights_zero(run: ms.Run) -> None:
    w = problems.random_weights()
    weighted = ms.train(run.recipe, weights=w)
    queries = problems.queries("mlp")
    found = removed(weighted, together=1)
    assert found.subsets.shape == (M, 2)
    assert len({tuple(S) for S in found.subsets}) > 1
    for S, delta in zip(found.subsets, found.delta, strict=True):
        without = w.clone()
        without[S] = 0.0
        expected = queries.values(ms.train(run.recipe, weights=without)) - queries.values(weighted)
        np.testing.assert_array_equal(delta, expected)
    together = removed(weighted)
    np.testing.assert_allclose(together.delta, found.delta, rtol=1e-9, atol=1e-13)


def test_a_linear_problem_is_predicted_exactly() -> None:
    """f linear in w: one step of gradient descent, and a linear measurement. LDS is 1."""

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(3, dtype=F64))

    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    recipe = ms.Recipe(
        Point(), lambda m, b: 0.5 * (m.theta - b).square().sum(1), x, ms.SGD(lr=0.3),
        batches=[torch.arange(12)],
    )  # fmt: skip
    run = ms.train(recipe)
    queries = ms.Queries(x[:4], lambda m, b: b @ m.theta)
    influence = ms.attribute(run, queries, "exact")
    found = ms.evaluate.removals(run, queries, fraction=0.25, num_subsets=20)
    np.testing.assert_allclose(found.predicted(influence), found.delta, atol=1e-14)
    np.testing.assert_allclose(ms.evaluate.lds(influence, found), 1.0)


def test_subsets_are_nested_in_their_number() -> None:
    few, many = draw(50, 5, 4, seed=1), draw(50, 5, 9, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=False))
    for other in (draw(50, 5, 4, seed=2), draw(50, 6, 4, seed=1), draw(51, 5, 4, seed=1)):
        assert not all(torch.equal(a, b) for a, b in zip(few, other, strict=True))


def test_groups_are_removed_one_by_one(run: ms.Run) -> None:
    labels = np.array(list("bbacaabcbb"))
    queries = problems.queries("mlp")
    found = ms.evaluate.removals(run, queries, groups=labels, together=1)
    assert found.labels == ("a", "b", "c")
    assert [S.tolist() for S in found.subsets] == [[2, 4, 5], [0, 1, 6, 8, 9], [3, 7]]
    w = torch.ones(N, dtype=F64)
    w[[3, 7]] = 0.0
    expected = queries.values(ms.train(run.recipe, weights=w)) - queries.values(run)
    np.testing.assert_array_equal(found.delta[2], expected)
    influence = ms.attribute(run, queries, "exact")
    np.testing.assert_allclose(found.predicted(influence)[1], -influence.by_group(labels)[:, 1])
    assert ms.evaluate.lds(influence, found).shape == (3,)


@pytest.mark.parametrize("disk", ["1GiB", "1B"])
@pytest.mark.parametrize("together", [1, 3])
def test_a_store_extends_and_is_shared(
    run: ms.Run, tmp_path: Path, rows: list[int], disk: str, together: int
) -> None:
    """Same numbers as in one go; nothing is trained twice, and final states serve other queries."""
    options: dict[str, Any] = {"disk": disk, "together": together}
    whole, others = removed(run, **options), removed(run, seed=9, **options)
    rows.clear()
    first = removed(run, tmp_path, num_subsets=4, **options)
    assert sum(rows) == 5
    np.testing.assert_array_equal(first.delta, whole.delta[:4])
    again = removed(run, tmp_path, **options)
    assert sum(rows) == 5 + 3
    np.testing.assert_array_equal(again.delta, whole.delta)
    np.testing.assert_array_equal(removed(run, tmp_path, num_subsets=2).delta, whole.delta[:2])
    assert sum(rows) == 8
    np.testing.assert_array_equal(removed(run, tmp_path, seed=9).delta, others.delta)
    assert sum(rows) == (8 if disk == "1GiB" else 16)
    assert (tmp_path / "states").exists() == (disk == "1GiB")


def child(folder: Path, ready: Any) -> None:
    """A process that is killed in the middle: each step takes a while."""
    torch.set_num_threads(1)
    original = retrain.final_states

    def slow(*arguments: Any) -> Any:
        training = original(*arguments)
        while True:
            try:
                step = next(training)
            except StopIteration as stop:
                return stop.value
            time.sleep(0.02)
            yield step

    retrain.final_states = slow
    run = trained()
    ready.set()
    removed(run, folder)


def test_killed_and_shared(run: ms.Run, tmp_path: Path, rows: list[int]) -> None:
    """A process is killed after its first chunk; two others then share what is left."""
    whole = removed(run)
    rows.clear()
    ready = CONTEXT.Event()
    process = CONTEXT.Process(target=child, args=(tmp_path, ready))
    process.start()
    assert ready.wait(120)
    while not list(tmp_path.glob("outputs/*/000000.safetensors")):
        assert process.is_alive()
        time.sleep(0.005)
    process.kill()
    process.join()
    done = len(list(tmp_path.glob("outputs/*/*.safetensors")))
    started = CONTEXT.Event()  # held here, or it is gone before a slow child takes it up
    helper = CONTEXT.Process(target=child, args=(tmp_path, started))
    helper.start()
    np.testing.assert_array_equal(removed(run, tmp_path).delta, whole.delta)
    helper.join(120)
    assert helper.exitcode == 0
    assert sum(rows) <= 8 - 3 * done
    assert not list(tmp_path.rglob(".part-*"))


@pytest.mark.parametrize("kind", ["outputs", "states"])
def test_a_damaged_file_is_named_and_made_again(
    run: ms.Run, tmp_path: Path, rows: list[int], kind: str
) -> None:
    whole = removed(run, tmp_path)
    rows.clear()
    path = sorted(tmp_path.glob(f"{kind}/**/*.safetensors"))[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.warns(ms.MetasketchWarning, match="made again"):
        again = removed(run, tmp_path, seed=2 if kind == "outputs" else 9)
    assert sum(rows) == (0 if kind == "outputs" else 3)
    if kind == "outputs":
        np.testing.assert_array_equal(again.delta, whole.delta)
    else:
        np.testing.assert_array_equal(again.delta, removed(run, seed=9).delta)


def test_another_run_or_other_subsets_are_refused(run: ms.Run, tmp_path: Path) -> None:
    removed(run, tmp_path)
    with pytest.raises(ms.StoreError, match="removed at a time .2 in the store, 3 here"):
        removed(run, tmp_path, fraction=0.3)
    other = ms.train(run.recipe, weights=problems.random_weights())
    with pytest.raises(ms.StoreError, match="another run.*weights"):
        removed(other, tmp_path)
    with pytest.raises(ms.StoreError, match="groups"):
        ms.evaluate.removals(run, problems.queries("mlp"), groups=range(N), store=tmp_path)
    record = tmp_path / "removals.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "together": 5}))
    with pytest.raises(ms.StoreError, match="damaged"):
        removed(run, tmp_path)


def test_one_that_diverges_is_left_out_and_said(
    run: ms.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = removed(run)
    original = retrain.measured

    def diverging(run: ms.Run, queries: ms.Queries, ends: retrain.Finals) -> Tensor:
        outputs = original(run, queries, ends)
        outputs[ends.params[:, 0] == bad] = torch.nan
        return outputs

    W = torch.ones(1, N, dtype=F64)
    W[0, whole.subsets[4]] = 0.0
    training = retrain.final_states(run, W, 3)
    while True:
        try:
            next(training)
        except StopIteration as stop:
            bad = stop.value.params[0, 0]
            break
    monkeypatch.setattr(retrain, "measured", diverging)
    with pytest.warns(ms.MetasketchWarning, match="1 of 7 retrainings diverged .subsets 4. and"):
        found = removed(run)
    kept = [0, 1, 2, 3, 5, 6]
    assert found.diverged == (4,)
    np.testing.assert_array_equal(found.subsets, whole.subsets[kept])
    np.testing.assert_array_equal(found.delta, whole.delta[kept])


def test_all_that_diverge_are_an_error(run: ms.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(run: ms.Run, queries: ms.Queries, ends: retrain.Finals) -> Tensor:
        return torch.full((len(ends.params), 3), torch.nan, dtype=F64)

    monkeypatch.setattr(retrain, "measured", diverged)
    with pytest.raises(ms.NumericalError, match="fewer than two remain"):
        removed(run)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "p = 0": ({"fraction": 0.0}, "fraction=0.0: the share"),
    "p = 1": ({"fraction": 1}, "fraction=1: the share"),
    "p n < 1": ({"fraction": 0.05}, "less than one example: give at least 0.1"),
    "M = 1": ({"num_subsets": 1}, "num_subsets=1: a correlation"),
    "M real": ({"num_subsets": 2.5}, "num_subsets=2.5"),
    "both": ({"groups": range(N)}, "one or the other"),
    "short": ({"groups": [1, 2], "fraction": None, "num_subsets": None}, r"shape \(2,\)"),
    "one group": ({"groups": [1] * N, "fraction": None, "num_subsets": None}, "at least two"),
    "together": ({"together": 0}, "together=0"),
    "disk": ({"disk": "much"}, "disk='much'"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named_before_anything_is_trained(
    run: ms.Run, tmp_path: Path, rows: list[int], what: str
) -> None:
    options, words = MISTAKES[what]
    with pytest.raises(ms.ArgumentError, match=words):
        removed(run, tmp_path / "store", **options)
    assert not rows
    assert not (tmp_path / "store").exists()
