"""A module as a function of its trainable parameters and running statistics."""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from metasketch import batchnorm
from metasketch.errors import ModelError
from metasketch.layout import Layout

_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
_DERIVABLE = (torch.float32, torch.float64)


class FunctionalModel:
    """A private copy of a module whose parameters and statistics are given at each call.

    Frozen parameters are shared with the original, never copied. Trainable ones stay in the copy
    only as the initial values.

    Attributes:
        module: the copy. Its parameters mean something only inside `bound`.
        layout: trainable parameters, in the order of the flat state.
        idle: those that are not in the layout, because they take no part in the loss.
        stats_layout: BatchNorm running statistics.
    """

    def __init__(self, module: nn.Module, layout: Layout, statistics: batchnorm.Statistics) -> None:
        self.module, self.layout, self._statistics = module, layout, statistics
        self.stats_layout = Layout.of(statistics.tensors)
        self._places = _places(module, layout.names)
        trainable = set(layout.names)
        self.idle: dict[str, nn.Parameter] = {
            n: p for n, p in module.named_parameters() if p.requires_grad and n not in trainable
        }
        self._fixed: dict[str, Tensor] = {
            **{n: p for n, p in module.named_parameters() if n not in trainable},
            **{n: b for n, b in module.named_buffers() if n not in statistics.tensors},
        }
        self._versions = {n: t._version for n, t in self._fixed.items()}

    @classmethod
    def copy_of(cls, model: nn.Module) -> "FunctionalModel":
        """Copy a user's module, in training mode; the original is not touched."""
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        try:
            module = copy.deepcopy(model, dict(frozen))
        except Exception as error:
            raise ModelError(
                f"the model cannot be copied (copy.deepcopy: {type(error).__name__}: {error}). "
                "Old torch.nn.utils.weight_norm and spectral_norm do this after a forward pass, "
                "and tensors with a graph kept as attributes: use torch.nn.utils.parametrizations, "
                "and drop such attributes"
            ) from error
        module.train()
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        statistics = batchnorm.make_functional(module)
        return cls(module, Layout.of(trainable), statistics)

    def ordered(self, names: Sequence[str]) -> "FunctionalModel":
        """The same copy with another set, or order, of trainable parameters."""
        parameters = dict(self.module.named_parameters())
        layout = Layout.of({name: parameters[name] for name in names})
        return FunctionalModel(self.module, layout, self._statistics)

    def initial(self) -> tuple[Tensor, Tensor, dict[str, int]]:
        """Initial parameters (P,), statistics (R,) and batch counts."""
        parameters = dict(self.module.named_parameters())
        flat = self.layout.pack([parameters[name].detach() for name in self.layout.names])
        tensors = self._statistics.tensors
        stats = [tensors[name].detach().to(flat) for name in self.stats_layout.names]
        return (
            flat,
            self.stats_layout.pack(stats) if stats else flat.new_zeros(0),
            dict(self._statistics.counts),
        )

    def check_unchanged(self) -> None:
        """Refuse frozen weights and buffers that were changed in place since they were shared."""
        for name, tensor in self._fixed.items():
            if tensor._version != self._versions[name]:
                raise ModelError(
                    f"{name!r}, a frozen parameter or a buffer of the model, was changed in place "
                    "after the recipe was made (by the loss, or outside): make the recipe again, "
                    "and keep frozen weights as they are while its runs are in use"
                )

    @contextlib.contextmanager
    def bound(
        self,
        params: Sequence[Tensor],
        stats: Sequence[Tensor],
        counts: Mapping[str, int],
        differentiable: bool = True,
    ) -> Iterator[nn.Module]:
        """The module with these parameters and statistics in place, while the block runs.

        Afterwards `statistics_after` has what the evaluation made of the statistics, with their
        derivative if it is asked for.
        """
        self._statistics.differentiable = differentiable
        replaced = []
        names = self.stats_layout.names
        before = (self._statistics.tensors, self._statistics.counts)
        self._statistics.tensors = dict(zip(names, stats, strict=True))
        self._statistics.counts = dict(counts)
        try:
            for places, tensor in zip(self._places, params, strict=True):
                for holder, key in places:
                    replaced.append((holder, key, holder[key]))
                    holder[key] = tensor
            yield self.module
        finally:
            for holder, key, original in reversed(replaced):
                holder[key] = original
            self._after = (self._statistics.tensors, self._statistics.counts)
            self._statistics.tensors, self._statistics.counts = before

    def statistics_after(self) -> tuple[list[Tensor], dict[str, int]]:
        """Statistics and counts as the last evaluation left them."""
        tensors, counts = self._after
        return [tensors[name] for name in self.stats_layout.names], counts

    def evaluation(self, dtype: torch.dtype) -> "FunctionalModel":
        """A copy in eval mode with floating-point weights and buffers in another precision."""
        module = copy.deepcopy(self.module).to(dtype).eval()
        statistics = next(
            (getattr(m, batchnorm._ATTRIBUTE)[1] for m in module.modules() if _has(m)),
            batchnorm.Statistics(),
        )
        statistics.tensors = {n: t.to(dtype) for n, t in statistics.tensors.items()}
        return FunctionalModel(module, self.layout, statistics)

    def materialize(self, params: Tensor, stats: Tensor, counts: Mapping[str, int]) -> nn.Module:
        """A fresh module of the original's class with these values, in eval mode."""
        module = copy.deepcopy(self.module)
        tensors = self.stats_layout.unpack(stats)
        batchnorm.restore(module, tensors, dict(counts))
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.layout.unpack(params).items():
                parameters[name].copy_(value)
        return module.eval()


