"""From ``torch.optim`` to the optimisers and schedules of a recipe.

A user's script has a torch optimiser over groups of parameters, and perhaps a scheduler that moves
their rates. Both are read, never used up: the groups become groups of names, and the scheduler
becomes the table of multipliers that it would produce, found by stepping a copy on a stand-in.
Whatever the library's optimisers cannot do is refused by name.
"""

import copy
import glob
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from metasketch.errors import ArgumentError, MetasketchWarning
from metasketch.muon import Muon
from metasketch.optim import SGD, Adam, AdamW, Group, Optimizer
from metasketch.schedules import Schedule

Hyperparameters = dict[str, Any]


def _sgd(group: Mapping[str, Any]) -> Hyperparameters:
    momentum = _number(group["momentum"])
    return {
        "momentum": momentum,
        "weight_decay": _number(group["weight_decay"]),
        "nesterov": bool(group["nesterov"]),
        "dampening": _number(group["dampening"]) if momentum else 0.0,
    }


def _adam(group: Mapping[str, Any]) -> Hyperparameters:
    beta1, beta2 = group["betas"]
    return {
        "beta1": _number(beta1),
        "beta2": _number(beta2),
        "eps": _number(group["eps"]),
        "weight_decay": _number(group["weight_decay"]),
    }


def _muon(group: Mapping[str, Any]) -> Hyperparameters:
    return {
        "momentum": _number(group["momentum"]),
        "weight_decay": _number(group["weight_decay"]),
        "nesterov": bool(group["nesterov"]),
        "ns_steps": int(group["ns_steps"]),
        "ns_coefficients": tuple(map(_number, group["ns_coefficients"])),
        "eps": _number(group["eps"]),
        "adjust_lr": group["adjust_lr_fn"] or "original",
    }


READERS: dict[str, tuple[type, Callable[[Mapping[str, Any]], Hyperparameters]]] = {
    "SGD": (SGD, _sgd),
    "Adam": (Adam, _adam),
    "AdamW": (AdamW, _adam),
    "Muon": (Muon, _muon),
}
"""How the groups of each optimiser in ``torch.optim`` are read. Options that say only how to
compute the same update (foreach, fused, capturable, differentiable) have no counterpart."""

CHANGES_THE_UPDATE = ("amsgrad", "maximize")
"""Options of torch's optimisers that no optimiser here has."""


def converted_optimizer(given: Any, model: nn.Module) -> Optimizer:
    """An optimiser of ours that trains the model as the given one of torch would.

    Args:
        given: a fresh ``torch.optim.SGD``, ``Adam``, ``AdamW`` or ``Muon`` over the parameters of
            the model; or two in a list, Muon for matrices and Adam or AdamW for everything else.
    """
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    for optimizer in optimizers:
        _refuse_unknown(optimizer)
    _check_parameters(optimizers, model)
    names = {id(p): name for name, p in model.named_parameters()}
    ours: list[Optimizer] = [_converted(optimizer, names) for optimizer in optimizers]
    if len(ours) == 1:
        (only,) = ours
        return only
    matrices = [rule for rule in ours if isinstance(rule, Muon)]
    others = [rule for rule in ours if isinstance(rule, Adam)]
    if len(ours) != 2 or len(matrices) != 1 or len(others) != 1:
        kinds = ", ".join(type(o).__name__ for o in optimizers)
        raise ArgumentError(
            f"optimizer is a list of {kinds}: of several optimisers at once only Muon with one "
            "Adam or AdamW for what is not a matrix is supported. Give one, with parameter groups"
        )
    adam = next(o for o in optimizers if not isinstance(o, torch.optim.Muon))
    taken = [names[id(p)] for group in adam.param_groups for p in group["params"]]
    rule = matrices[0]
    return Muon(**{**vars(rule), "adamw": others[0], "adamw_names": tuple(map(_exactly, taken))})


