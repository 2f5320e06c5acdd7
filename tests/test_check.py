"""The dry run finds what a long run would have met, and says what the run will cost."""

import pytest
import torch

import metasketch as ms
from tests import problems


@pytest.mark.parametrize("model", problems.MODELS)
def test_a_good_recipe_passes_and_reads_well(model: str) -> None:
    recipe = problems.recipe(model, "adamw", "dropout")
    report = ms.check(recipe, problems.queries(model), memory="1GiB")
    assert report.num_steps == recipe.num_steps
    assert report.adjoint_gap < 1e-10
    assert report.plan.factor == 0
    text = str(report)
    assert "6 steps, 10 examples" in text
    assert "differentiated in both directions" in text


def test_a_run_that_depends_on_a_counter_is_found() -> None:
    calls = iter(range(1000))

    def loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
        return ms.losses.cross_entropy(model, batch) * (1 + 0.1 * next(calls))

    with pytest.raises(ms.MismatchError):
        ms.check(problems.recipe("mlp", "sgd", "plain", loss=loss), problems.queries("mlp"))


def test_unused_parameters_are_named() -> None:
    recipe = problems.recipe("mlp", "sgd", "plain")
    net = recipe.model
    net.spare = torch.nn.Linear(2, 2).double()
    report = ms.check(problems.with_options(recipe, model=net))
    assert report.unused == ("spare.weight", "spare.bias")
    assert "spare.weight" in str(report)
