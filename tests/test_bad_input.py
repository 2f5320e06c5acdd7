"""A clear error of our own before anything expensive starts, and nothing half-done."""

import copy
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import metasketch as ms
from metasketch import reference
from metasketch.sizes import format_bytes, parse_bytes
from metasketch.state import digest
from tests import problems

F64 = torch.float64
NAN, INF = float("nan"), float("inf")
ROOT = Path(__file__).parent.parent
Loss = Callable[..., Any]


class Net(nn.Module):
    """Two linear maps with something in between."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(5, 4), middle or nn.Tanh(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.middle(self.enter(x)))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return ms.losses.cross_entropy(model, batch)


def recipe(middle: nn.Module | None = None, **changes: Any) -> ms.Recipe:
    """Four steps on ten examples, with a short last batch in each epoch."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "model": Net(middle).double(),
        "loss": cross_entropy,
        "data": problems.inputs("mlp", problems.NUM_EXAMPLES, seed=1),
        "optimizer": ms.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        "batch_size": 6,
        "epochs": 2,
        "seed": 3,
        **changes,
    }
    return ms.Recipe(**options)


def cotangents(run: ms.Run) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        n: torch.randn(2, *v.shape, generator=g, dtype=F64).to(v)
        for n, v in run.state_dict().items()
    }


def agrees(described: ms.Recipe) -> bool:
    """Whether replay equals the whole graph."""
    run = ms.train(described, implementation="loop")
    bar = cotangents(run)
    return problems.relative(run.replay(bar), reference.replay(described, bar)) < 1e-10


# The loss.

other = Net().double()


