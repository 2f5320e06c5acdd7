"""Second derivatives of common layers, cheaper than torch's own.

Torch walks the graph of a gradient through composite formulas that it evaluates anew for each row
of a block. Here what does not depend on the row (φ''(x), a normalised input) is computed once, when
the graph is built, and a row costs a few fused passes over memory.

`TunedRules` swaps these in for the functions that a model calls, while one graph is built. They
compute the same functions, to rounding; they have first and second derivatives, no third, no
forward mode and no vmap, so only the row-by-row double backward uses them, and only where it was
measured to be faster and to agree.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.overrides import TorchFunctionMode


class Pointwise(Function):
    """y = φ(x) for a smooth scalar function, with φ' and φ'' from autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phi: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            y = phi(point)
            (slope,) = torch.autograd.grad(y, point, torch.ones_like(y), create_graph=True)
            (curvature,) = torch.autograd.grad(slope, point, torch.ones_like(y))
        ctx.save_for_backward(x, slope.detach(), curvature)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, y_bar: Tensor) -> Any:
        x, slope, curvature = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return y_bar * slope, None
        return PointwiseBackward.apply(y_bar, x, slope, curvature), None  # type: ignore[no-untyped-call]


class PointwiseBackward(Function):
    """x̄ = ȳ φ'(x)."""

    @staticmethod
    def forward(ctx: Any, y_bar: Tensor, x: Tensor, slope: Tensor, curvature: Tensor) -> Tensor:
        ctx.save_for_backward(slope, y_bar * curvature)
        return y_bar * slope

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, u: Tensor) -> Any:
        slope, bent = ctx.saved_tensors
        return u * slope, u * bent, None, None


