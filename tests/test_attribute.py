"""Every method against dense linear algebra on Y and V, and the laws that its result obeys."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import estimate, probes
from metasketch.attribution_store import Memory
from metasketch.measured import Measured, Paired, Replayed
from metasketch.methods import make
from metasketch.query_gradients import QueryGradients
from metasketch.sketch import Sketch, open_blocks, rounds
from tests import problems

K, N = 14, 24
LABELS = [0, 2, 1, 1, 0, 0, 2, 1, 0, 0, 1, 2, 2, 1]
PAPER = [name for name in ms.methods() if name not in ("sage", "prior")]  # tests/test_sage.py
SWEPT = {"replay": 0, "forward": 0, "prior": 0}


@dataclasses.dataclass(frozen=True)
class Problem:
    run: ms.Run
    queries: ms.Queries
    V: np.ndarray[Any, Any]
    Y: np.ndarray[Any, Any]
    G: np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=["mlp", "cnn"])
def problem(request: pytest.FixtureRequest) -> Problem:
    """Fourteen queries of sizes over three orders of magnitude; "cnn" has BatchNorm."""
    queries = ms.Queries((*problems.inputs(request.param, K, seed=2), _sizes()), sized_loss)
    recipe = problems.recipe(request.param, "adamw", "clip")
    recipe = problems.with_options(recipe, data=problems.inputs(request.param, N, seed=1))
    run = ms.train(recipe, implementation="loop")
    named = queries.gradients(run)
    V = run.flat(named)
    G = V[:, : run.num_params] @ V[:, : run.num_params].T
    return Problem(run, queries, V.numpy(), run.replay(named).numpy(), G.numpy())


def _sizes() -> Tensor:
    return torch.logspace(0, -3, K, dtype=torch.float64)


def sized_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y, size = batch
    return size * ms.losses.cross_entropy(model, (x, y))


def dense(method: str, B: int, p: Problem) -> Any:
    """What a method is to give, in dense linear algebra from Y and V."""
    G, Y = p.G, p.Y
    eigen = np.linalg.eigh(G)[1][:, ::-1]
    if method == "exact":
        return Y
    if method == "pca":
        return eigen[:, :B] @ eigen[:, :B].T @ Y
    if method == "random":
        Z = probes.gaussian(K, 0, 0, B).numpy()
    elif method == "first":
        Z = np.eye(K)[:, _balanced()[:B]]
    else:
        Z = eigen[:, : B if method == "mage" else min(B, max(-(-B // 10), 10))]
    while Z.shape[1] < B:  # SPELL after its warm-up
        Y_hat = Y @ np.linalg.pinv(Z.T @ Y) @ (Z.T @ Y)
        norms = np.linalg.norm(Y_hat, axis=1)
        D = np.maximum(norms, np.quantile(norms[norms > 0], 0.1))
        P = np.eye(K) - Z @ np.linalg.pinv(Z.T @ G @ Z, rcond=1e-13) @ Z.T @ G
        z = np.linalg.eigh(P.T @ G @ P / np.outer(D, D))[1][:, -1] / D
        Z = np.column_stack([Z, z / np.linalg.norm(z)])
    U = Z.T @ Y
    return Y @ np.linalg.pinv(U) @ U


def _balanced() -> list[int]:
    """One query of each class in turn."""
    classes = [[q for q in range(K) if LABELS[q] == c] for c in range(3)]
    return [c[turn] for turn in range(K) for c in classes if turn < len(c)]


def attributed(p: Problem, method: str, B: int, **options: Any) -> ms.Influence:
    if method == "first":
        options["labels"] = LABELS
    return ms.attribute(p.run, p.queries, method, None if method == "exact" else B, **options)


@pytest.mark.parametrize("B", [1, 4, 12])
@pytest.mark.parametrize("method", PAPER)
def test_methods_equal_dense_linear_algebra(problem: Problem, method: str, B: int) -> None:
    expected = dense(method, B, problem)
    found = attributed(problem, method, B)
    gap = np.linalg.norm(found.dense() - expected) / np.linalg.norm(expected)
    assert gap < 1e-8
    B = K if method == "exact" else B
    forward = 0 if method in ("exact", "pca") else B
    assert found.sweeps == {"replay": B, "forward": forward, "prior": 0}
    assert found.budget == B


PROJECTIONS = ("mage", "spell", "random", "first")


@pytest.mark.parametrize("method", PROJECTIONS)
def test_a_projection_never_makes_a_row_worse(problem: Problem, method: str) -> None:
    before = np.linalg.norm(problem.Y, axis=1)
    for B in (1, 5, K):
        left = np.linalg.norm(problem.Y - attributed(problem, method, B).dense(), axis=1)
        assert (left <= before + 1e-14).all()
        before = left
    np.testing.assert_allclose(left, 0, atol=1e-8 * np.linalg.norm(problem.Y))


def test_a_smaller_budget_is_a_prefix_of_a_larger_one(problem: Problem) -> None:
    few, many = (attributed(problem, "mage", B) for B in (3, 6))
    np.testing.assert_allclose(few.basis, many.basis[:3], atol=1e-10)
    np.testing.assert_allclose(few.coefficients, many.coefficients[:, :3], atol=1e-10)


@pytest.mark.parametrize("method", [*PAPER, "sage"])
def test_blocks_change_nothing_but_rounding(problem: Problem, method: str) -> None:
    whole, single = (attributed(problem, method, 12, block=b).dense() for b in (None, 1))
    np.testing.assert_allclose(single, whole, atol=1e-9 * np.linalg.norm(whole))


def test_options_of_spell(problem: Problem) -> None:
    """Without a warm-up the first probe is the leading direction of unit floors; rounds of two
    probes leave the sweeps as they are."""
    cold = attributed(problem, "spell", 4, warmup=0)
    warm = attributed(problem, "mage", 4)
    np.testing.assert_allclose(cold.basis[0], warm.basis[0], atol=1e-10)  # nothing is known yet
    assert np.abs(cold.basis[1] - warm.basis[1]).max() > 1e-3
    pairs = attributed(problem, "spell", 5, warmup=1, per_round=2)
    assert pairs.sweeps == {"replay": 5, "forward": 5, "prior": 0}
    np.testing.assert_allclose(pairs.basis @ pairs.basis.T, np.eye(5), atol=1e-10)
    flat = attributed(problem, "spell", 3, warmup=1, floor=1.0)  # all rows count as equal: MAGE
    np.testing.assert_allclose(flat.dense(), attributed(problem, "mage", 3).dense(), atol=1e-10)


def test_the_residual_gram_annihilates_what_was_sent(problem: Problem) -> None:
    G = torch.from_numpy(problem.G)
    Z = probes.gaussian(K, 1, 0, 5)
    R = probes.residual_gram(G, Z)
    assert float((R @ Z).abs().max()) < 1e-12 * float(G.abs().max())
    repeated = probes.residual_gram(G, torch.cat([Z, Z[:, :2]], dim=1))
    torch.testing.assert_close(repeated, R, atol=1e-10 * float(G.abs().max()), rtol=0)


def test_energy_only_grows(problem: Problem) -> None:
    run, V = problem.run, QueryGradients(problem.queries.of(problem.run))
    G = torch.from_numpy(problem.G)
    for method in PROJECTIONS:
        cut = rounds(0, 12, 10, 3, 1)
        sketch = Sketch(
            run, V, make(method), cut, 10, Memory(), run.settle, lambda: G, progress=False
        )
        energies = [known.captured for known in sketch.measure()]
        assert energies == sorted(energies)
        assert energies[0] == 0
        assert energies[-1] > 0.9 * np.square(problem.Y).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bases_stay_orthonormal(dtype: torch.dtype) -> None:
    """Repeated, dependent, zero and nearly dependent rows, of sizes over 20 orders."""
    g = torch.Generator().manual_seed(0)
    U = torch.randn(6, 40, generator=g, dtype=torch.float64)
    rows = [U[0], U[0], 1e-9 * U[1], U[0] + 1e-3 * U[2], U[0] - U[1], 0 * U[3], 1e-20 * U[3], U[4]]
    U = torch.stack(rows).to(dtype)
    Q, taken = estimate.extend_basis(torch.zeros(0, 40, dtype=torch.float64), U[:3])
    more, also = estimate.extend_basis(Q, U[3:])
    whole, all_taken = estimate.extend_basis(Q[:0], U)
    Q = torch.cat([Q, more])
    torch.testing.assert_close(Q @ Q.T, torch.eye(len(Q), dtype=torch.float64), atol=1e-10, rtol=0)
    torch.testing.assert_close(Q, whole)
    assert taken + [3 + i for i in also] == all_taken == [0, 2, 3, 6, 7]


def test_queries_without_a_gradient_and_twins(problem: Problem) -> None:
    """Duplicates give dependent rows and a query of weight zero a zero row, with a word on it."""
    *inputs, sizes = problem.queries.examples.data
    x, y = (torch.cat([t, t[:1]]) for t in inputs)
    sizes = torch.cat([sizes, 3 * sizes[:1]])
    sizes[4] = 0.0
    queries = ms.Queries((x, y, sizes), sized_loss)
    with pytest.warns(ms.MetasketchWarning, match="queries 4 vanish"):
        exact = ms.attribute(problem.run, queries, "exact")
    assert exact.sweeps == {**SWEPT, "replay": K}
    assert not exact.row(4).any()
    with pytest.warns(ms.MetasketchWarning) as said:
        found = ms.attribute(problem.run, queries, "spell", K + 1)
    words = " ".join(str(w.message) for w in said)
    assert "queries 4 vanish" in words
    assert "such as 0 and 14" in words
    np.testing.assert_allclose(found.dense(), exact.dense(), atol=1e-8 * np.linalg.norm(problem.Y))
    np.testing.assert_allclose(found.row(K), 3 * found.row(0), atol=1e-10)
    assert found.sweeps["replay"] <= K  # what vanishes is not swept


def test_one_query(problem: Problem) -> None:
    one = ms.Queries(tuple(t[:1] for t in problem.queries.examples.data), sized_loss)
    for method in [*PAPER, "sage"]:
        found = ms.attribute(problem.run, one, method, 1)
        np.testing.assert_allclose(found.dense(), problem.Y[:1], atol=1e-10)


def test_more_budget_than_queries_is_exact_and_says_so(problem: Problem) -> None:
    with pytest.warns(ms.MetasketchWarning, match="exceeds the 14 queries.*exact"):
        found = ms.attribute(problem.run, problem.queries, "spell", 99)
    np.testing.assert_allclose(found.dense(), problem.Y, atol=1e-10)
    assert (found.method, found.sweeps) == ("exact", {**SWEPT, "replay": K})


def test_the_result_knows_where_it_comes_from(problem: Problem) -> None:
    queries = ms.Queries(problem.queries.examples.data, sized_loss, ids=[f"q{i}" for i in range(K)])
    w = problems.random_weights(N)
    run = ms.train(problem.run.recipe, weights=w)
    found = ms.attribute(run, queries, "mage", 2)
    assert found.query_ids is not None
    assert found.query_ids[3] == "q3"
    np.testing.assert_array_equal(found.weights, w.numpy())
    np.testing.assert_array_equal(found.outputs, queries.values(run).numpy())
    assert found.facts["weights"] != ms.attribute(problem.run, queries, "mage", 2).facts["weights"]


def test_blocks_are_cut_and_taken_in_order() -> None:
    assert rounds(0, 5, 99, 16, 1) == [(0, 5)]
    assert rounds(5, 8, 99, 2, 1) == [(5, 7), (7, 8)]
    assert rounds(3, 6, 4, 16, 1) == [(3, 4), (4, 5), (5, 6)]
    cut = [(0, 4), (4, 8), (8, 9), (9, 10)]

    def names(replayed: set[int], paired: set[int], pairs: bool = True) -> list[str]:
        found = open_blocks(cut, 8, pairs, replayed, paired)
        return [f"{block.kind[0]}{block.number}" for block in found]

    assert names(set(), set()) == ["r0", "r1"]
    assert names({0}, set()) == ["f0", "r1"]
    assert names({1}, set()) == ["r0"]  # the directions of block 1 depend on block 0
    assert names({0, 1}, {1}) == ["f0"]
    assert names({0, 1}, {0, 1}) == ["r2"]
    assert names({0, 1, 2}, {0, 1}) == ["f2"]
    assert names({0, 1}, set(), pairs=False) == ["r2"]
    assert names({0, 1, 2, 3}, {0, 1, 2, 3}) == []


def constant_measure(model: nn.Module, batch: Any) -> Tensor:
    return batch[0].flatten(1).sum(1)


OTHER_MODEL = problems.MLP().double()


def other_measure(model: nn.Module, batch: Any) -> Tensor:
    """A slip: part of it is measured on a model from outside."""
    x = batch[0].flatten(1)[:, :5]
    return sized_loss(model, batch) + OTHER_MODEL(x).sum(1)


def broken_measure(model: nn.Module, batch: Any) -> Tensor:
    return sized_loss(model, batch[:2])


def scalar_measure(model: nn.Module, batch: Any) -> Tensor:
    return sized_loss(model, batch).sum()


def log_of_nothing(model: nn.Module, batch: Any) -> Tensor:
    return sized_loss(model, batch) + torch.log(batch[2] - 1.0)


def root_at_zero(model: nn.Module, batch: Any) -> Tensor:
    """Its value is finite everywhere, its gradient not in query 0."""
    losses = sized_loss(model, batch)
    return torch.where(batch[2] == 1.0, (losses - losses.detach()).sqrt(), losses)


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such method": ({"method": "spel"}, ms.ArgumentError, "did you mean 'spell'"),
    "no such option": ({"method": "mage", "warmup": 3}, ms.ArgumentError, "no option 'warmup'"),
    "no budget": ({"budget": None}, ms.ArgumentError, "needs a budget"),
    "budget 0": ({"budget": 0}, ms.ArgumentError, "budget=0"),
    "half a replay": ({"budget": 0.5}, ms.ArgumentError, "budget=0.5"),
    "budget of exact": ({"method": "exact"}, ms.ArgumentError, "each of the 14 queries"),
    "block": ({"block": 0}, ms.ArgumentError, "block=0"),
    "labels": ({"method": "first", "labels": [1, 2]}, ms.ArgumentError, "labels names 2"),
    "mixed labels": (
        {"method": "first", "labels": [1, "a", *range(12)]},
        ms.ArgumentError,
        "sorted into classes",
    ),
    "warm-up": ({"warmup": -1}, ms.ArgumentError, "warmup=-1"),
    "floor": ({"floor": 2.0}, ms.ArgumentError, "floor=2.0"),
    "rounds": ({"per_round": 0}, ms.ArgumentError, "per_round=0"),
    "on_mismatch": ({"on_mismatch": "ignore"}, ms.ArgumentError, "on_mismatch='ignore'"),
    "memory": ({"memory": "lots"}, ms.ArgumentError, "memory='lots'"),
    "shape": ({"measure": scalar_measure}, ms.ArgumentError, "one number for each query"),
    "no parameters": ({"measure": constant_measure}, ms.ArgumentError, "does not depend"),
    "other parameters": ({"measure": other_measure}, ms.ArgumentError, "a model from outside"),
    "failing": (
        {"measure": broken_measure},
        ms.ArgumentError,
        r"failed on queries 0 to \d+, .* ValueError: not enough values",
    ),
    "NaN": ({"measure": log_of_nothing}, ms.NumericalError, "measurement of query 0"),
    "NaN gradient": ({"measure": root_at_zero}, ms.NumericalError, "gradient of query 0"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named_before_anything_is_swept(
    problem: Problem, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, error, words = MISTAKES[what]
    given = {"method": "spell", "budget": 3, **given}
    queries = ms.Queries(problem.queries.examples.data, given.pop("measure", sized_loss))
    monkeypatch.setattr(ms.Run, "_sweep", lambda *_: pytest.fail("a sweep was taken"))
    with pytest.raises(error, match=words):
        ms.attribute(problem.run, queries, **given)


@pytest.mark.parametrize("method", ["spell", "random", "exact"])
def test_gradients_need_not_be_held(problem: Problem, method: str) -> None:
    """Combinations and inner products stream over the queries where V does not fit."""
    memory = problem.V.nbytes * 2 - 1
    assert not QueryGradients(problem.queries.of(problem.run), memory).held
    found = attributed(problem, method, 11, memory=memory).dense()
    expected = dense(method, 11, problem)
    assert np.linalg.norm(found - expected) < 1e-8 * np.linalg.norm(expected)


def test_measured_prefixes() -> None:
    """The first replays of some blocks, with the directions that came from them."""

    def block(a: int, b: int) -> Replayed:
        rows = torch.arange(a, b, dtype=torch.float64)
        return Replayed(rows[None].expand(2, -1), rows[:, None].expand(-1, 3), torch.ones(b - a))

    replays = {0: block(0, 3), 1: block(3, 5)}
    pairs = {
        0: Paired(torch.ones(2, 3), torch.ones(2, 2), (0, 2)),
        1: Paired(torch.ones(1, 3), torch.ones(2, 1), (4,)),
    }
    known = Measured(2, 3, lambda: torch.eye(2), replays, pairs)
    few = known.first(2, [0, 3])
    assert few.U[:, 0].tolist() == [0, 1]
    assert few.pairs[0].origin == (0,)
    assert few.sweeps == {"replay": 2, "forward": 1}
    assert known.first(4, [0, 3]).sweeps == {"replay": 4, "forward": 2}