def of_another_model(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(other, batch)


def detached(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return cross_entropy(model, batch)


def raising(model: nn.Module, batch: Any) -> Tensor:
    raise KeyError("labels")


def in_place(model: nn.Module, batch: Any) -> Tensor:
    batch[0].mul_(2)
    return cross_entropy(model, batch)


def counted(counts: Callable[[Tensor], Any]) -> Loss:
    return lambda model, batch: (cross_entropy(model, batch), counts(batch[1]))


LOSSES: dict[str, tuple[Any, type[ms.MetasketchError], str]] = {
    "reduced": (lambda m, b: cross_entropy(m, b).mean(), ms.LossError, "already reduced.*'none'"),
    "of a wrong shape": (lambda m, b: m(b[0]), ms.LossError, r"shape \(6,\).* shape \(6, 3\)"),
    "a column": (
        lambda m, b: cross_entropy(m, b)[:, None],
        ms.LossError,
        r"shape \(6,\).* shape \(6, 1\)",
    ),
    "of integers": (
        lambda m, b: (m(b[0]).argmax(1) != b[1]).long(),
        ms.LossError,
        "floating point; it is torch.int64",
    ),
    "a number": (lambda m, b: 1.5, ms.LossError, "it is a float"),
    "nothing": (lambda m, b: None, ms.LossError, "it is a NoneType"),
    "a list": (lambda m, b: cross_entropy(m, b).tolist(), ms.LossError, "it is a list"),
    "counts of a wrong shape": (
        counted(lambda y: torch.ones(len(y), 2)),
        ms.LossError,
        r"\(sums, counts\).* shape \(6,\).*shape \(6, 2\)",
    ),
    "one count": (counted(lambda y: len(y)), ms.LossError, r"\(sums, counts\).*and a int"),
    "reduced sums": (
        lambda m, b: (cross_entropy(m, b).sum(), torch.ones(6)),
        ms.LossError,
        r"\(sums, counts\).*shape \(\)",
    ),
    "counts of zero": (counted(torch.zeros_like), ms.NumericalError, "step 0 counts 0.0 .*by zero"),
    "counts of NaN": (
        counted(lambda y: torch.full((len(y),), NAN)),
        ms.NumericalError,
        "step 0 counts nan",
    ),
    "of another model": (of_another_model, ms.LossError, "with the model that it is given"),
    "detached": (detached, ms.LossError, "without torch.no_grad"),
    "raising": (raising, ms.LossError, "failed on the first batch: KeyError: 'labels'"),
    "in place": (in_place, ms.LossError, r"changes its batch in place \(step 0\)"),
    "a vector with weights": (
        lambda model, batch, weights: weights * cross_entropy(model, batch),
        ms.LossError,
        r"one scalar tensor; it returned a tensor of shape \(6,\)",
    ),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_is(what: str) -> None:
    loss, error, words = LOSSES[what]
    with pytest.raises(error, match=words):
        ms.train(recipe(loss=loss))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (3, "loss is a int"),
        (lambda model: 0, r"takes 1 arguments \(model\)"),
        (lambda a, b, c, d: 0, r"takes 4 arguments \(a, b, c, d\)"),
    ],
)
def test_a_loss_of_another_form(loss: Any, words: str) -> None:
    with pytest.raises(ms.LossError, match=words):
        recipe(loss=loss)


def test_a_scalar_loss_cannot_be_cut() -> None:
    with pytest.raises(ms.LossError, match="leave microbatch unset"):
        recipe(loss=lambda model, batch, weights: weights.sum(), microbatch=2)


def test_a_loss_may_take_its_batch_apart() -> None:
    """As losses of language models do: ``labels = batch.pop("labels")``."""

    def popping(model: nn.Module, batch: Any) -> Tensor:
        y = batch.pop("y")
        return cross_entropy(model, (batch["x"], y))

    x, y = problems.inputs("mlp", problems.NUM_EXAMPLES, seed=1)
    described = recipe(loss=popping, data={"x": x, "y": y})
    run, expected = ms.train(described), ms.train(recipe())
    bar = cotangents(run)
    for how in ("loop", "batched", "forward", "auto"):
        run.implementation = how
        assert problems.relative(run.replay(bar), expected.replay(bar)) < 1e-10


# Numbers that are not finite.


def spoiled(value: float, at: int) -> Loss:
    """A loss that is not finite for the second example of a batch from some step on."""

    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        losses = cross_entropy(model, batch)
        bad = torch.zeros_like(losses)
        bad[1:2] = value if step >= at else 0.0  # a microbatch may have one example
        return losses + bad

    return loss


@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("at", [0, 2])
def test_a_loss_that_is_not_finite(value: float, at: int, microbatch: int | None) -> None:
    described = recipe(loss=spoiled(value, at), microbatch=microbatch)
    example = int(described.order.batches[at][1])
    with pytest.raises(
        ms.NumericalError, match=rf"loss of example {example} is {value} at step {at} of 4"
    ):
        ms.train(described)


def test_a_scalar_loss_that_is_not_finite() -> None:
    def loss(model: nn.Module, batch: Any, weights: Tensor, step: int) -> Tensor:
        return (weights * cross_entropy(model, batch)).sum() * (NAN if step == 1 else 1.0)

    with pytest.raises(ms.NumericalError, match="the loss is not finite at step 1 of 4"):
        ms.train(recipe(loss=loss))


def test_a_gradient_that_is_not_finite() -> None:
    """The derivative of √x at 0."""

    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        zero = model.leave.bias.sum() * 0.0
        return cross_entropy(model, batch) + (zero.sqrt() if step == 3 else zero)

    with pytest.raises(
        ms.NumericalError, match=r"gradient of 'leave.bias' is not finite at step 3 of 4.*√0"
    ):
        ms.train(recipe(loss=loss))


def test_a_run_that_diverges() -> None:
    with pytest.raises(ms.NumericalError, match=r"at step \d+ of 80: lower the learning rate"):
        ms.train(recipe(nn.Identity(), optimizer=ms.SGD(lr=1e200), epochs=40))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_parameter_that_is_not_finite(value: float) -> None:
    net = Net().double()
    net.leave.weight.data[1, 2] = value
    with pytest.raises(ms.ModelError, match="parameter 'leave.weight' holds NaN or infinity"):
        recipe(model=net)


def weights_with(index: int, value: float) -> Tensor:
    w = torch.ones(problems.NUM_EXAMPLES)
    w[index] = value
    return w


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (weights_with(7, NAN), r"weights\[7\] = nan"),
        (weights_with(2, INF), r"weights\[2\] = inf"),
        (weights_with(0, -0.5), r"weights\[0\] = -0.5"),
        (torch.ones(9), r"weights has shape \(9,\).*10 training examples"),
        (torch.ones(10, 1), r"weights has shape \(10, 1\)"),
        (1.0, r"weights has shape \(\)"),
        (["a"] * 10, "weights is not a vector of numbers"),
    ],
)
def test_weights_that_cannot_be_used(weights: Any, words: str) -> None:
    with pytest.raises(ms.ArgumentError, match=words):
        ms.train(recipe(), weights=weights)


