"""Which module lacks a second derivative: asked only after something failed."""

from typing import Any

import torch
from torch import Tensor, nn

from metasketch.errors import DerivativeError
from metasketch.gradient import LossFunction, Part, stops_short
from metasketch.state import State


def derivative_error(
    function: LossFunction, part: Part, state: State, failures: dict[str, Exception]
) -> DerivativeError:
    """An error that names the module (or the loss) that cannot be differentiated twice."""
    culprit = _culprit(function, part, state)
    where = f"module {culprit!r}" if culprit else "an operation of the loss function"
    reasons = "; ".join(f"{how}: {str(e).splitlines()[0]}" for how, e in failures.items())
    return DerivativeError(
        f"{where} has neither a double backward nor a forward derivative, so training cannot be "
        f"differentiated through it. Replace it by plain torch operations, or freeze it and "
        f"compute its outputs beforehand. Torch says: {reasons}"
    )


def _culprit(function: LossFunction, part: Part, state: State) -> str | None:
    """The first module (deepest first) whose own output cannot be differentiated twice."""
    calls: list[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    names = {module: name for name, module in function.functional.module.named_modules()}

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        calls.append((names[module], module, args, kwargs))

    handles = [m.register_forward_hook(record, with_kwargs=True) for m in names]
    theta = [v.detach().requires_grad_() for v in function.functional.layout.views(state.params)]
    stats = function.functional.stats_layout.views(state.stats)
    try:
        function(part, theta, stats, state, part.w)
    finally:
        for handle in handles:
            handle.remove()
    with function.functional.bound(theta, stats, state.counts):
        for name, module, args, kwargs in calls:
            if not _twice(module, args, kwargs, theta):
                return f"{name} ({type(module).__name__})" if name else type(module).__name__
    return None


def _twice(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], theta: list[Tensor]
) -> bool:
    """Whether a module's output can be differentiated twice by its inputs and parameters."""
    leaves = list(theta)

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            leaves.append(value.detach().requires_grad_())
            return leaves[-1].clone()  # which the module may change in place, unlike a leaf
        return value

    try:
        output = module(*(leaf(a) for a in args), **{k: leaf(v) for k, v in kwargs.items()})
        outputs = [output] if isinstance(output, Tensor) else list(output)
        total = sum((o * o).sum() for o in outputs if isinstance(o, Tensor) and o.requires_grad)
        if not isinstance(total, Tensor):
            return True
        first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        if stops_short(first):
            return False
        second = sum((g * g).sum() for g in first if g is not None and g.requires_grad)
        if isinstance(second, Tensor):
            torch.autograd.grad(second, leaves, allow_unused=True)
    except RuntimeError:
        return False
    return True
