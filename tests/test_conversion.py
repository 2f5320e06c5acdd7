"""Recipes from torch's optimisers and schedulers train as a plain torch loop does."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import metasketch as ms
from tests import problems

F64 = torch.float64

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def no_decay(net: nn.Module, **second: Any) -> list[dict[str, Any]]:
    """Two groups, as scripts make them: biases and norms apart, named by nothing but identity."""
    plain = [p for p in net.parameters() if p.dim() <= 1]
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": plain, "weight_decay": 0.0, **second},
    ]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda n: torch.optim.SGD(n.parameters(), lr=0.1),
    "sgd-groups": lambda n: torch.optim.SGD(
        no_decay(n, momentum=0.5, dampening=0.2, lr=0.05), lr=0.1, weight_decay=0.02
    ),
    "nesterov": lambda n: torch.optim.SGD(
        no_decay(n, nesterov=False), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02
    ),
    "adam": lambda n: torch.optim.Adam(
        no_decay(n, betas=(0.5, 0.9)), lr=0.01, weight_decay=0.02, foreach=True
    ),
    "adam-decoupled": lambda n: torch.optim.Adam(
        n.parameters(), lr=0.01, weight_decay=0.2, decoupled_weight_decay=True
    ),
    "adamw": lambda n: torch.optim.AdamW(
        no_decay(n, lr=0.02, eps=1e-4), lr=0.01, weight_decay=0.2, capturable=False
    ),
    "adamw-fused": lambda n: torch.optim.AdamW(n.parameters(), lr=0.01, fused=True),
}

SCHEDULERS: dict[str, MakeScheduler] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 3)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=6, cycle_momentum=False),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[3],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)],
        optimizer=o,
    ),
}


def torch_loop(recipe: ms.Recipe, make: MakeOptimizer, schedule: Any = None) -> nn.Module:
    """The same training, written by hand."""
    net = copy.deepcopy(recipe.model).train()
    optimizer = make(net)
    scheduler = None if schedule is None else schedule(optimizer)
    for indices in recipe.order.batches:
        x, y = (d[indices] for d in recipe.data)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return net


def check(make: MakeOptimizer, schedule: MakeScheduler | None = None) -> None:
    plain = problems.recipe("gpt", "sgd", "plain", schedule=None)
    optimizer = make(plain.model)
    scheduler = None if schedule is None else schedule(optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    recipe = problems.with_options(plain, optimizer=optimizer, schedule=scheduler)
    ours = ms.train(recipe).state_dict()
    for name, value in torch_loop(recipe, make, schedule).named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-10, atol=1e-10)
    assert optimizer.state_dict() == before  # the user's own object is as it was
    assert getattr(scheduler, "last_epoch", 0) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_converted_optimiser_trains_as_torchs_does(name: str) -> None:
    check(OPTIMIZERS[name])


def test_a_rate_that_torch_keeps_as_a_tensor() -> None:
    """Torch then steps in the tensor's float32; the scheduler's copy must not share the tensor."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01))

    plain = problems.recipe("gpt", "sgd", "plain", schedule=None)
    optimizer = make(plain.model)
    scheduler = SCHEDULERS["cosine"](optimizer)
    recipe = problems.with_options(plain, optimizer=optimizer, schedule=scheduler)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.01)
    ours = ms.train(recipe).state_dict()
    for name, value in torch_loop(recipe, make, SCHEDULERS["cosine"]).named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_converted_scheduler_trains_as_torchs_does(name: str) -> None:
    check(OPTIMIZERS["adam" if name == "onecycle" else "adamw"], SCHEDULERS[name])


def test_a_scheduler_stepped_once_an_epoch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = ms.from_scheduler(lr_scheduler.ExponentialLR(optimizer, 0.5), every=3)
    recipe = problems.recipe("mlp", "sgd", "plain", schedule=schedule)
    assert recipe.rates == (1.0, 1.0, 1.0, 0.5, 0.5, 0.5)


def test_the_recipe_does_not_follow_the_users_scheduler() -> None:
    """Training in torch after the recipe was made moves the user's rates, not the recipe's."""
    plain = problems.recipe("mlp", "sgd", "plain")
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    recipe = problems.with_options(plain, optimizer=optimizer, schedule=scheduler)
    optimizer.step()
    scheduler.step()
    again = problems.with_options(recipe, batches=recipe.order.batches[:2], **NO_EPOCHS)
    assert again.rates == (1.0, 0.5) == recipe.rates[:2]


NO_EPOCHS = {"batch_size": None, "epochs": None}


def test_frozen_parameters_may_be_in_the_optimiser() -> None:
    """torch skips them, and so does the recipe."""
    plain = problems.recipe("mlp", "sgd", "plain", schedule=None)
    plain.model.enter.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    recipe = problems.with_options(plain, optimizer=optimizer)
    assert "enter.weight" not in recipe.functional.layout.names