@pytest.mark.parametrize("weights", [[2] * 10, np.full(10, 2.0, np.float32), torch.full((10,), 2)])
def test_weights_of_every_kind(weights: Any) -> None:
    expected = ms.train(recipe(), weights=torch.full((10,), 2.0, dtype=F64)).final.params
    assert torch.equal(ms.train(recipe(), weights=weights).final.params, expected)


# The module.


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, reassign: bool) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))
        self.reassign = reassign

    def forward(self, x: Tensor) -> Tensor:
        if self.reassign:
            self.n = self.n + 1
        else:
            self.n += 1
        return torch.tanh(x)


class Channels(nn.Module):
    """Linear features as channels of a picture, for norms in two dimensions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x.view(len(x), 2, 2, 1)).flatten(1))


class MyBatchNorm(nn.BatchNorm2d):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def once_stepped() -> nn.Module:
    """Old weight_norm after a forward pass, which copy.deepcopy refuses."""
    layer = nn.Linear(4, 4)
    layer.cache = layer(torch.zeros(1, 4))
    return layer


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "instance norm": (
        lambda: Channels(nn.InstanceNorm2d(2, track_running_stats=True)),
        r"module 'middle.norm' \(InstanceNorm2d\).*track_running_stats=False",
    ),
    "sync batch norm": (
        lambda: Channels(nn.SyncBatchNorm(2)),
        r"module 'middle.norm' \(SyncBatchNorm\).*use BatchNorm1d, 2d or 3d",
    ),
    "own batch norm": (
        lambda: Channels(MyBatchNorm(2)),
        r"module 'middle.norm' \(MyBatchNorm\) is a subclass of BatchNorm",
    ),
    "counter": (lambda: Counter(False), r"module 'middle' \(Counter\) .* buffer 'middle.n'"),
    "counter, reassigned": (
        lambda: Counter(True),
        r"module 'middle' \(Counter\) .* buffer 'middle.n'",
    ),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
        r"middle.parametrizations.weight.0' \(_SpectralNorm\) .* buffer .*_u'",
    ),
    "lazy": (lambda: nn.LazyLinear(4), "'middle.weight' is lazy and has no shape"),
    "graph in an attribute": (once_stepped, "cannot be copied .*weight_norm"),
    "mixed precision": (
        lambda: nn.Linear(4, 4).float(),
        "several kinds .*float32 on cpu, torch.float64 on cpu",
    ),
}


@pytest.mark.parametrize("what", MODULES)
def test_a_module_that_cannot_be_differentiated(what: str) -> None:
    middle, words = MODULES[what]
    net = Net().double()
    net.middle = middle()
    if what not in ("lazy", "mixed precision"):
        net.double()
    with pytest.raises(ms.ModelError, match=words):
        ms.train(recipe(model=net))


@pytest.mark.parametrize(
    "norm",
    [nn.InstanceNorm2d(2), nn.GroupNorm(2, 2), nn.BatchNorm2d(2, track_running_stats=False)],
)
def test_norms_without_statistics_work(norm: nn.Module) -> None:
    assert agrees(recipe(Channels(norm)))


def test_parametrizations_without_state_work() -> None:
    assert agrees(recipe(parametrizations.weight_norm(nn.Linear(4, 4))))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Net, "model is a type"),
        (lambda x: x, "model is a function"),
        (nn.ReLU(), "no trainable parameter"),
        (Net().requires_grad_(False), "no trainable parameter"),
        (nn.Linear(2, 2, dtype=torch.complex64), "trainable parameters are torch.complex64"),
    ],
)
def test_what_is_not_a_trainable_module(model: Any, words: str) -> None:
    with pytest.raises(ms.ModelError, match=words):
        recipe(model=model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_asked_for_by_name(dtype: torch.dtype) -> None:
    x, y = problems.inputs("mlp", problems.NUM_EXAMPLES, seed=1)
    options = {"model": Net().to(dtype), "data": (x.to(dtype), y)}
    with pytest.raises(ms.ModelError, match=f"{dtype} .*'enter.weight'.*low_precision=True"):
        recipe(**options)
    with pytest.warns(UserWarning, match=f"trainable parameters are {dtype}") as caught:
        run = ms.train(recipe(**options, low_precision=True))
    assert caught[0].filename == __file__
    assert run.final.params.dtype == dtype
    assert bool(torch.isfinite(run.replay(cotangents(run))).all())


def test_frozen_parameters_of_low_precision_are_shared() -> None:
    class Adapted(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.leave(torch.tanh(F.linear(x, self.enter.weight.to(x))))

    net = Adapted().double()
    net.enter.to(torch.bfloat16).requires_grad_(False)
    described = recipe(model=net)
    frozen = described.functional.module.enter.weight
    assert frozen.dtype == torch.bfloat16
    assert frozen.untyped_storage().data_ptr() == net.enter.weight.untyped_storage().data_ptr()
    assert agrees(described)
    assert ms.train(described).num_params == 15
    trained = described.functional.module.leave.weight
    assert trained.untyped_storage().data_ptr() != net.leave.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("when", ["training", "the sweep"])
def test_a_frozen_weight_changed_before(when: str) -> None:
    net = Net().double()
    net.enter.requires_grad_(False)
    described = recipe(model=net)
    run = ms.train(described)
    bar = cotangents(run)
    with torch.no_grad():
        net.enter.weight[0, 0] += 1
    with pytest.raises(ms.ModelError, match="'enter.weight', a frozen .* changed in place"):
        ms.train(described) if when == "training" else run.replay(bar)


# Autocast and other settings around a call.


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cross_entropy(model, batch)


def in_float(**changes: Any) -> ms.Recipe:
    x, y = problems.inputs("mlp", problems.NUM_EXAMPLES, seed=1)
    return recipe(model=Net(), data=(x.float(), y), **changes)


def test_autocast_inside_the_loss() -> None:
    with pytest.raises(ms.ModelError, match=r"autocast is on \(seen in Net\).*low_precision=True"):
        ms.train(in_float(loss=under_autocast))
    assert ms.train(in_float(loss=under_autocast, low_precision=True)).num_steps == 4


def test_autocast_around_the_call() -> None:
    described = in_float()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ms.ModelError, match="autocast is on around the call"),
    ):
        ms.train(described)


def test_autocast_around_a_sweep() -> None:
    run = ms.train(in_float())
    bar = cotangents(run)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ms.ModelError, match="autocast is on around the call"),
    ):
        run.replay(bar)


@pytest.mark.parametrize("setting", [torch.no_grad, torch.inference_mode])
def test_gradients_switched_off_around_a_call(setting: Callable[[], Any]) -> None:
    described = recipe()
    expected = ms.train(described, implementation="loop")
    bar = cotangents(expected)
    with setting():
        run = ms.train(described, implementation="loop")
        rows = run.replay(bar)
    assert torch.equal(run.final.params, expected.final.params)
    assert torch.equal(rows, expected.replay(bar))


# Parameters that are used now and then, or never.


def sometimes(used_at: Callable[[int], bool]) -> Loss:
    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        losses = cross_entropy(model, batch)
        return losses + (model.extra.square().sum() if used_at(step) else 0.0)

    return loss


def with_extra() -> Net:
    net = Net().double()
    net.extra = nn.Parameter(torch.ones(2, dtype=F64))
    return net


@pytest.mark.parametrize(
    "used_at", [lambda t: t == 0, lambda t: t > 0], ids=["at first", "later only"]
)
def test_a_parameter_used_in_some_steps_only(used_at: Callable[[int], bool]) -> None:
    with pytest.raises(ms.LossError, match=r"'extra'.*in some steps and not in others.*step"):
        ms.train(recipe(model=with_extra(), loss=sometimes(used_at)))


@pytest.mark.parametrize(
    "optimizer", [ms.SGD(lr=0.1, weight_decay=0.5), ms.AdamW(lr=0.1, weight_decay=0.5)]
)
def test_parameters_that_are_never_used_are_left_alone(optimizer: Any) -> None:
    """As torch, whose optimisers skip what has no gradient, weight decay included."""
    net = with_extra()
    described = recipe(model=net, loss=sometimes(lambda t: False), optimizer=optimizer)
    run = ms.train(described, implementation="loop")
    assert torch.equal(run.model().extra, net.extra)
    assert "extra" not in run.state_dict()
    bar = cotangents(run)
    rows = run.replay({**bar, "extra": torch.ones(2, 2, dtype=F64)})
    assert torch.equal(rows, run.replay(bar))
    assert problems.relative(rows, reference.replay(described, bar)) < 1e-10
    dots = run.forward(torch.ones(2, problems.NUM_EXAMPLES, dtype=F64))
    assert torch.equal(dots["extra"], torch.zeros(2, 2, dtype=F64))


# Derivatives that do not exist.


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, bar: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * bar


class Twice(torch.autograd.Function):
    """A double backward, no forward derivative, and none of functorch's conventions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * bar


