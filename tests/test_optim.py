"""Optimisers, clipping and schedules against torch's own, and derivatives at zero gradients."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metasketch as ms
from metasketch import optim, reference, schedules
from metasketch.layout import Layout
from metasketch.state import State
from metasketch.update import Update
from tests import problems
from tests.test_finite_differences import difference

F64 = torch.float64

PAIRS: dict[str, tuple[Any, Any]] = {
    "sgd": (ms.SGD(lr=0.1), lambda n: torch.optim.SGD(n.parameters(), lr=0.1)),
    "sgd-all": (
        ms.SGD(lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.3),
        lambda n: torch.optim.SGD(
            n.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.3
        ),
    ),
    "nesterov": (
        ms.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda n: torch.optim.SGD(
            n.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
        ),
    ),
    "adam": (
        ms.Adam(lr=0.01, beta1=0.8, beta2=0.95, weight_decay=0.02),
        lambda n: torch.optim.Adam(n.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.02),
    ),
    "adamw": (
        ms.AdamW(lr=0.01, weight_decay=0.1, eps=1e-6),
        lambda n: torch.optim.AdamW(n.parameters(), lr=0.01, weight_decay=0.1, eps=1e-6),
    ),
}


def torch_loop(recipe: ms.Recipe, net: nn.Module, make: Any) -> nn.Module:
    """The same training, written by hand with torch.optim."""
    net = copy.deepcopy(net).train()
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = make(net)
    base = [group["lr"] for group in optimizer.param_groups]
    for t, indices in enumerate(recipe.order.batches):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * recipe.rates[t]
        x, y = (d[indices] for d in recipe.data)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(trainable, recipe.clip_norm)
        optimizer.step()
    return net


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", PAIRS)
def test_each_optimiser_trains_as_torch_does(name: str, clip: float | None) -> None:
    ours, theirs = PAIRS[name]
    recipe = problems.recipe("cnn", ours, "plain", clip_norm=clip)
    check_same_training(recipe, theirs)


def check_same_training(recipe: ms.Recipe, theirs: Any) -> None:
    ours = ms.train(recipe).model().state_dict()
    expected = torch_loop(recipe, recipe.model, theirs).state_dict()
    for key, value in ours.items():
        # The bias of a convolution before BatchNorm has a gradient of pure rounding, which Adam
        # divides by eps: hence the absolute tolerance.
        torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-9)


def test_parameter_groups_train_as_torch_does() -> None:
    ours = ms.AdamW(
        lr=0.01,
        weight_decay=0.1,
        groups=(ms.Group(["*.bias", "norm*"], weight_decay=0.0), ms.Group("leave.*", lr=0.05)),
    )

    def theirs(net: nn.Module) -> torch.optim.Optimizer:
        kinds: dict[str, list[Tensor]] = {"none": [], "fast": [], "rest": []}
        for name, p in net.named_parameters():
            plain = name.endswith(".bias") or name.startswith("norm")
            kinds["none" if plain else "fast" if name.startswith("leave") else "rest"].append(p)
        groups = [
            {"params": kinds["none"], "weight_decay": 0.0},
            {"params": kinds["fast"], "lr": 0.05},
            {"params": kinds["rest"]},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    check_same_training(problems.recipe("cnn", ours, "plain"), theirs)


@pytest.mark.parametrize("optimizer", [ms.Adam(lr=0.01), ms.AdamW(lr=0.01), ms.SGD(lr=0.1)])
def test_derivatives_at_torchs_defaults_where_gradients_are_zero(optimizer: Any) -> None:
    """Unused embedding rows and constant inputs: √0 in Adam, and clipping besides."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.leave = nn.Embedding(9, 4), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            h = torch.tanh(self.embed(tokens)).mean(1)
            return self.leave(torch.cat([h, torch.zeros(len(h), 2, dtype=h.dtype)], dim=1))

    x = torch.randint(4, (10, 3), generator=torch.Generator().manual_seed(0))
    y = torch.arange(10) % 3
    recipe = ms.Recipe(
        Net().double(),
        ms.losses.cross_entropy,
        (x, y),
        optimizer,
        batch_size=5,
        epochs=2,
        clip_norm=0.1,
    )
    queries = ms.Queries((x[:3] + 1, y[:3]), ms.losses.cross_entropy)
    run = ms.train(recipe)
    rows = run.replay(queries.gradients(run))
    w = torch.ones(10, dtype=F64)
    expected = difference(lambda v: queries.values(ms.train(recipe, weights=v)), w, h=1e-4)
    assert problems.relative(rows, expected) < 1e-6


