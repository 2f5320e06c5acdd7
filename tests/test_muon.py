"""Muon against torch's own, with its iteration in full precision, and against the mathematics."""

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metasketch as ms
from metasketch.muon import orthogonalize
from tests import problems

F64 = torch.float64
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def in_full_precision(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """torch's ``_zeropower_via_newtonschulz``, line by line, without the cast to bfloat16."""
    a, b, c = ns_coefficients
    ortho_grad = grad.clone()
    if grad.size(0) > grad.size(1):
        ortho_grad = ortho_grad.T
    ortho_grad.div_(ortho_grad.norm().clamp(min=eps))
    for _ in range(ns_steps):
        gram_matrix = ortho_grad @ ortho_grad.T
        gram_update = torch.addmm(gram_matrix, gram_matrix, gram_matrix, beta=b, alpha=c)
        ortho_grad = torch.addmm(ortho_grad, gram_update, ortho_grad, beta=a)
    if grad.size(0) > grad.size(1):
        ortho_grad = ortho_grad.T
    return ortho_grad


@pytest.fixture
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.optim._muon")
    monkeypatch.setattr(module, "_zeropower_via_newtonschulz", in_full_precision)


def torchs(net: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for n, p in net.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in net.named_parameters() if p.dim() != 2 or "embed" in n]
    groups = [
        {"params": matrices[:1], "lr": 0.05, "weight_decay": 0.0},
        {"params": matrices[1:]},
    ]
    muon = torch.optim.Muon(groups, lr=0.02, weight_decay=0.3, **options)
    return muon, torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "rms": {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8},
    "plain-momentum": {"nesterov": False, "ns_steps": 3, "eps": 1e-3},
}


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_each_step_is_torchs_in_full_precision(model: str, options: dict[str, Any]) -> None:
    """Converted from torch's two optimisers, and compared after every step of the run."""
    plain = problems.recipe(model, "sgd", "plain", schedule=None)
    with pytest.warns(ms.MetasketchWarning, match="bfloat16"):
        recipe = problems.with_options(plain, optimizer=list(torchs(plain.model, **options)))
    run = ms.train(recipe, memory="100 states")
    net = copy.deepcopy(recipe.model).train()
    theirs = torchs(net, **options)
    states = [*(run.trajectory.memory[t] for t in range(1, run.num_steps)), run.final]
    for indices, state in zip(recipe.order.batches, states, strict=True):
        net.zero_grad()
        x, y = (d[indices] for d in recipe.data)
        F.cross_entropy(net(x), y).backward()
        for optimizer in theirs:
            optimizer.step()
        ours = run.step.model.layout.unpack(state.params)
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-11, atol=1e-11)


def test_torchs_own_iteration_differs_by_its_rounding() -> None:
    """What the warning speaks of: in bfloat16 a step goes elsewhere, but not far."""
    u = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    coarse = importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz(
        u, COEFFICIENTS, 5, 1e-7
    )
    gap = (orthogonalize(u, COEFFICIENTS, 5, 1e-7) - coarse.double()).norm() / coarse.norm()
    assert 1e-4 < float(gap) < 0.1


def test_the_iteration_keeps_singular_vectors() -> None:
    g = torch.Generator().manual_seed(0)
    for shape in ((4, 7), (7, 4), (5, 5)):
        u = torch.randn(*shape, generator=g, dtype=F64)
        U, S, Vh = torch.linalg.svd(u, full_matrices=False)
        x = S / S.norm()
        for _ in range(5):
            a, b, c = COEFFICIENTS
            x = a * x + b * x**3 + c * x**5
        expected = U @ torch.diag(x) @ Vh
        torch.testing.assert_close(orthogonalize(u, COEFFICIENTS, 5, 1e-7), expected)


def test_a_zero_gradient_moves_nothing_and_has_a_derivative() -> None:
    u = torch.zeros(3, 4, dtype=F64, requires_grad=True)
    out = orthogonalize(u, COEFFICIENTS, 5, 1e-3)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), u)
    torch.testing.assert_close(grad, torch.full_like(grad, COEFFICIENTS[0] ** 5 / 1e-3))


def test_matrices_and_the_rest_go_their_ways() -> None:
    """Embeddings that are named go to AdamW; its own groups hold for what it takes."""
    rule = problems.OPTIMIZERS["muon"]
    shapes = {"embed.weight": (7, 4), "qkv.weight": (12, 4), "qkv.bias": (12,), "norm.weight": (4,)}
    found = {name: rule.of_parameter(name, torch.Size(s)) for name, s in shapes.items()}
    assert [type(r).__name__ for r in found.values()] == ["AdamW", "Muon", "AdamW", "AdamW"]
    assert found["qkv.bias"].weight_decay == 0.0 != found["norm.weight"].weight_decay


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"adjust_lr": "none"}, "adjust_lr='none'"),
        ({"ns_coefficients": (1.0, 2.0)}, "three are needed"),
        ({"adamw": ms.SGD(lr=0.1)}, "what is not a matrix"),
        ({"groups": (ms.Group("a", beta1=0.5),)}, "does not have"),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ms.ArgumentError, match=words):
        ms.Muon(**options)