class Cubed(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


@pytest.mark.parametrize("sweep", ["replay", "forward"])
@pytest.mark.parametrize("before", [nn.Identity, lambda: nn.ReLU(inplace=True)])
def test_a_module_without_second_derivatives_is_named(
    before: Callable[[], nn.Module], sweep: str
) -> None:
    run = ms.train(recipe(nn.Sequential(before(), Cubed(OnceOnly), nn.Tanh())))
    with pytest.raises(
        ms.DerivativeError, match=r"module 'middle.1 \(Cubed\)' has neither a double backward"
    ):
        if sweep == "replay":
            run.replay(cotangents(run))
        else:
            run.forward(torch.ones(1, problems.NUM_EXAMPLES, dtype=F64))


def test_a_loss_without_second_derivatives_is_named() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return OnceOnly.apply(cross_entropy(model, batch))

    run = ms.train(recipe(loss=loss))
    with pytest.raises(ms.DerivativeError, match="an operation of the loss function has neither"):
        run.replay(cotangents(run))


@pytest.mark.parametrize("how", ["loop", "batched", "forward"])
def test_a_named_implementation_that_cannot_work(how: str) -> None:
    run = ms.train(recipe(Cubed(OnceOnly)), implementation=how)
    with pytest.raises(ms.DerivativeError, match="Cubed"):
        run.replay(cotangents(run))


def test_a_double_backward_is_enough() -> None:
    run, expected = ms.train(recipe(Cubed(Twice))), ms.train(recipe(Cube()))
    bar = cotangents(run)
    assert problems.relative(run.replay(bar), expected.replay(bar)) < 1e-10
    w_dot = torch.ones(1, problems.NUM_EXAMPLES, dtype=F64)
    torch.testing.assert_close(run.forward(w_dot), expected.forward(w_dot), rtol=1e-10, atol=1e-14)
    assert set(run.implementations.values()) <= {"loop", "tuned", "batched"}
    assert all("forward" in timing.failures for timing in run.timings.values())


# Arguments.

RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "no epochs": ({"epochs": None}, r"batch_size=6, epochs=None\): give both"),
    "no batch size": ({"batch_size": None}, r"batch_size=None, epochs=2\): give both"),
    "neither": ({"batch_size": None, "epochs": None}, "give both, or the explicit order"),
    "zero epochs": ({"epochs": 0}, r"epochs=0\): must be a whole number of at least 1"),
    "negative size": ({"batch_size": -4}, r"batch_size=-4\): must be a whole number"),
    "half a batch": ({"batch_size": 2.5}, r"batch_size=2.5\)"),
    "a truth": ({"batch_size": True}, r"batch_size=True\)"),
    "no microbatch": ({"microbatch": 0}, r"microbatch=0\)"),
    "both orders": ({"batches": [[0]]}, "batch_size=6, epochs=2.* not both"),
    "one of both": ({"batches": [[0]], "batch_size": None}, "epochs=2.* not both"),
    "a seed of text": ({"seed": "1"}, r"seed='1'\): must be a whole number"),
    "no seed": ({"seed": None}, r"seed=None\)"),
    "clip at zero": ({"clip_norm": 0.0}, r"clip_norm=0.0\): must be positive"),
    "clip at NaN": ({"clip_norm": NAN}, r"clip_norm=nan\)"),
    "clip at infinity": ({"clip_norm": INF}, r"clip_norm=inf\)"),
    "clip at text": ({"clip_norm": "1"}, r"clip_norm='1'\)"),
    "augment": ({"augment": 3}, r"augment=3\): must be a function"),
    "schedule": ({"schedule": 0.5}, r"schedule=0.5\): must be a function"),
    "schedule gives NaN": ({"schedule": lambda t, T: NAN}, "schedule gives nan at step 0 of 4"),
    "schedule turns back": ({"schedule": lambda t, T: 1.0 - t}, "gives -1.0 at step 2 of 4"),
    "optimizer": ({"optimizer": "sgd"}, "optimizer is a str; give ms.SGD"),
}


