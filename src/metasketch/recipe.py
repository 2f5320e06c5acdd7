"""What is trained, frozen: everything that decides the final weights, the data weights aside."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from metasketch import conversion, optim, schedules
from metasketch import data as data_module
from metasketch.errors import ArgumentError, DataError, LossError
from metasketch.functional import FunctionalModel, check_model
from metasketch.randomness import derive_seed
from metasketch.state import checksum

Loss = Callable[..., Any]
LossForm = Literal["examples", "scalar"]


@dataclass(frozen=True, eq=False)
class Recipe:
    """A training run as a deterministic function of one weight for each training example.

        θ_{t+1} = update(θ_t, g_t),    g_t = ∇_θ (1/m_t) Σ_{i in batch t} w_i ℓ_i(θ_t)

    The model's weights at this moment are the initial state. They are copied; the model is never
    modified. Frozen parameters (``requires_grad=False``) are shared, not copied.

    Args:
        model: any module; it is trained in training mode.
        loss: ``loss(model, batch)`` giving per-example losses (batch,), or ``(sums, counts)``,
            both (batch,), for means over tokens; or ``loss(model, batch, weights)`` giving the
            scalar itself. A parameter named ``step`` receives the number of the step.
        data: a tensor, a tuple or dict of tensors, or a map-style Dataset.
        optimizer: `SGD`, `Adam`, `AdamW`, `Muon`; or a fresh optimiser of ``torch.optim`` over the
            model's parameters, or ``[torch.optim.Muon, torch.optim.AdamW]``.
        collate: items of a Dataset to a batch; torch's default. It may return `Microbatches`,
            each made by itself.
        schedule: ``(step, num_steps) -> multiplier`` of the learning rate; constant by default.
            Or a torch scheduler that is stepped after each step (see `from_scheduler`).
        batch_size, epochs, drop_last: a seeded order, reshuffled each epoch.
        batches: the explicit order instead: index tensors, one a step.
        seed: data order, dropout, augmentation.
        augment: ``augment(batch, generator) -> batch``, replayed exactly.
        clip_norm: clip the global norm of each step's gradient to this.
        microbatch: examples that go through the model at once; gradients add up within a step.
            BatchNorm sees each microbatch by itself, as torch's gradient accumulation does.
        ids, show: names of examples, and item -> text or image, for reports.
        low_precision: allow trainable bf16/fp16 parameters and autocast, at your own risk.
    """

    model: nn.Module = field(repr=False)
    loss: Loss
    data: Any = field(repr=False)
    optimizer: optim.Optimizer
    collate: data_module.Collate | None = None
    schedule: schedules.Schedule | None = None
    batch_size: int | None = None
    epochs: int | None = None
    drop_last: bool = False
    batches: Sequence[Any] | None = field(default=None, repr=False)
    seed: int = 0
    augment: data_module.Augment | None = None
    clip_norm: float | None = None
    microbatch: int | None = None
    ids: Sequence[str] | None = field(default=None, repr=False)
    show: Callable[[Any], Any] | None = field(default=None, repr=False)
    low_precision: bool = False

    functional: FunctionalModel = field(init=False, repr=False)
    examples: data_module.Examples = field(init=False, repr=False)
    order: data_module.Order = field(init=False, repr=False)
    rates: tuple[float, ...] = field(init=False, repr=False)
    loss_form: LossForm = field(init=False, repr=False)
    loss_takes_step: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_model(self.model, self.low_precision)
        _convert(self)
        _check_numbers(self)
        form, takes_step = _loss_signature(self.loss)
        if form == "scalar" and self.microbatch is not None:
            raise LossError(
                "loss(model, batch, weights) is one scalar for the whole batch, so it cannot be "
                "split: leave microbatch unset"
            )
        examples = data_module.Examples(self.data, self.collate, self.seed)
        if self.ids is not None and len(self.ids) != examples.n:
            raise DataError(f"ids names {len(self.ids)} examples; the data set has {examples.n}")
        order = _order(self, examples.n)
        derived = {
            "functional": FunctionalModel.copy_of(self.model),
            "examples": examples,
            "order": order,
            "rates": schedules.table(self.schedule, len(order)),
            "loss_form": form,
            "loss_takes_step": takes_step,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def num_steps(self) -> int:
        return len(self.order)

    @property
    def num_examples(self) -> int:
        return self.examples.n

    @property
    def device(self) -> torch.device:
        return next(p.device for p in self.model.parameters() if p.requires_grad)

    def facts(self) -> dict[str, int | float | str | None]:
        """What identifies a recipe, as a flat table: a store that differs can say in what.

        It covers data, weights, order, schedule table and hyperparameters, not the source of
        functions; the first step's behaviour is compared besides where a run is loaded.
        """
        params, stats, counts = self.functional.initial()
        order = (derive_seed(*(checksum(b) for b in self.order.batches)), *self.order.epochs)
        return {
            "examples": self.num_examples,
            "steps": self.num_steps,
            "data": self.examples.fingerprint(),
            "parameter names": derive_seed(*sorted(self.functional.layout.names)),
            "parameters": derive_seed(
                *sorted(checksum(v) for v in self.functional.layout.views(params))
            ),
            "statistics": checksum(stats),
            "batch counts": derive_seed(*sorted(f"{k}={v}" for k, v in counts.items())),
            "frozen parameters": derive_seed(*map(checksum, self.functional._fixed.values())),
            "dtype": str(params.dtype),
            "order": derive_seed(*order),
            "schedule": derive_seed(*(value.hex() for value in self.rates)),
            "optimizer": repr(self.optimizer),
            "loss form": f"{self.loss_form}, step={self.loss_takes_step}",
            "augment": self.augment is not None,
            "seed": self.seed,
            "clip_norm": self.clip_norm,
            "microbatch": self.microbatch,
        }


def _convert(recipe: Recipe) -> None:
    """Put optimisers and schedules of ours into the place of torch's."""
    given, schedule = recipe.optimizer, recipe.schedule
    theirs = given if isinstance(given, list | tuple) else [given]
    if isinstance(schedule, LRScheduler):
        if isinstance(theirs[0], torch.optim.Optimizer) and schedule.optimizer not in theirs:
            raise ArgumentError(
                f"the {type(schedule).__name__} drives another optimiser than the one given: make "
                "it from the optimiser of the recipe"
            )
        object.__setattr__(recipe, "schedule", conversion.from_scheduler(schedule))
    if any(isinstance(optimizer, torch.optim.Optimizer) for optimizer in theirs):
        if not isinstance(schedule, LRScheduler):
            conversion.refuse_moved_rates(given)
        converted = conversion.converted_optimizer(given, recipe.model)
        object.__setattr__(recipe, "optimizer", converted)