class Standardize(Function):
    """y = x̂ γ + β with x̂ = (x - m(x)) / sqrt(m((x - m(x))²) + ε), m a mean over some dimensions.

    Layer normalisation averages over features, batch normalisation over everything else; the
    mathematics is one. With P v = v - m(v) - x̂ m(v x̂), which is symmetric, and ρ = 1/σ,
    the backward pass is x̄ = ρ P(ȳ γ), γ̄ = Σ ȳ x̂, β̄ = Σ ȳ.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: "Kind"
    ) -> Tensor:
        y, x_hat, mean, rho = kind.standardize(x, weight, bias)
        ctx.kind, ctx.has = kind, (weight is not None, bias is not None)
        ctx.save_for_backward(x, weight, x_hat, mean, rho)
        return y

    @staticmethod
    def backward(ctx: Any, y_bar: Tensor) -> Any:
        x, weight, x_hat, mean, rho = ctx.saved_tensors
        if torch.is_grad_enabled():
            bars = StandardizeBackward.apply(y_bar, x, weight, x_hat, mean, rho, ctx.kind)  # type: ignore[no-untyped-call]
        else:
            bars = ctx.kind.backward(y_bar.contiguous(), x, weight, mean, rho)
        return bars[0], bars[1] if ctx.has[0] else None, bars[2] if ctx.has[1] else None, None


class StandardizeBackward(Function):
    """(x̄, γ̄, β̄) from ȳ, with the derivative of that."""

    @staticmethod
    def forward(
        ctx: Any,
        y_bar: Tensor,
        x: Tensor,
        weight: Tensor | None,
        x_hat: Tensor,
        mean: Tensor,
        rho: Tensor,
        kind: "Kind",
    ) -> Any:
        ctx.kind = kind
        y_bar = y_bar.contiguous()
        x_bar, weight_bar, bias_bar = kind.backward(y_bar, x, weight, mean, rho)
        g = y_bar if weight is None else y_bar * kind.affine(weight)
        ctx.save_for_backward(
            y_bar, x, weight, x_hat, mean, rho, x_bar, g, kind.average(g * x_hat) * kind.spread(rho)
        )
        return x_bar, weight_bar, bias_bar

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, U: Tensor, u_weight: Tensor | None, u_bias: Tensor | None) -> Any:
        """With a = m(g x̂), g = ȳ γ:

        ȳ ← γ ρ P(U) + x̂ u_γ + u_β,   γ ← Σ ȳ ρ P(U),
        x ← ρ P(ȳ u_γ - ρ (a U + m(U x̂) g)) - ρ m(U x̄) x̂
        """
        kind = ctx.kind
        y_bar, x, weight, x_hat, mean, rho, x_bar, g, a_rho = ctx.saved_tensors
        U = U.contiguous()
        rho_PU, _, _ = kind.backward(U, x, None, mean, rho)
        rho = kind.spread(rho)
        W = (U * a_rho).addcmul_(g, kind.average(U * x_hat) * rho).neg_()
        if weight is None:
            y_out, weight_out = rho_PU, None
        else:
            y_out = rho_PU * kind.affine(weight)
            weight_out = kind.total(y_bar * rho_PU)
            if u_weight is not None:
                y_out.addcmul_(x_hat, kind.affine(u_weight))
                W.addcmul_(y_bar, kind.affine(u_weight))
            if u_bias is not None:
                y_out.add_(kind.affine(u_bias))
        x_out, _, _ = kind.backward(W, x, None, mean, rho.reshape(mean.shape))
        x_out = x_out.addcmul_(x_hat, kind.average(U * x_bar) * rho, value=-1)
        return y_out, x_out, weight_out, None, None, None, None


class Layer:
    """Averages over the trailing dimensions (layer normalisation)."""

    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        self.shape, self.eps = list(shape), eps
        self.dims = tuple(range(-len(shape), 0))

    def standardize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_hat, mean, rho = torch.native_layer_norm(x, self.shape, None, None, self.eps)
        y = x_hat if weight is None else x_hat * weight
        return (y if bias is None else y + bias), x_hat, mean, rho

    def backward(
        self, y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rho: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        affine = weight is not None
        bars: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
            y_bar, x, self.shape, mean, rho, weight, weight, [True, affine, affine]
        )
        return bars

    def average(self, x: Tensor) -> Tensor:
        return x.mean(self.dims, keepdim=True)

    def spread(self, statistic: Tensor) -> Tensor:
        return statistic

    def affine(self, parameter: Tensor) -> Tensor:
        return parameter

    def total(self, x: Tensor) -> Tensor:
        return x.sum(tuple(range(x.dim() - len(self.shape))))


class Batch:
    """Averages over all dimensions but the second (batch normalisation in training mode)."""

    def __init__(self, dim: int, eps: float) -> None:
        self.eps = eps
        self.dims = tuple(d for d in range(dim) if d != 1)
        self.view = [1, -1] + [1] * (dim - 2)

    def standardize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, mean, rho = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, self.eps)
        x_hat = (x - self.spread(mean)).mul_(self.spread(rho))
        return y, x_hat, mean, rho

    def backward(
        self, y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rho: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        affine = weight is not None
        bars: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
            y_bar, x, weight, None, None, mean, rho, True, self.eps, [True, affine, affine]
        )
        return bars

    def average(self, x: Tensor) -> Tensor:
        return x.mean(self.dims, keepdim=True)

    def spread(self, statistic: Tensor) -> Tensor:
        return statistic.view(self.view)

    def affine(self, parameter: Tensor) -> Tensor:
        return parameter.view(self.view)

    def total(self, x: Tensor) -> Tensor:
        return x.sum(self.dims)


Kind = Layer | Batch


def _standardized(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Kind) -> Tensor:
    y: Tensor = Standardize.apply(x, weight, bias, kind)  # type: ignore[no-untyped-call]
    return y


def _layer_norm(
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _standardized(x, weight, bias, Layer(tuple(normalized_shape), eps))


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    rows = x.reshape(len(x) * num_groups, -1)
    y = _standardized(rows, None, None, Layer((rows.shape[1],), eps)).view(x.shape)
    view = [1, -1] + [1] * (x.dim() - 2)
    y = y if weight is None else y * weight.view(view)
    return y if bias is None else y + bias.view(view)


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or running_mean is not None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return _standardized(x, weight, bias, Batch(x.dim(), eps))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p > 0 or enable_gqa or attn_mask is not None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scores = query.mul(scale or 1 / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1) @ value


def _pointwise(phi: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def replacement(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs.get("inplace", False):
            return phi(input, *args, **kwargs)
        y: Tensor = Pointwise.apply(input, lambda x: phi(x, **kwargs))  # type: ignore[no-untyped-call]
        return y

    return replacement


REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.gelu: _pointwise(F.gelu),
    F.silu: _pointwise(F.silu),
    F.mish: _pointwise(F.mish),
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.scaled_dot_product_attention: _attention,
}


class TunedRules(TorchFunctionMode):
    """While the block runs, the functions in `REPLACEMENTS` are the ones of this module."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))