@pytest.mark.parametrize("what", RECIPES)
def test_recipes_that_cannot_be(what: str) -> None:
    changes, words = RECIPES[what]
    with pytest.raises(ms.ArgumentError, match=words):
        recipe(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": ["a"]}, "ids names 1 examples; the data set has 10"),
        ({"batch_size": 11, "drop_last": True}, "batch_size=11 with drop_last leaves no batch"),
        ({"collate": 3}, "collate is a int"),
    ],
)
def test_recipes_whose_data_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ms.DataError, match=words):
        recipe(**changes)


def test_numbers_of_numpy_are_numbers() -> None:
    numbers = {"batch_size": np.int64(6), "epochs": np.int32(2), "seed": np.int64(3)}
    ours = recipe(**numbers, clip_norm=np.float32(1))
    assert ours.facts() == recipe(clip_norm=1.0).facts()


@pytest.mark.parametrize(
    ("ids", "words"), [(["a"], "ids names 1 queries; there are 3"), ([], "ids names 0 queries")]
)
def test_ids_of_queries(ids: list[str], words: str) -> None:
    with pytest.raises(ms.DataError, match=words):
        ms.Queries(problems.inputs("mlp", 3, seed=1), cross_entropy, ids=ids)


def test_a_measure_is_a_function() -> None:
    with pytest.raises(ms.ArgumentError, match="measure is a int"):
        ms.Queries(problems.inputs("mlp", 3, seed=1), 3)  # type: ignore[arg-type]


