"""A first look at a recipe: one microbatch, once, before anything is spent on it.

It finds what only running the loss can show: which parameters take part, buffers that the model
changes behind our back, autocast, items that differ between reads; and how much memory the graph of
a step needs.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from metasketch.errors import LossError, MetasketchError, ModelError
from metasketch.functional import called
from metasketch.gradient import LossFunction, Part, gradient, parts, require_differentiable
from metasketch.recipe import Recipe
from metasketch.state import State
from metasketch.step import Step


@dataclass(frozen=True)
class Probe:
    """What the first look found.

    Attributes:
        used: trainable parameters that take part in the loss; torch never updates the others.
        graph_bytes: memory that the graph of one gradient holds for its backward pass.
        fused: training may use torch's fused attention, since it computes the same function here.
    """

    used: tuple[str, ...]
    graph_bytes: int
    fused: bool


def probe(recipe: Recipe, w: Tensor) -> Probe:
    """Look at the first microbatch of the first step."""
    step = Step.of(recipe)
    recipe.examples.check_unchanged()
    recipe.functional.check_unchanged()
    batch = step.batches.check_repeatable(0)
    part = next(parts(recipe, 0, batch, w))
    state = step.initial()
    attention = _SeesAttention()
    module = step.model.module
    with _unchanged_buffers(module), _no_autocast(recipe, module), attention:
        value, saved = _evaluate(step.function, part, state)
    require_differentiable(value.total)
    theta = saved.pop("theta")
    grads = torch.autograd.grad(value.total, theta, allow_unused=True)
    names = step.model.layout.names
    used = tuple(n for n, g in zip(names, grads, strict=True) if g is not None)
    if not used:
        raise LossError(
            "no trainable parameter of the model takes part in the loss: it must compute with the "
            "model that it is given, loss(model, batch), not with another one from outside"
        )
    # On a GPU the fused kernels draw other dropout masks, and are not all deterministic.
    may_fuse = attention.seen and recipe.device.type == "cpu"
    by_name = dict(zip(names, grads, strict=True))
    fused = may_fuse and _fused_agrees(recipe, used, part, by_name)
    return Probe(used, sum(saved.values()), fused)


class _SeesAttention(TorchFunctionMode):
    """Notices scaled_dot_product_attention."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def _fused_agrees(
    recipe: Recipe, used: tuple[str, ...], part: Part, expected: dict[str, Tensor | None]
) -> bool:
    """Whether the gradient with fused attention is the composite one's, to rounding."""
    step = Step.of(recipe, used, fused=True)
    layout = step.model.layout
    try:
        g = gradient(step.function, part, step.initial()).g
    except RuntimeError:
        return False
    reference = layout.pack([e for n in layout.names if (e := expected[n]) is not None])
    tolerance = 1e-10 if g.dtype == torch.float64 else 1e-4
    gap = torch.linalg.vector_norm(g - reference)
    return bool(gap <= tolerance * torch.linalg.vector_norm(reference))


def _evaluate(function: LossFunction, part: Part, state: State) -> tuple[Any, dict[Any, Any]]:
    """The loss with its graph, and the sizes of the storages that the graph holds on to."""
    theta = [v.detach().requires_grad_() for v in function.functional.layout.views(state.params)]
    stats = function.functional.stats_layout.views(state.stats)
    sizes: dict[Any, Any] = {}
    own = state.params.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_sparse and tensor.untyped_storage().data_ptr() != own:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        try:
            value = function(part, theta, stats, state, part.w)
        except MetasketchError:
            raise
        except Exception as error:
            raise LossError(
                f"the loss failed on the first batch: {type(error).__name__}: {error}"
            ) from error
    sizes["theta"] = theta
    return value, sizes


@contextlib.contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Refuse, by name, a module that changes a buffer while it computes."""
    owners = {
        f"{path}.{name}" if path else name: (path, type(part).__name__, buffer)
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    }
    before = {name: (id(buffer), buffer._version) for name, (_, _, buffer) in owners.items()}
    yield
    for name, buffer in module.named_buffers():
        if name in before and before[name] != (id(buffer), buffer._version):
            path, kind, _ = owners[name]
            raise ModelError(
                f"{called(path, kind)} changes its buffer {name!r} while training: of such state "
                "only BatchNorm's running statistics are differentiated through. Replace the "
                "module, or make the buffer constant"
            )


@contextlib.contextmanager
def _no_autocast(recipe: Recipe, module: nn.Module) -> Iterator[None]:
    """Refuse autocast inside the loss."""
    kind = recipe.device.type
    seen: list[str] = []

    def look(part: nn.Module, args: Any) -> None:
        if torch.is_autocast_enabled(kind):
            seen.append(type(part).__name__)

    handles = [part.register_forward_pre_hook(look) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if seen and not recipe.low_precision:
        raise ModelError(
            f"autocast is on (seen in {seen[0]}): half-precision arithmetic loses the digits that "
            "derivatives through a whole training run need. Train without torch.autocast, or ask "
            "for it by name with Recipe(low_precision=True)"
        )
