"""Retraining at many data weights: alone and together, to rounding, diverged or not."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import ensemble, retrain
from tests import problems

F64 = torch.float64
N = problems.NUM_EXAMPLES


def many_weights(count: int = 4) -> Tensor:
    """Removals, and weights of all sizes."""
    g = torch.Generator().manual_seed(8)
    W = torch.rand(count, N, generator=g, dtype=F64) * 2
    W[0, [1, 4]] = 0.0
    return W


@pytest.mark.parametrize(("model", "optimizer", "feature"), problems.grid())
def test_together_is_alone(model: str, optimizer: str, feature: str) -> None:
    """Dropout masks, statistics of BatchNorm, microbatches, clipping and counts, all of it."""
    run = ms.train(problems.recipe(model, optimizer, feature), weights=problems.random_weights())
    queries, W = problems.queries(model), many_weights()
    alone = retrain.retrained(run, queries, W, together=1)
    together = retrain.retrained(run, queries, W, together=3)
    assert torch.equal(alone.full, queries.values(run))
    assert problems.relative(together.outputs, alone.outputs) < 1e-10
    assert problems.relative(together.full[None], alone.full[None]) < 1e-10
    assert not bool(together.diverged.any())
    expected = queries.values(ms.train(run.recipe, weights=W[1]))
    assert torch.equal(alone.outputs[1], expected)


def test_rules_that_mix_entries_are_applied_to_each_run() -> None:
    run = ms.train(problems.recipe("mlp", Mixing(lr=0.1), "clip"))
    queries, W = problems.queries("mlp"), many_weights()
    alone, together = (retrain.retrained(run, queries, W, together=b) for b in (1, 5))
    assert problems.relative(together.outputs, alone.outputs) < 1e-10


@dataclasses.dataclass(frozen=True)
class Mixing(ms.SGD):
    """A rule that is not elementwise: gradients are normalised tensor by tensor."""

    elementwise = False

    def rule(self, lr, step, theta, g, slots):  # type: ignore[no-untyped-def]
        assert theta.dim() <= 2
        return super().rule(lr, step, theta, g / (1 + torch.linalg.vector_norm(g)), slots)


@pytest.mark.parametrize("together", [1, 3])
def test_its_own_weights_change_exactly_nothing(together: int) -> None:
    run = ms.train(problems.recipe("cnn", "adamw", "dropout"))
    W = torch.cat([many_weights(2), run.weights[None], many_weights(3)])
    found = retrain.retrained(run, problems.queries("cnn"), W, together)
    assert torch.equal(found.delta[2], torch.zeros(problems.NUM_QUERIES, dtype=F64))
    assert bool((found.delta[:2] != 0).all())


@pytest.mark.parametrize("together", [1, 2, 4, 7])
def test_one_that_diverges_leaves_the_others_alone(together: int) -> None:
    """A weight near the largest number drives the parameters out of the numbers."""
    run = ms.train(problems.recipe("mlp", ms.SGD(lr=100.0), "plain"))
    W = many_weights(6)
    W[2, 3] = 1.7e308
    found = retrain.retrained(run, problems.queries("mlp"), W, together)
    others = torch.tensor([0, 1, 3, 4, 5])
    assert found.diverged.tolist() == [False, False, True, False, False, False]
    assert bool(found.outputs[2].isnan().all())
    expected = retrain.retrained(run, problems.queries("mlp"), W[others], together)
    assert problems.relative(found.outputs[others], expected.outputs) < 1e-12


def test_rounding_does_not_depend_on_how_many_come_along() -> None:
    run = ms.train(problems.recipe("mlp", "adamw", "plain"))
    queries, W = problems.queries("mlp"), many_weights(9)
    whole = retrain.retrained(run, queries, W, together=4)
    first = retrain.retrained(run, queries, W[:1], together=4)
    assert torch.equal(whole.outputs[0], first.outputs[0])
    assert torch.equal(whole.full, first.full)


def test_a_model_that_cannot_be_batched_is_retrained_alone() -> None:
    class Branching(problems.MLP):
        def forward(self, x: Tensor) -> Tensor:
            if float(self.enter.weight.detach().sum()) > math.inf:  # looks at a value
                return x
            return super().forward(x)

    torch.manual_seed(0)
    recipe = problems.recipe("mlp", "sgd", "plain")
    branching = problems.with_options(recipe, model=Branching().double())
    run, queries = ms.train(branching), problems.queries("mlp")
    found = retrain.retrained(run, queries, many_weights(2))
    assert found.together == 1
    expected = queries.values(ms.train(branching, weights=many_weights(2)[1]))
    assert torch.equal(found.outputs[1], expected)


def test_what_is_batched_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ms.train(problems.recipe("mlp", "sgd", "plain"))
    assert retrain._agrees(run)
    right = ensemble.gradients

    def wrong(*arguments):  # type: ignore[no-untyped-def]
        found = right(*arguments)
        return dataclasses.replace(found, g=found.g.flip(0))

    monkeypatch.setattr(ensemble, "gradients", wrong)
    assert not retrain._agrees(run)
    assert retrain.fastest(run, 50) == 1


def test_small_models_go_together_where_that_is_faster() -> None:
    """Ten examples and a hundred parameters are all overhead: no machine does them one by one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    recipe = problems.with_options(problems.recipe("mlp", "sgd", "plain"), model=net)
    run = ms.train(recipe)
    assert retrain.fastest(run, 100) > 1
    tight = ms.train(recipe, memory="100KiB")
    assert retrain.fastest(tight, 100) <= 100 * 1024 // tight.sizes.row(vmapped=True)


MISTAKES = {
    "one row": (torch.ones(N), "shape"),
    "columns": (torch.ones(2, N + 1), "shape"),
    "none": (torch.ones(0, N), "shape"),
    "negative": (-torch.ones(2, N), "not negative"),
    "NaN": (torch.full((2, N), math.nan), "finite"),
    "text": ("all", "not a matrix"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named(what: str) -> None:
    run = ms.train(problems.recipe("mlp", "sgd", "plain"))
    weights, words = MISTAKES[what]
    with pytest.raises(ms.ArgumentError, match=words):
        retrain.retrained(run, problems.queries("mlp"), weights)
    with pytest.raises(ms.ArgumentError, match="together=0"):
        retrain.retrained(run, problems.queries("mlp"), torch.ones(1, N), together=0)