SIZES = ["4 gigs", "lots", "", "GiB", ".", "1.2.3GiB", "-4GiB", 0, -1, NAN, INF, True, None, "0 B"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", ["memory", "disk"])
def test_sizes_that_are_none(size: Any, what: str, tmp_path: Path) -> None:
    if what == "disk" and size is None:
        return  # which asks for the default
    with pytest.raises(ms.ArgumentError, match=rf"{what}={size!r}.*(not a size|positive)"):
        ms.train(recipe(), **{what: size, "store": tmp_path / "store"})
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 2**32),
        (" 500 MB ", 5 * 10**8),
        ("1.5kib", 1536),
        (".5KB", 500),
        ("1024", 1024),
        (4096, 4096),
        (1.0, 1),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_bytes(text, "memory") == size
    assert math.isclose(parse_bytes(format_bytes(size), "memory"), size, rel_tol=0.05)


@pytest.mark.parametrize("memory", ["1 states", "0 states", "1 state", "-3 states", "2.5 states"])
def test_too_few_states(memory: str) -> None:
    with pytest.raises(ms.MemoryBudgetError, match=rf"memory='{memory}': .*least 2.*'20 states'"):
        ms.train(recipe(), memory=memory)


def test_a_memory_too_small_says_how_much_is_needed() -> None:
    with pytest.raises(ms.MemoryBudgetError, match=r"memory=1000 B is too small.*needs .* for two"):
        ms.train(recipe(), memory=1000)
    try:
        ms.train(recipe(), memory=1000)
    except ms.MemoryBudgetError as error:
        needed = str(error).split("a sweep needs ")[1].split(" for two")[0]
    size = parse_bytes(needed, "memory")
    run = ms.train(recipe(), memory=int(1.01 * size))  # what it says is rounded
    assert run.replay(cotangents(run)).shape == (2, problems.NUM_EXAMPLES)
    with pytest.raises(ms.MemoryBudgetError):
        ms.train(recipe(), memory=int(0.95 * size))