def _has(module: nn.Module) -> bool:
    return batchnorm._ATTRIBUTE in module.__dict__


def _places(module: nn.Module, names: Sequence[str]) -> list[list[tuple[dict[str, Any], str]]]:
    """Every place in the module tree where each parameter stands (several where it is tied)."""
    named = dict(module.named_parameters())
    by_id: dict[int, list[tuple[dict[str, Any], str]]] = {id(named[n]): [] for n in names}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in by_id:
                by_id[id(parameter)].append((part._parameters, key))
    return [by_id[id(named[n])] for n in names]


def check_model(model: Any, low_precision: bool) -> None:
    """Refuse, before anything is copied, a module that cannot be a differentiable program."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, _LAZY):
            raise ModelError(
                f"{name!r} is lazy and has no shape yet: run one batch through the model first"
            )
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ModelError(
            "the model has no trainable parameter: set requires_grad=True on what training moves"
        )
    for name, module in model.named_modules():
        _check_buffers(name, module)
    _check_tensors(trainable, low_precision)


def called(path: str, module: nn.Module | str) -> str:
    """How messages name a module: ``module 'layers.0' (Linear)``."""
    kind = module if isinstance(module, str) else type(module).__name__
    return f"module {path!r} ({kind})" if path else f"the model itself ({kind})"


def _check_buffers(name: str, module: nn.Module) -> None:
    keeps = getattr(module, "track_running_stats", False)
    if isinstance(module, nn.SyncBatchNorm):
        raise ModelError(
            f"{called(name, module)} takes its statistics over several processes, which is not "
            "differentiated through: use BatchNorm1d, 2d or 3d"
        )
    if isinstance(module, _InstanceNorm) and keeps:
        raise ModelError(
            f"{called(name, module)} keeps running statistics, which are differentiated through "
            "in BatchNorm only: make it with track_running_stats=False"
        )
    if isinstance(module, _BatchNorm) and keeps and not batchnorm.is_plain(module):
        raise ModelError(
            f"{called(name, module)} is a subclass of BatchNorm with a forward of its own: only "
            "that of torch's BatchNorm1d, 2d and 3d is differentiated through. Use one of them, "
            "and put the rest into a module beside it"
        )


def _check_tensors(trainable: dict[str, nn.Parameter], low_precision: bool) -> None:
    dtypes = {p.dtype for p in trainable.values()}
    if len(dtypes) > 1 or len({p.device for p in trainable.values()}) > 1:
        kinds = sorted({f"{p.dtype} on {p.device}" for p in trainable.values()})
        raise ModelError(
            f"trainable parameters are of several kinds ({', '.join(kinds)}): bring them to one "
            "dtype and one device; frozen ones may be of any dtype"
        )
    dtype = dtypes.pop()
    if not dtype.is_floating_point:
        raise ModelError(f"trainable parameters are {dtype}: only real floating point is supported")
    if dtype not in _DERIVABLE:
        name = next(iter(trainable))
        message = (
            f"trainable parameters are {dtype} (such as {name!r}): derivatives through a whole "
            "training run lose all their digits at this precision"
        )
        if not low_precision:
            raise ModelError(
                f"{message}. Train in float32 (model.float()), freeze what may stay in "
                f"{dtype}, or ask for it by name with Recipe(low_precision=True)"
            )
        warnings.warn(message, stacklevel=5)  # the line that makes the recipe
    for name, parameter in trainable.items():
        if not torch.isfinite(parameter).all():
            raise ModelError(
                f"parameter {name!r} holds NaN or infinity before training: initialise it, or "
                "load a checkpoint that is intact"
            )
