"""The same laws on a GPU; skipped where there is none."""

import copy

import pytest
import torch

import metasketch as ms
from tests import problems

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def recipe_on(device: str, model: str, optimizer: str, feature: str) -> ms.Recipe:
    recipe = problems.recipe(model, optimizer, feature)
    return problems.with_options(recipe, model=copy.deepcopy(recipe.model).to(device))


@pytest.mark.parametrize("feature", ["plain", "clip", "microbatch", "sums-counts", "scalar"])
@pytest.mark.parametrize("model", problems.MODELS)
def test_rows_and_tangents_equal_the_cpus(model: str, feature: str) -> None:
    queries = problems.queries(model)
    runs = [ms.train(recipe_on(device, model, "adamw", feature)) for device in ("cpu", "cuda")]
    rows = [run.replay(queries.gradients(run)).cpu() for run in runs]
    assert problems.relative(rows[1], rows[0]) < 1e-8
    w_dot = torch.randn(2, problems.NUM_EXAMPLES, dtype=torch.float64)
    ours, theirs = runs[1].forward(w_dot), runs[0].forward(w_dot)
    for name, tangent in theirs.items():
        torch.testing.assert_close(ours[name].cpu(), tangent, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("model", problems.MODELS)
def test_training_and_sweeps_replay_bit_for_bit(model: str) -> None:
    """In float32, with dropout drawn on the device and states recomputed."""
    recipe = recipe_on("cuda", model, "adamw", "dropout")
    x, y = recipe.data
    data = (x.float() if x.is_floating_point() else x, y)
    net = copy.deepcopy(recipe.model).float()
    recipe = problems.with_options(recipe, model=net, data=data)
    runs = [ms.train(recipe, memory=memory) for memory in ("4GiB", "2 states")]
    bar = {n: torch.ones_like(v)[None] for n, v in runs[0].state_dict().items()}
    for run in runs:
        run.implementation = "loop"
    assert torch.equal(runs[0].final.params, runs[1].final.params)
    assert torch.equal(runs[0].replay(bar), runs[1].replay(bar))
