"""The result: hand-computed scores, signs in words, files that are right or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import metasketch as ms
from metasketch.files import read_tensors, write_tensors

Y = np.array([[-3.0, 1.0, 0.0, 2.0], [0.5, -0.25, 4.0, 0.0]])
"""Influence of four examples on the losses of two queries."""


@pytest.fixture
def influence() -> ms.Influence:
    """Y in a factoring of rank 3, one direction of which is in vain."""
    C = np.array([[1.0, 0.0, 0.0], [1.0, 2.0, 0.0]])
    Q = np.stack([Y[0], (Y[1] - Y[0]) / 2, np.ones(4)])
    ids = {"query_ids": ("cat", "dog"), "example_ids": ("a", "b", "c", "d")}
    return ms.Influence.from_factors(C, torch.from_numpy(Q), method="test", **ids)


def test_dense_rows_and_shape(influence: ms.Influence) -> None:
    np.testing.assert_allclose(influence.dense(), Y, atol=1e-15)
    np.testing.assert_allclose(influence.row("dog"), Y[1], atol=1e-15)
    np.testing.assert_allclose(influence.rows([1, 0]), Y[::-1], atol=1e-15)
    assert (influence.num_queries, influence.num_examples, influence.rank) == (2, 4, 3)


@pytest.mark.parametrize("Y_", [Y, Y.T])
def test_from_dense(Y_: Any) -> None:
    made = ms.Influence.from_dense(Y_)
    np.testing.assert_array_equal(made.dense(), Y_)
    assert made.rank == 2


def test_helpful_lowers_a_loss_and_raises_a_margin(influence: ms.Influence) -> None:
    assert influence.top("cat", 1, "helpful") == [("a", -3.0)]
    assert influence.top(0, 9, "harmful") == [("d", 2.0), ("b", 1.0)]
    margin = ms.Influence.from_dense(Y, better="higher")
    assert margin.top(0, 1, "helpful") == [(3, 2.0)]
    assert margin.top(0, 9, "harmful") == [(0, -3.0)]


def test_harm_to_all_queries_together(influence: ms.Influence) -> None:
    np.testing.assert_allclose(influence.harmfulness(), Y.sum(0), atol=1e-15)
    np.testing.assert_allclose(
        ms.Influence.from_dense(Y, better="higher").harmfulness(), -Y.sum(0), atol=1e-15
    )


REMOVALS: dict[str, tuple[Any, Any]] = {
    "numbers": ([0, 3], [1.0, -0.5]),
    "names": (["a", "d"], [1.0, -0.5]),
    "a set": ({0, 3}, [1.0, -0.5]),
    "a mask": (np.array([True, False, False, True]), [1.0, -0.5]),
    "a tensor": (torch.tensor([0, 3]), [1.0, -0.5]),
    "nothing": ([], [0.0, 0.0]),
    "sets of one size": (np.array([[0, 3], [1, 2]]), [[1.0, -0.5], [-1.0, -3.75]]),
    "sets of several": ([[0, 3], [2], []], [[1.0, -0.5], [0.0, -4.0], [0.0, 0.0]]),
    "masks": (torch.tensor([[1, 0, 0, 1]]).bool(), [[1.0, -0.5]]),
}


@pytest.mark.parametrize("what", REMOVALS)
def test_removal_is_minus_the_sum_of_scores(influence: ms.Influence, what: str) -> None:
    removed, expected = REMOVALS[what]
    np.testing.assert_allclose(influence.predict_removal(removed), expected, atol=1e-15)


def test_predictions_start_from_the_weights_of_the_run(influence: ms.Influence) -> None:
    w = np.array([1.0, 0.0, 2.0, 0.5])
    change = Y @ (w - 1)
    np.testing.assert_allclose(influence.predict(w), change)
    np.testing.assert_allclose(influence.predict(np.stack([w, np.ones(4)])), [change, [0, 0]])
    at = ms.Influence.from_dense(Y, weights=w)
    np.testing.assert_allclose(at.predict(w), [0, 0])
    # An example of weight 2 takes twice its score along, and one of weight 0 is gone already.
    np.testing.assert_allclose(at.predict_removal([1, 2]), -2 * Y[:, 2])


def test_groups(influence: ms.Influence) -> None:
    np.testing.assert_allclose(
        influence.by_group(["y", "x", "y", "x"]), [[3.0, -3.0], [-0.25, 4.5]], atol=1e-15
    )


def test_tables_name_sign_and_effect(influence: ms.Influence) -> None:
    frame = influence.to_pandas(n=1)
    assert frame["example"].tolist() == ["a", "d", "b", "c"]
    assert frame["effect_of_removal"].tolist() == pytest.approx([3.0, -2.0, 0.25, -4.0])
    assert b"raises" in influence.to_arrow(n=None).schema.metadata[b"sign"]
    assert len(influence.table(n=None)["score"]) == 6  # zeros are neither helpful nor harmful


def test_query_sets_of_one_run(influence: ms.Influence) -> None:
    both = ms.Influence.concatenate([influence, influence])
    np.testing.assert_allclose(both.dense(), np.concatenate([Y, Y]), atol=1e-15)
    assert both.query_ids == ("cat", "dog", "cat", "dog")
    other = ms.Influence.from_dense(Y, facts={"parameters": 1})
    with pytest.raises(ms.ArgumentError, match="differ in parameters"):
        ms.Influence.concatenate([influence, other])
    with pytest.raises(ms.ArgumentError, match="opposite signs"):
        ms.Influence.concatenate([other, ms.Influence.from_dense(Y, better="higher")])


def test_saved_and_loaded(influence: ms.Influence, tmp_path: Path) -> None:
    again = ms.Influence.load(influence.save(tmp_path / "sub" / "cat.influence"))
    for name in influence.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(influence, name))
    said = read_tensors(tmp_path / "sub" / "cat.influence", torch.device("cpu"), "")[1]
    assert "removing it changes" in said["sign"]
    assert "measurement" in said["units"]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def _another_version(path: Path) -> None:
    tensors, notes = read_tensors(path, torch.device("cpu"), "")
    write_tensors(path, tensors, {**notes, "version": 99})


DAMAGE: dict[str, tuple[Any, str]] = {
    "a bit": (_flip, "does not have the checksum|do not have the checksum"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged"),
    "gone": (lambda path: path.unlink(), "missing"),
    "another version": (_another_version, "version 99"),
    "another kind": (lambda path: write_tensors(path, {}, {}), "not an influence"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_files_are_refused(influence: ms.Influence, tmp_path: Path, what: str) -> None:
    path = influence.save(tmp_path / "one")
    damage, words = DAMAGE[what]
    damage(path)
    with pytest.raises(ms.StoreError, match=words):
        ms.Influence.load(path)


MISTAKES: dict[str, tuple[Any, str]] = {
    "factors": (lambda i: ms.Influence(np.ones((2, 3)), np.ones((2, 3))), "do not fit"),
    "NaN": (lambda i: ms.Influence.from_dense([[np.nan]]), "NaN"),
    "better": (lambda i: ms.Influence.from_dense(Y, better="more"), "better='more'"),
    "ids": (lambda i: ms.Influence.from_dense(Y, query_ids=["one"]), "1 names for 2"),
    "kind": (lambda i: i.top(0, kind="good"), "kind='good'"),
    "no query": (lambda i: i.top(2), "no query 2"),
    "no name": (lambda i: i.top("cow"), "'cow'"),
    "no example": (lambda i: i.predict_removal([4]), "no example 4"),
    "twice": (lambda i: i.predict_removal([1, 1]), "twice"),
    "a short mask": (lambda i: i.predict_removal([True, False]), "one entry for each example"),
    "fractions": (lambda i: i.predict_removal([0.5]), "number or a name"),
    "few weights": (lambda i: i.predict([1.0]), r"shape \(1,\)"),
    "NaN weights": (lambda i: i.predict([1.0, 1.0, 1.0, np.nan]), "NaN"),
    "labels": (lambda i: i.by_group([1, 2]), "labels has shape"),
    "no parts": (lambda i: ms.Influence.concatenate([]), "nothing to concatenate"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named(influence: ms.Influence, what: str) -> None:
    call, words = MISTAKES[what]
    with pytest.raises(ms.ArgumentError, match=words):
        call(influence)


def test_ready_measures() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3]], dtype=torch.float64)
    y = torch.tensor([0, 2])
    model = torch.nn.Identity()
    p = logits.softmax(-1)[[0, 1], y]
    torch.testing.assert_close(ms.measures.margin(model, (logits, y)), (p / (1 - p)).log())
    torch.testing.assert_close(ms.measures.cross_entropy(model, (logits, y)), -p.log())
    queries = ms.Queries((logits, y), ms.measures.margin)
    assert queries.better == "higher"

    class Bigram(torch.nn.Module):
        """Logits of each next token, by the token before it."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return logits[tokens]

    tokens = torch.tensor([[1, 1, 0, 2], [0, 0, 1, 1]])
    expected = -logits.log_softmax(-1)[[0, 1], [2, 1]]
    for batch in (tokens, (tokens,), {"input_ids": tokens}):
        torch.testing.assert_close(ms.measures.next_token_nll(Bigram(), batch), expected)
    with pytest.raises(ms.ArgumentError, match="at least two tokens"):
        ms.measures.next_token_nll(Bigram(), tokens[:, :1])
