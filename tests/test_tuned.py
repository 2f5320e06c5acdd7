"""The tuned second derivatives equal torch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metasketch.tuned import REPLACEMENTS, TunedRules

CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "gelu": (lambda x: F.gelu(x), [(3, 5)]),
    "gelu-tanh": (lambda x: F.gelu(x, approximate="tanh"), [(3, 5)]),
    "silu": (F.silu, [(3, 5)]),
    "mish": (F.mish, [(3, 5)]),
    "layer": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(2, 3, 4), (4,), (4,)]),
    "layer-two": (lambda x, w, b: F.layer_norm(x, (3, 4), w, b), [(2, 3, 4), (3, 4), (3, 4)]),
    "layer-plain": (lambda x: F.layer_norm(x, (4,)), [(2, 3, 4)]),
    "layer-scale": (lambda x, w: F.layer_norm(x, (4,), w), [(2, 3, 4), (4,)]),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 4, 2, 2), (4,), (4,)]),
    "group-plain": (lambda x: F.group_norm(x, 2), [(3, 4, 5)]),
    "batch": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [(3, 4, 2, 2), (4,), (4,)],
    ),
    "batch-plain": (lambda x: F.batch_norm(x, None, None, training=True), [(6, 4)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)],
    ),
    "attention-causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7),
        [(2, 2, 5, 4)] * 3,
    ),
}


def second_order(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], rules: bool
) -> list[Tensor]:
    """Value, gradient and a Hessian product of a scalar made of the function, by all inputs."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = [draw(*shape).requires_grad_() for shape in shapes]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        if rules:
            with TunedRules():
                y = function(*inputs)
        else:
            y = function(*inputs)
    # Not linear in y, so that the output's own second derivative takes part.
    total = (y * draw(*y.shape)).sum() + y.square().sum()
    first = torch.autograd.grad(total, inputs, create_graph=True)
    second = torch.autograd.grad(first, inputs, [draw(*x.shape) for x in inputs])
    return [y.detach(), *(f.detach() for f in first), *second]


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_equal_torchs(name: str) -> None:
    function, shapes = CASES[name]
    for ours, theirs in zip(
        second_order(function, shapes, True), second_order(function, shapes, False), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_rules_are_really_in_use() -> None:
    """Replaced functions leave nodes of ours in the graph: the test above has a subject."""
    x = torch.randn(4, 4, 2, 2, requires_grad=True)
    with TunedRules():
        outputs = [F.gelu(x), F.silu(x), F.layer_norm(x, (2,)), F.group_norm(x, 2).view(-1)]
        outputs.append(F.batch_norm(x, None, None, training=True))
    nodes = {str(type(y.grad_fn).__name__) for y in outputs}
    assert {"PointwiseBackward", "StandardizeBackward"} <= nodes
    assert len(REPLACEMENTS) == 7


def test_what_the_rules_do_not_cover_goes_to_torch() -> None:
    x = torch.randn(3, 4)
    q = torch.randn(2, 2, 3, 4)
    mask = torch.zeros(3, 3)
    mean, var = torch.zeros(4), torch.ones(4)
    with TunedRules():
        assert torch.equal(F.silu(x.clone(), True), F.silu(x))
        assert torch.equal(F.batch_norm(x, mean, var), x / (1 + 1e-5) ** 0.5)
        masked = F.scaled_dot_product_attention(q, q, q, mask)
    torch.testing.assert_close(masked, F.scaled_dot_product_attention(q, q, q))