def _refuse_unknown(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, kind, None) or kind not in READERS:
        raise ArgumentError(
            f"optimizer is a {type(optimizer).__module__}.{kind}; of torch's optimisers "
            f"{', '.join(READERS)} can be differentiated through (not subclasses, which may update "
            "otherwise). Train with one of them, or with ms.SGD, ms.Adam, ms.AdamW or ms.Muon"
        )
    for option in CHANGES_THE_UPDATE:
        if any(group.get(option) for group in optimizer.param_groups):
            raise ArgumentError(
                f"torch.optim.{kind}({option}=True) is not supported: make the optimiser with "
                f"{option}=False"
            )
    if optimizer.state:
        raise ArgumentError(
            f"the torch.optim.{kind} has been stepped already: it holds state of "
            f"{len(optimizer.state)} parameters. A recipe starts afresh: make a new optimiser over "
            "the model as it is now"
        )
    hooks = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    if any(hooks):
        raise ArgumentError(
            f"the torch.optim.{kind} has step hooks, which would not run: remove them"
        )


def _check_parameters(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Every trainable parameter of the model is in one of the optimisers, and no other is."""
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    own = {id(p) for p in model.parameters()}
    foreign = [tuple(p.shape) for p in held if id(p) not in own]
    if foreign:
        raise ArgumentError(
            f"the optimiser holds {len(foreign)} parameters that are not the model's, such as one "
            f"of shape {foreign[0]}: make it from model.parameters() after the model was wrapped, "
            "moved or loaded"
        )
    ids = [id(p) for p in held]
    if len(set(ids)) != len(ids):
        raise ArgumentError("a parameter is in more than one of the optimisers: leave it in one")
    left_out = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in set(ids)]
    if left_out:
        raise ArgumentError(
            f"the optimiser leaves out {len(left_out)} trainable parameters, such as "
            f"{left_out[0]!r}, which torch would never move: freeze them with "
            "requires_grad_(False), or hand them to the optimiser"
        )


def _converted(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Any:
    """One optimiser, its first group as the default and the others by the names they hold."""
    kind, read = READERS[type(optimizer).__name__]
    groups = optimizer.param_groups
    if kind is Muon:
        warnings.warn(
            "torch.optim.Muon iterates in bfloat16; here the iteration is done in the precision of "
            "the parameters, so that it can be differentiated: the trained weights differ from "
            "torch's by that rounding. Give ms.Muon to say that this is meant",
            MetasketchWarning,
            stacklevel=6,  # the line that makes the recipe
        )
    decoupled = {bool(g.get("decoupled_weight_decay", kind is AdamW)) for g in groups}
    if kind in (Adam, AdamW):
        if len(decoupled) > 1:
            raise ArgumentError(
                "the groups of the Adam differ in decoupled_weight_decay: use one kind for all"
            )
        kind = AdamW if decoupled.pop() else Adam
    base, *rest = ({"lr": initial_rate(g), **read(g)} for g in groups)
    found = []
    for group, values in zip(groups[1:], rest, strict=True):
        taken = [_exactly(names[id(p)]) for p in group["params"]]
        found.append(Group(taken, **values))
    return kind(**base, groups=tuple(found))


def _exactly(name: str) -> str:
    """A pattern that matches this name alone."""
    return glob.escape(name)


def _number(value: Any) -> float:
    """A hyperparameter, which torch may keep as a tensor."""
    return float(value)


def initial_rate(group: Mapping[str, Any]) -> float:
    """The learning rate of a group before any scheduler moved it."""
    return _number(group.get("initial_lr", group["lr"]))


def refuse_moved_rates(optimizers: Any) -> None:
    """Refuse an optimiser whose rates a scheduler has set, where that scheduler is not given."""
    given = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for group in (group for optimizer in given for group in optimizer.param_groups):
        now, initial = _number(group["lr"]), initial_rate(group)
        if now != initial:
            raise ArgumentError(
                f"a scheduler has set the optimiser's rate to {now:g}, from {initial:g}: give that "
                "scheduler as schedule=..., or an optimiser without one"
            )


def from_scheduler(scheduler: LRScheduler, every: int = 1) -> Schedule:
    """The schedule that a torch scheduler would produce, as multipliers of the initial rates.

    A copy is stepped; the scheduler itself, and its optimiser, stay as they are. A recipe does this
    by itself for a scheduler that is stepped after every optimiser step.

    Args:
        scheduler: any fresh scheduler of torch, or of a library that derives from it, that does
            not look at a loss.
        every: optimiser steps between two calls of ``scheduler.step()``: 1, or the number of
            batches in an epoch for a scheduler that is stepped once an epoch.

    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([p], lr=0.5), 2, gamma=0.1)
    >>> schedule = from_scheduler(scheduler, every=2)
    >>> [round(schedule(step, 6), 3) for step in range(6)]
    [1.0, 1.0, 1.0, 1.0, 0.1, 0.1]
    """
    if not isinstance(every, int) or every < 1:
        raise ArgumentError(f"every={every!r}: must be a whole number of steps, at least 1")
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise ArgumentError(
            f"schedule is a {type(scheduler).__name__}, whose rates are not known before training: "
            "give a function (step, num_steps) -> multiplier, or a scheduler whose step() takes "
            "no loss"
        )
    parts = getattr(scheduler, "_schedulers", [scheduler])  # a chain has no count of its own
    if steps := max(part.last_epoch for part in parts):
        raise ArgumentError(
            f"the {type(scheduler).__name__} has been stepped {steps} times: a "
            "recipe starts afresh, so make a new optimiser and scheduler"
        )
    return _Stepped.of(scheduler, every)


@dataclass
class _Stepped:
    """Multipliers from a private scheduler, stepped no further than has been asked for."""

    scheduler: LRScheduler
    kind: str
    every: int
    found: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, scheduler: LRScheduler, every: int) -> "_Stepped":
        user = scheduler.optimizer
        stand_in = torch.optim.SGD([torch.zeros(1)], lr=0.0)
        stand_in.defaults = copy.deepcopy(user.defaults)
        stand_in.param_groups = [
            {
                "params": [torch.zeros(1)],
                **{key: copy.deepcopy(v) for key, v in group.items() if key != "params"},
            }
            for group in user.param_groups
        ]
        try:
            # Whatever in the scheduler refers to the user's optimiser refers to the stand-in.
            private = copy.deepcopy(scheduler, {id(user): stand_in})
        except Exception as error:
            raise ArgumentError(
                f"the {type(scheduler).__name__} cannot be copied, so that its rates cannot be "
                f"tabulated ({type(error).__name__}: {error}): give a function "
                "(step, num_steps) -> multiplier instead"
            ) from error
        return cls(private, type(scheduler).__name__, every)

    def __call__(self, step: int, num_steps: int) -> float:
        while len(self.found) <= step // self.every:
            if self.found:
                self._step()
            self.found.append(self._multiplier())
        return self.found[step // self.every]

    def _step(self) -> None:
        others = [_besides_rates(group) for group in self.scheduler.optimizer.param_groups]
        try:
            with warnings.catch_warnings():
                # It misses the optimiser's steps, and some tell of deprecated arguments.
                warnings.simplefilter("ignore")
                self.scheduler.step()
        except Exception as error:
            raise ArgumentError(
                f"the {self.kind} could not make step {len(self.found)} "
                f"({type(error).__name__}: {error}): does it cover the steps of the recipe?"
            ) from error
        for group, before in zip(self.scheduler.optimizer.param_groups, others, strict=True):
            after = _besides_rates(group)
            changed = [key for key in before if before[key] != after.get(key)]
            if changed:
                raise ArgumentError(
                    f"the {self.kind} changes {changed} of the optimiser during training; only "
                    "rates can have a schedule. Turn that off (cycle_momentum=False)"
                )

    def _multiplier(self) -> float:
        """The one factor by which the rates of all groups differ from their initial ones."""
        groups = self.scheduler.optimizer.param_groups
        factors = {}
        for number, group in enumerate(groups):
            rate, initial = _number(group["lr"]), initial_rate(group)
            if initial != 0:
                factors[number] = rate / initial
            elif rate != 0:
                raise ArgumentError(
                    f"the {self.kind} raises the rate of parameter group {number} from 0 to "
                    f"{rate:g}: give the group an initial rate that is not zero"
                )
        first = next(iter(factors.values()), 1.0)
        for number, factor in factors.items():
            # 1e-6, because torch computes rates that it keeps as tensors in float32.
            if not math.isclose(factor, first, rel_tol=1e-6, abs_tol=1e-12):
                raise ArgumentError(
                    f"the {self.kind} treats parameter groups differently: at its step "
                    f"{len(self.found)} it multiplies the rate of group 0 by {first:g} and that of "
                    f"group {number} by {factor:g}. One schedule for all groups is supported"
                )
        return first


def _besides_rates(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group that decide its update, its rate aside."""
    watched = ("betas", "momentum", "weight_decay", "dampening", "eps")
    return {key: copy.copy(group[key]) for key in watched if key in group}