def _check_numbers(recipe: Recipe) -> None:
    for name in ("batch_size", "epochs", "microbatch", "seed"):
        value = getattr(recipe, name)
        if value is None and name != "seed":
            continue
        low = -math.inf if name == "seed" else 1
        if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
            least = "" if name == "seed" else " of at least 1"
            raise ArgumentError(f"Recipe({name}={value!r}): must be a whole number{least}")
        object.__setattr__(recipe, name, int(value))  # NumPy has integers of its own
    clip = recipe.clip_norm
    if clip is not None and not (isinstance(clip, Real) and 0 < clip < math.inf):
        raise ArgumentError(
            f"Recipe(clip_norm={clip!r}): must be positive and finite, or None for no clipping"
        )
    for name in ("augment", "schedule", "show"):
        value = getattr(recipe, name)
        if value is not None and not callable(value):
            raise ArgumentError(f"Recipe({name}={value!r}): must be a function, or None")
    if not (dataclasses.is_dataclass(recipe.optimizer) and hasattr(recipe.optimizer, "rule")):
        raise ArgumentError(
            f"optimizer is a {type(recipe.optimizer).__name__}; give ms.SGD, ms.Adam, ms.AdamW or "
            "ms.Muon, or one of torch's of these names"
        )


def _order(recipe: Recipe, n: int) -> data_module.Order:
    if recipe.batches is not None:
        if recipe.batch_size is not None or recipe.epochs is not None:
            raise ArgumentError(
                f"Recipe(batches=..., batch_size={recipe.batch_size}, epochs={recipe.epochs}): "
                "give either batches, or batch_size and epochs, not both"
            )
        return data_module.explicit(recipe.batches, n)
    if recipe.batch_size is None or recipe.epochs is None:
        raise ArgumentError(
            f"Recipe(batch_size={recipe.batch_size}, epochs={recipe.epochs}): give both, or the "
            "explicit order as batches"
        )
    if recipe.drop_last and recipe.batch_size > n:
        raise DataError(
            f"batch_size={recipe.batch_size} with drop_last leaves no batch of {n} examples"
        )
    return data_module.shuffled(n, recipe.batch_size, recipe.epochs, recipe.drop_last, recipe.seed)


def _loss_signature(loss: Any) -> tuple[LossForm, bool]:
    """Which form a loss has, and whether it takes the step's number, from its signature."""
    if not callable(loss):
        raise LossError(f"loss is a {type(loss).__name__}; it must be a function")
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return "examples", False
    positional = [
        p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "step"
    ]
    required = [p for p in positional if p.default is p.empty]
    takes_step = "step" in parameters
    if len(positional) < 2 or len(required) > 3:
        raise LossError(
            f"loss takes {len(positional)} arguments ({', '.join(p.name for p in positional)}); "
            "it must be loss(model, batch), or loss(model, batch, weights) for one scalar"
        )
    weighted = len(required) == 3 or any(p.name == "weights" for p in positional[2:3])
    return ("scalar" if weighted else "examples"), takes_step


def weights_of(recipe: Recipe, weights: Any) -> Tensor:
    """Data weights (N,) of a run, checked; ones by default."""
    like, _, _ = recipe.functional.initial()
    if weights is None:
        return like.new_ones(recipe.num_examples)
    try:
        w = torch.as_tensor(weights).detach().to(like)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"weights is not a vector of numbers: {error}") from None
    if w.shape != (recipe.num_examples,):
        raise ArgumentError(
            f"weights has shape {tuple(w.shape)}; one weight for each of the "
            f"{recipe.num_examples} training examples is needed"
        )
    if not bool(torch.isfinite(w).all()) or bool((w < 0).any()):
        bad = int(torch.nonzero(~torch.isfinite(w) | (w < 0))[0])
        raise ArgumentError(
            f"weights[{bad}] = {float(w[bad])}: weights must be finite and not negative "
            "(1 = present, 0 = removed)"
        )
    return w.clone()