def test_clipping_at_zero_norm_has_a_finite_derivative() -> None:
    """All weights zero: the gradient is zero, and so is what clipping makes of it."""
    recipe = problems.recipe("mlp", "sgd", "clip")
    run = ms.train(recipe, weights=torch.zeros(problems.NUM_EXAMPLES))
    rows = run.replay(problems.queries("mlp").gradients(run))
    assert bool(torch.isfinite(rows).all())
    w = torch.zeros(problems.NUM_EXAMPLES, dtype=F64)
    expected = difference(
        lambda v: problems.queries("mlp").values(ms.train(recipe, weights=v)), w, h=1e-6
    )
    assert problems.relative(rows, expected) < 1e-4


def test_an_update_that_is_not_elementwise_has_the_same_jacobian() -> None:
    """The row-by-row Jacobian serves any rule: compared on one whose diagonal is known."""
    layout = Layout.of({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    rule = ms.Adam(lr=0.1, eps_root=1e-3, groups=(ms.Group("b", lr=0.3),))

    class WholeAdam(ms.Adam):
        elementwise = False

    whole = WholeAdam(lr=0.1, eps_root=1e-3, groups=(ms.Group("b", lr=0.3),))
    updates = [
        Update(optim.segments(r, layout), r.slot_names(), (1.0, 1.0), 0.5) for r in (rule, whole)
    ]
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=F64)

    state = State(draw(10), draw(0), {"exp_avg": draw(10), "exp_avg_sq": draw(10)})
    grad = draw(10)
    block, g_dot = (draw(3, 10), draw(3, 10), draw(3, 10)), draw(3, 10)
    results = []
    for jacobian in (u.linearize(state, grad, 1) for u in updates):
        dot, bar = (
            State(x.clone(), y, {"exp_avg": y.clone(), "exp_avg_sq": z.clone()})
            for x, y, z in (block, block)
        )
        g_bar = torch.empty_like(g_dot)
        jacobian.push(dot, g_dot.clone())
        jacobian.pull(bar, g_bar)
        results.append([dot.params, *dot.slots.values(), bar.params, *bar.slots.values(), g_bar])
    for diagonal, dense in zip(*results, strict=True):
        torch.testing.assert_close(diagonal, dense)


def test_hyperparameters_out_of_range_are_refused() -> None:
    with pytest.raises(ms.ArgumentError, match=r"momentum=1.5"):
        ms.SGD(lr=0.1, momentum=1.5)
    with pytest.raises(ms.ArgumentError, match="nesterov"):
        ms.SGD(lr=0.1, nesterov=True)
    with pytest.raises(ms.ArgumentError, match="beta2"):
        ms.Adam(beta2=1.0)
    with pytest.raises(ms.ArgumentError, match="does not have"):
        ms.Adam(groups=(ms.Group("a", momentum=0.9),))


def test_one_cycle_rises_and_falls_linearly() -> None:
    table = schedules.table(ms.one_cycle(peak=0.25, start=0.2, end=0.1), 8)
    assert table == pytest.approx([0.2, 0.6, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25])


def test_warmup_and_cosine_are_those_of_torch() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.1)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert schedules.table(ms.cosine(end=0.1), 10) == pytest.approx(expected)
    assert schedules.table(ms.linear_warmup(4), 6) == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert schedules.table(ms.linear(warmup=0.5), 8)[4:] == pytest.approx([1, 0.75, 0.5, 0.25])
    assert schedules.table(ms.cosine(warmup=2), 4)[:3] == pytest.approx([0, 0.5, 1])


def test_the_reference_sees_the_same_clipping() -> None:
    """The clipped run really clips (otherwise the clip tests prove nothing)."""
    recipe = problems.recipe("mlp", "sgd", "clip")
    free = problems.with_options(recipe, clip_norm=None)
    a, b = ms.train(recipe).state_dict(), ms.train(free).state_dict()
    assert not torch.allclose(a["enter.weight"], b["enter.weight"])
    bar = {"enter.weight": torch.ones(1, 6, 5, dtype=F64)}
    rows = ms.train(recipe).replay(bar)
    assert problems.relative(rows, reference.replay(recipe, bar)) < 1e-10
