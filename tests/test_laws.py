"""Laws (b) to (e): the oracle, the adjoint, schedules, blocks, closed forms."""

import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import reference
from metasketch.gradient import IMPLEMENTATIONS
from tests import problems

F64 = torch.float64


def random_cotangents(run: ms.Run, b: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {name: value.shape for name, value in run.state_dict().items()}
    return {name: torch.randn(b, *s, generator=g, dtype=F64) for name, s in shapes.items()}


def random_directions(b: int, n: int, seed: int = 1) -> Tensor:
    return torch.randn(b, n, generator=torch.Generator().manual_seed(seed), dtype=F64)


def pair(bar: dict[str, Tensor], dot: dict[str, Tensor]) -> Tensor:
    """<bar_i, dot_j> over the whole state, (b, b')."""
    return sum(
        (bar[n].flatten(1) @ dot[n].flatten(1).T for n in bar), start=torch.zeros((), dtype=F64)
    )


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize(("model", "optimizer", "feature"), problems.grid())
def test_replay_and_forward_equal_the_whole_graph(
    model: str, optimizer: str, feature: str, how: str
) -> None:
    recipe = problems.recipe(model, optimizer, feature)
    w = problems.random_weights()
    run = ms.train(recipe, weights=w, implementation=how)
    bar, w_dot = random_cotangents(run, 2), random_directions(3, len(w))
    rows = run.replay(bar)
    assert problems.relative(rows, reference.replay(recipe, bar, w)) < 1e-10
    dots = run.forward(w_dot)
    params, stats = reference.forward(recipe, w_dot, w)
    expected = run.step.model.layout.unpack(params) | run.step.model.stats_layout.unpack(stats)
    for name, tangent in expected.items():
        gap = torch.linalg.vector_norm(dots[name] - tangent)
        assert gap <= 1e-10 * torch.linalg.vector_norm(params)
    # <s, J u> = <J^T s, u>
    left, right = pair(bar, dots), rows @ w_dot.T
    assert problems.relative(left, right) < 1e-10


@pytest.mark.parametrize("memory", ["2 states", "3 states", "5 states", "12 states"])
@pytest.mark.parametrize("feature", ["plain", "dropout", "augment"])
def test_the_checkpoint_schedule_changes_no_bit(memory: str, feature: str) -> None:
    recipe = problems.recipe("cnn", "adamw", feature, epochs=4)
    kept = ms.train(recipe, memory="100 states", implementation="loop")
    tight = ms.train(recipe, memory=memory, implementation="loop")
    assert kept.plan.recomputed == 0
    assert len(tight.plan.kept) + tight.plan.free <= int(memory.split()[0])
    bar, w_dot = random_cotangents(kept, 2), random_directions(2, problems.NUM_EXAMPLES)
    assert torch.equal(kept.replay(bar), tight.replay(bar))
    assert tight.trajectory.recomputed == tight.plan.recomputed
    ours, theirs = kept.forward(w_dot), tight.forward(w_dot)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("model", problems.MODELS)
def test_blocks_change_nothing_but_rounding(model: str, how: str) -> None:
    run = ms.train(problems.recipe(model, "adamw", "clip"), implementation=how)
    bar, w_dot = random_cotangents(run, 5), random_directions(5, problems.NUM_EXAMPLES)
    whole, dots = run.replay(bar), run.forward(w_dot)
    for block in (1, 2, 3):
        assert problems.relative(run.replay(bar, block=block), whole) < 1e-12
        parts = run.forward(w_dot, block=block)
        for name, tangent in dots.items():
            torch.testing.assert_close(parts[name], tangent, rtol=1e-10, atol=1e-14)


class Point(nn.Module):
    """A parameter vector, for losses with a closed-form trajectory."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.clone())


def squared_distance(model: nn.Module, batch: Tensor) -> Tensor:
    """ℓ_i = ½ |θ - x_i|²"""
    return 0.5 * (model.theta - batch).square().sum(1)


def test_a_quadratic_has_its_closed_form() -> None:
    """Full-batch gradient descent on Σ w_i ½|θ - x_i|²/n, started at the mean m of the data, stays
    there at w = 1, and dθ_T/dw_i = (1 - (1 - η)^T) (x_i - m) / n."""
    n, d, eta, steps = 6, 3, 0.3, 7
    x = random_directions(n, d, seed=4)
    mean = x.mean(0)
    recipe = ms.Recipe(
        Point(mean), squared_distance, x, ms.SGD(lr=eta), batches=[torch.arange(n)] * steps
    )
    run = ms.train(recipe)
    J = (1 - (1 - eta) ** steps) * (x - mean).T / n  # (P, N)
    rows = run.replay({"theta": torch.eye(d, dtype=F64)})
    torch.testing.assert_close(rows, J, rtol=1e-12, atol=1e-15)
    dots = run.forward(torch.eye(n, dtype=F64))["theta"]
    torch.testing.assert_close(dots, J.T, rtol=1e-12, atol=1e-15)


def test_scaling_all_weights_changes_nothing_under_adam() -> None:
    """Adam with a negligible eps does not see the gradient's scale: Σ_i Y_qi = 0."""
    optimizer = ms.Adam(lr=0.02, eps=1e-30)
    recipe = problems.recipe("mlp", optimizer, "plain")
    run = ms.train(recipe)
    rows = run.replay(problems.queries("mlp").gradients(run))
    assert float((rows.sum(1).abs() / rows.norm(dim=1)).max()) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weighting_everything_is_a_learning_rate(momentum: float) -> None:
    """For SGD without decay, all weights times c is the rate times c: J 1 = dθ/d log η."""
    eta, h = 0.05, 1e-3

    def final(rate: float) -> dict[str, Tensor]:
        optimizer = ms.SGD(lr=rate, momentum=momentum)
        run = ms.train(problems.recipe("cnn", optimizer, "plain"))
        return {n: v for n, v in run.state_dict().items() if "running" not in n}

    optimizer = ms.SGD(lr=eta, momentum=momentum)
    run = ms.train(problems.recipe("cnn", optimizer, "plain"))
    tangent = run.forward(torch.ones(1, problems.NUM_EXAMPLES, dtype=F64))
    weights = {-2: 1 / 12, -1: -8 / 12, 1: 8 / 12, 2: -1 / 12}
    states = {k: final(eta * (1 + k * h)) for k in weights}
    for name in states[1]:
        slope = sum(weights[k] / h * states[k][name] for k in weights)
        assert torch.linalg.vector_norm(tangent[name][0] - slope) < 1e-6 * (
            1e-3 + torch.linalg.vector_norm(slope)
        )


def test_repeated_short_and_absent_examples() -> None:
    """A batch may repeat an index, be shorter than others, and some examples are never drawn."""
    batches = [[0, 0, 3], [5, 1], [3, 2, 0, 0], [6]]
    recipe = problems.recipe("mlp", "adamw", "plain", batch_size=None, epochs=None, batches=batches)
    run, w = ms.train(recipe), torch.ones(problems.NUM_EXAMPLES, dtype=F64)
    bar = random_cotangents(run, 2)
    rows = run.replay(bar)
    assert problems.relative(rows, reference.replay(recipe, bar, w)) < 1e-10
    never = [4, 7, 8, 9]
    assert torch.equal(rows[:, never], torch.zeros(2, len(never), dtype=F64))
    assert bool((rows[:, [0, 1, 2, 3, 5, 6]] != 0).all())


def test_a_removed_example_leaves_everything_else_in_place() -> None:
    """Weight zero is not another batch size: it equals a loss whose term is dropped."""
    recipe = problems.recipe("mlp", "adamw", "plain")
    gone = 4
    w = torch.ones(problems.NUM_EXAMPLES, dtype=F64)
    w[gone] = 0.0
    x, y = problems.inputs("mlp", problems.NUM_EXAMPLES, seed=1)
    present = torch.arange(problems.NUM_EXAMPLES) != gone

    def dropped(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return batch[2] * ms.losses.cross_entropy(model, batch[:2])

    other = problems.with_options(recipe, data=(x, y, present.double()), loss=dropped)
    ours, theirs = ms.train(recipe, weights=w).state_dict(), ms.train(other).state_dict()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-15)


def test_float32_rows_agree_with_float64() -> None:
    torch.manual_seed(0)
    rows = {}
    for dtype in (torch.float32, F64):
        recipe = problems.recipe("cnn", "nesterov", "plain")
        net = problems.with_options(recipe, model=recipe.model.to(dtype)).model
        x, y = problems.inputs("cnn", problems.NUM_EXAMPLES, seed=1)
        recipe = problems.with_options(recipe, model=net, data=(x.to(dtype), y))
        run = ms.train(recipe)
        assert run.final.params.dtype == dtype
        rows[dtype] = run.replay(problems.queries("cnn").gradients(run))
        assert rows[dtype].dtype == dtype
    assert problems.relative(rows[torch.float32].double(), rows[F64]) < 1e-4