class Odd(nn.Module):
    """Parameters whose names are patterns of other names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict(
            {"a*": nn.Linear(5, 3), "ab": nn.Linear(5, 3), "[a]": nn.Linear(5, 3)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part(x) for part in self.parts.values()), start=torch.zeros((), dtype=F64))


def test_names_are_matched_exactly() -> None:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        rates = {"a*": 0.1, "ab": 0.2, "[a]": 0.3}
        groups = [{"params": net.parts[k].parameters(), "lr": lr} for k, lr in rates.items()]
        return torch.optim.SGD([groups[1], groups[0], groups[2]])

    plain = problems.recipe("mlp", "sgd", "plain", schedule=None)
    net = Odd().double()
    recipe = problems.with_options(plain, model=net, optimizer=make(net))
    ours = ms.train(recipe).state_dict()
    for name, value in torch_loop(recipe, make).named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-11, atol=1e-12)


class Mine(torch.optim.SGD):
    """A subclass, which may do anything."""


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def hooked(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def warmed_up(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: t / 4)
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "amsgrad": (lambda n: torch.optim.Adam(n.parameters(), amsgrad=True), "amsgrad=True"),
    "maximize": (lambda n: torch.optim.SGD(n.parameters(), maximize=True), "maximize=True"),
    "group-maximize": (
        lambda n: torch.optim.SGD([{"params": n.parameters(), "maximize": True}]),
        "maximize=True",
    ),
    "other": (lambda n: torch.optim.Adagrad(n.parameters()), "Adagrad; of torch's optimisers"),
    "subclass": (lambda n: Mine(n.parameters(), lr=0.1), "Mine; of torch's optimisers"),
    "state": (stepped, "stepped already"),
    "hooks": (hooked, "step hooks"),
    "foreign": (
        lambda n: torch.optim.SGD(copy.deepcopy(n).parameters()),
        "parameters that are not the model's",
    ),
    "left-out": (lambda n: torch.optim.SGD(list(n.parameters())[1:]), "leaves out 1 trainable"),
    "moved": (warmed_up, "a scheduler has set the optimiser's rate to 0"),
    "two-sgd": (
        lambda n: [
            torch.optim.SGD(list(n.parameters())[:2]),
            torch.optim.SGD(list(n.parameters())[2:]),
        ],
        "a list of SGD, SGD",
    ),
    "twice": (
        lambda n: [torch.optim.SGD(n.parameters()), torch.optim.SGD(n.parameters())],
        "more than one",
    ),
    "decoupled-in-part": (
        lambda n: torch.optim.Adam(
            [
                {"params": list(n.parameters())[:2], "decoupled_weight_decay": True},
                {"params": list(n.parameters())[2:]},
            ]
        ),
        "differ in decoupled_weight_decay",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_the_same_training_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    plain = problems.recipe("mlp", "sgd", "plain")
    with pytest.raises(ms.ArgumentError, match=words):
        problems.with_options(plain, optimizer=make(plain.model))


def two_lambdas(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(o, [lambda t: 1.0, lambda t: 1.0 / (t + 1)])


def advanced(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    scheduler = lr_scheduler.ExponentialLR(o, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    return scheduler


def of_another(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), 0.5)


REFUSED_SCHEDULERS: dict[str, tuple[MakeScheduler, str]] = {
    "plateau": (lr_scheduler.ReduceLROnPlateau, "not known before training"),
    "groups": (two_lambdas, "treats parameter groups differently: at its step 1"),
    "momentum": (
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
        r"changes \['momentum'\]",
    ),
    "short": (
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=3, cycle_momentum=False),
        "could not make step 4",
    ),
    "advanced": (advanced, "has been stepped 1 times"),
    "another": (of_another, "drives another optimiser"),
}


@pytest.mark.parametrize("name", REFUSED_SCHEDULERS)
def test_schedulers_that_have_no_table_are_refused(name: str) -> None:
    make, words = REFUSED_SCHEDULERS[name]
    plain = problems.recipe("mlp", "sgd", "plain")
    optimizer = torch.optim.SGD(no_decay(plain.model), lr=0.1, momentum=0.9)
    with pytest.raises(ms.ArgumentError, match=words):
        problems.with_options(plain, optimizer=optimizer, schedule=make(optimizer))


def test_derivatives_of_a_converted_run() -> None:
    """The recipe from torch's objects is differentiated as the one written out by hand."""
    plain = problems.recipe("mlp", "sgd", "plain", schedule=None)
    optimizer = OPTIMIZERS["adamw"](plain.model)
    scheduler = SCHEDULERS["cosine"](optimizer)
    recipe = problems.with_options(plain, optimizer=optimizer, schedule=scheduler)
    biases = [n for n, p in plain.model.named_parameters() if p.dim() <= 1]
    ours = ms.AdamW(
        lr=0.01, weight_decay=0.2, groups=(ms.Group(biases, lr=0.02, eps=1e-4, weight_decay=0.0),)
    )
    written = problems.with_options(plain, optimizer=ours, schedule=ms.cosine())
    rows = []
    for described in (recipe, written):
        run = ms.train(described, implementation="loop")
        rows.append(run.replay(problems.queries("mlp").gradients(run)))
    assert problems.relative(*rows) < 1e-6