def test_a_disk_without_a_store_or_too_small(tmp_path: Path) -> None:
    with pytest.raises(ms.MemoryBudgetError, match="give store="):
        ms.train(recipe(), disk="1GB")
    with pytest.raises(ms.MemoryBudgetError, match="disk='700 B' is too small.*one state"):
        ms.train(recipe(), disk="700 B", store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


SWEEPS: dict[str, tuple[Callable[[ms.Run], Any], str]] = {
    "no cotangents": (lambda r: r.replay({}), "theta_bar is empty"),
    "unknown": (lambda r: r.replay({"enter.weigth": torch.ones(1)}), r"\['enter.weigth'\].*not in"),
    "a wrong shape": (
        lambda r: r.replay({"leave.bias": torch.ones(2, 4)}),
        r"theta_bar\['leave.bias'\] has shape \(2, 4\).*needs \(2, 3\)",
    ),
    "two lengths": (
        lambda r: r.replay({"leave.bias": torch.ones(2, 3), "enter.bias": torch.ones(1, 4)}),
        r"theta_bar\['enter.bias'\] has shape \(1, 4\).*needs \(2, 4\)",
    ),
    "NaN": (lambda r: r.replay({"leave.bias": torch.full((1, 3), NAN)}), "'leave.bias'.*NaN"),
    "no rows": (lambda r: r.replay({"leave.bias": torch.ones(0, 3)}), "no rows"),
    "directions": (lambda r: r.forward(torch.ones(1, 9)), r"w_dot has shape \(1, 9\).*\(b, 10\)"),
    "one direction": (lambda r: r.forward(torch.ones(10)), r"w_dot has shape \(10,\)"),
    "infinite": (lambda r: r.forward(torch.full((1, 10), INF)), "w_dot holds NaN or infinity"),
    "a block of none": (lambda r: r.forward(torch.ones(1, 10), block=0), "block=0"),
}


@pytest.fixture(scope="module")
def run() -> ms.Run:
    return ms.train(recipe(), implementation="loop")


@pytest.mark.parametrize("what", SWEEPS)
def test_sweeps_that_cannot_be(run: ms.Run, what: str) -> None:
    call, words = SWEEPS[what]
    with pytest.raises(ms.ArgumentError, match=words):
        call(run)


def test_an_unknown_implementation() -> None:
    with pytest.raises(ms.ArgumentError, match=r"implementation='fast': choose one of .*'loop'"):
        ms.train(recipe(), implementation="fast")


def test_every_error_is_of_one_tree() -> None:
    names = [name for name in ms.__all__ if name.endswith("Error")]
    assert len(names) >= 10
    for name in names:
        assert issubclass(getattr(ms, name), ms.MetasketchError)


# What the user has stays as it is.


def snapshot(net: nn.Module, data: Any) -> dict[str, Any]:
    """Everything of the user's that a call could have changed."""
    return {
        "values": {n: t.detach().clone() for n, t in net.state_dict().items()},
        "identities": {n: id(t) for n, t in [*net.named_parameters(), *net.named_buffers()]},
        "versions": [t._version for t in [*net.state_dict().values(), *data]],
        "requires_grad": {n: p.requires_grad for n, p in net.named_parameters()},
        "grads": {n: p.grad for n, p in net.named_parameters()},
        "training": {n: m.training for n, m in net.named_modules()},
        "classes": {n: type(m) for n, m in net.named_modules()},
        "attributes": {n: sorted(m.__dict__) for n, m in net.named_modules()},
        "hooks": {n: list(m._forward_pre_hooks.values()) for n, m in net.named_modules()},
        "data": [t.clone() for t in data],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }


def drawing(model: nn.Module, batch: Any, step: int = 0) -> Tensor:
    """Draws from every generator, and fails late if the model says so."""
    if step == 2 and getattr(model, "fails", False):
        raise ZeroDivisionError
    scale = 1 + 0.01 * (random.random() + np.random.rand() + float(torch.rand(())))
    return scale * cross_entropy(model, batch)


CALLS: dict[str, Callable[[ms.Run], Any]] = {
    "train": lambda r: ms.train(r.recipe, memory="2 states"),
    "replay": lambda r: r.replay(cotangents(r)),
    "forward": lambda r: r.forward(torch.ones(1, problems.NUM_EXAMPLES, dtype=F64)),
    "model": lambda r: r.model()(r.recipe.data[0]),
    "values": lambda r: ms.Queries(r.recipe.data, cross_entropy).values(r),
    "gradients": lambda r: ms.Queries(r.recipe.data, cross_entropy).gradients(r),
    "check": lambda r: ms.check(r.recipe, ms.Queries(r.recipe.data, cross_entropy)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("what", [*CALLS, "a failing train", "a failing replay"])
def test_what_the_user_has_is_left_as_it_was(what: str, training: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3), nn.Linear(3, 3)
    )
    net.double().train(training)
    net[4].requires_grad_(False)
    net[1].register_forward_pre_hook(lambda module, args: None)
    data = problems.inputs("mlp", problems.NUM_EXAMPLES, seed=1)
    described = recipe(model=net, data=data, loss=drawing)
    run = ms.train(described, memory="2 states", implementation="loop")
    before = snapshot(net, data)
    if what in CALLS:
        CALLS[what](run)
    else:
        described.functional.module.fails = True
        with pytest.raises(ZeroDivisionError):
            CALLS[what.split()[-1]](run)
    after = snapshot(net, data)
    assert equal(before, after)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert equal(a[key], b[key]), key
        return True
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Tensor | np.ndarray):
        return bool((a == b).all())
    return bool(a == b)


def test_a_trained_model_is_the_users_own() -> None:
    """Changing it, or training it further, does not reach the run."""
    run = ms.train(recipe(nn.BatchNorm1d(4)))
    before = {n: v.clone() for n, v in run.state_dict().items()}
    model = run.model()
    assert not any(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    assert all(torch.equal(v, before[n]) for n, v in run.state_dict().items())
    assert torch.equal(run.model().state_dict()["enter.weight"], before["enter.weight"])
    copy.deepcopy(model)


# The same numbers each time.


def final_digest() -> int:
    torch.set_num_threads(1)
    return digest(ms.train(problems.recipe("cnn", "adamw", "dropout", microbatch=2)).final)


def test_training_is_bitwise_repeatable_also_across_processes() -> None:
    command = "from tests.test_bad_input import final_digest; print(final_digest())"
    processes = [
        subprocess.Popen([sys.executable, "-c", command], cwd=ROOT, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    printed = [int(process.communicate()[0]) for process in processes]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    one = final_digest()
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert one == final_digest()
    assert printed == [one, one]


class Recording(nn.Module):
    """Dropout that notes its masks."""

    masks: dict[tuple[int, ...], list[Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, training=True)
        MASKS.append(mask.detach().clone())
        return x * mask


MASKS: list[Tensor] = []


def masks_of(**changes: Any) -> list[Tensor]:
    """The mask of every microbatch in turn, without the dry run's."""
    MASKS.clear()
    described = recipe(Recording(), **{"microbatch": 3, **changes})
    run = ms.train(described)
    number = sum(-(-len(b) // (described.microbatch or len(b))) for b in run.recipe.order.batches)
    return [m.clone() for m in MASKS[-number:]]


def test_dropout_depends_on_seed_step_and_microbatch_only() -> None:
    order = {"batches": [[0, 1, 2, 3, 4, 5]] * 2, "batch_size": None, "epochs": None}
    masks = masks_of(**order)
    assert len(masks) == 4  # two steps of two microbatches
    assert len({tuple(m.flatten().tolist()) for m in masks}) == 4
    same = [
        masks_of(**order, optimizer=ms.Adam(lr=0.01)),
        masks_of(**order, model=perturbed()),
        masks_of(**{**order, "batches": [[9, 8, 7, 6, 5, 4], [0, 1, 2, 0, 1, 2]]}),
    ]
    for others in same:
        assert all(torch.equal(a, b) for a, b in zip(masks, others, strict=True))
    assert not torch.equal(masks_of(**order, seed=4)[0], masks[0])
    longer = masks_of(**{**order, "batches": [[0, 1, 2, 3, 4, 5]] * 3})
    assert all(torch.equal(a, b) for a, b in zip(masks, longer[:4], strict=True))


def perturbed() -> nn.Module:
    net = Net(Recording()).double()
    with torch.no_grad():
        net.enter.weight.add_(0.5)
    return net
