"""BatchNorm whose running statistics are part of the differentiable state.

PyTorch updates running statistics in place and outside autograd, and in eval mode does not
differentiate the normalisation with respect to them. Here both are functions:

    training:    r' = (1 - a) r + a stat(x)        (var unbiased, as torch has it)
    evaluation:  y = (x - r_mean) / sqrt(r_var + eps) * weight + bias

The modules of a copied model get another class with the same name, state and place in
``isinstance`` checks; statistics are read from, and written to, a `Statistics` that the caller
provides for the time of one evaluation.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ATTRIBUTE = "_metasketch_statistics"


@dataclass
class Statistics:
    """Current running statistics and batch counts, by the names of the model's buffers.

    Where their derivative is not asked for, torch's fused kernel updates them on the way.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    differentiable: bool = True


class _Functional(_BatchNorm):
    """The forward pass of a BatchNorm as a function of its statistics."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if len(input) == 1:
            # torch's backward pass on the CPU is wrong (2.13: by tens of per cent) for a batch of
            # one whose strides are those of channels last.
            input = input.contiguous()
        prefix, statistics = getattr(self, _ATTRIBUTE)
        if not self.track_running_stats:
            if self.training or self.running_mean is None or self.running_var is None:
                return _normalize_by_batch(self, input)
            return _normalize(self, input, self.running_mean, self.running_var)
        mean_name, var_name = f"{prefix}running_mean", f"{prefix}running_var"
        if not self.training:
            mean, var = statistics.tensors[mean_name], statistics.tensors[var_name]
            return _normalize(self, input, mean, var)
        count_name = f"{prefix}num_batches_tracked"
        statistics.counts[count_name] = count = statistics.counts[count_name] + 1
        a = 1.0 / count if self.momentum is None else self.momentum
        if not statistics.differentiable:
            mean, var = (statistics.tensors[name].clone() for name in (mean_name, var_name))
            statistics.tensors |= {mean_name: mean, var_name: var}
            return F.batch_norm(input, mean, var, self.weight, self.bias, True, a, self.eps)
        output = _normalize_by_batch(self, input)
        dims = [d for d in range(input.dim()) if d != 1]
        var, mean = torch.var_mean(input, dims)
        for name, batch in ((mean_name, mean), (var_name, var)):
            statistics.tensors[name] = (1 - a) * statistics.tensors[name] + a * batch
        return output


def _normalize_by_batch(module: _BatchNorm, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, module.weight, module.bias, training=True, eps=module.eps)


def _normalize(module: _BatchNorm, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    scale = (var + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * module.weight
    shift = -mean * scale if module.bias is None else module.bias - mean * scale
    return x * scale.view(shape) + shift.view(shape)


_BACK: dict[type, type] = {}
"""From the classes that `_functional` made to those of the user."""


def _functional(plain: type) -> type:
    for made, origin in _BACK.items():
        if origin is plain:
            return made
    made = type(plain.__name__, (_Functional, plain), {})
    _BACK[made] = plain
    return made


def is_plain(module: nn.Module) -> bool:
    """Whether a module is one of torch's BatchNorms, or a subclass with the same forward."""
    return isinstance(module, _PLAIN) and type(module).forward is _BatchNorm.forward


def make_functional(model: nn.Module) -> Statistics:
    """Replace, in place, the class of every BatchNorm of a (copied) model.

    Returns the model's statistics; assign to its ``tensors`` and ``counts`` before an evaluation.
    """
    statistics = Statistics()
    for path, module in model.named_modules():
        if not is_plain(module):
            continue
        prefix = f"{path}." if path else ""
        assert isinstance(module, _BatchNorm)
        if module.track_running_stats:
            assert module.running_mean is not None
            assert module.running_var is not None
            assert module.num_batches_tracked is not None
            statistics.tensors[f"{prefix}running_mean"] = module.running_mean.detach().clone()
            statistics.tensors[f"{prefix}running_var"] = module.running_var.detach().clone()
            count = int(module.num_batches_tracked)
            statistics.counts[f"{prefix}num_batches_tracked"] = count
        object.__setattr__(module, _ATTRIBUTE, (prefix, statistics))
        module.__class__ = _functional(type(module))
    return statistics


def restore(model: nn.Module, tensors: dict[str, Tensor], counts: dict[str, int]) -> None:
    """Undo `make_functional`, in place, and write statistics into the buffers."""
    modules: list[Any] = [m for m in model.modules() if type(m) in _BACK]
    for module in modules:
        module.__class__ = _BACK[type(module)]
        module.__dict__.pop(_ATTRIBUTE, None)
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor)
        for name, count in counts.items():
            buffers[name].fill_(count)
