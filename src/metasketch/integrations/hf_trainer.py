"""A recipe from a Hugging Face Trainer: the training that ``trainer.train()`` would do now.

Order, optimiser and schedule come from the Trainer's own methods, called on a shallow copy whose
data set is the numbers 0 to n - 1; the loss is told apart by examples and compared with the
Trainer's own. The Trainer, its model and the ambient generators stay as they are.
"""

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from metasketch.data import Microbatches, map_tensors
from metasketch.environment import computing
from metasketch.errors import ArgumentError, DataError, ModelError, RecipeError
from metasketch.functional import FunctionalModel
from metasketch.integrations.trainer_loss import TrainerLoss, find_kind
from metasketch.integrations.trainer_refusals import reasons_against
from metasketch.recipe import Recipe

Dropout = Literal["replay", "seeded"]

Step = list[list[int]]
"""The examples of each microbatch of a step."""


def from_trainer(
    trainer: Any,
    dropout: Dropout = "replay",
    ids: Sequence[str] | None = None,
    show: Callable[[Any], Any] | None = None,
) -> Recipe:
    """The recipe of what ``trainer.train()`` would do if it were called now.

    Model, data, collator, order, batch size, accumulation, loss, optimiser, parameter groups,
    schedule and clipping are the Trainer's; what could not be the same training is refused, with
    all reasons. The two trainings end in the same weights, up to rounding: that of float32 as a
    rule; that of bfloat16 over a base in bfloat16, unless its attention is "eager" (torch's fused
    attention has no second derivative, and rounds otherwise).

    Args:
        trainer: a ``transformers.Trainer`` that has not trained yet.
        dropout: where the model draws random numbers, "replay" takes those that the Trainer would
            draw, from torch's generator as it stands now; "seeded" draws by the recipe's seed: a
            training that is the same in distribution.
        ids, show: as in `Recipe`.

    Returns:
        The recipe. Cost: three forward passes of a microbatch; where dropout is replayed, the
        forward passes of the whole training besides, to see where in its sequence of random
        numbers each microbatch starts.
    """
    _check_arguments(trainer, dropout)
    if reasons := reasons_against(trainer):
        raise RecipeError(
            "this Trainer's training cannot be replayed:\n"
            + "\n".join(f"  - {reason}" for reason in reasons)
        )
    device = next(p.device for p in trainer.model.parameters())
    with computing(device, torch.get_num_threads()):
        start = torch.get_rng_state()
        plan = _Plan.of(trainer)
        loss, draws = plan.loss()
        replays = draws and dropout == "replay"
        if replays:
            plan.check_replayable()
        torch.set_rng_state(start)  # as it stands when training begins
        steps, generators = [], []
        for step in plan.steps():
            steps.append(step)
            if replays:
                generators.append(plan.generators(loss, step))
    if replays:
        loss = dataclasses.replace(loss, generators=tuple(generators))
    return plan.recipe(loss, steps, ids, show)


def _check_arguments(trainer: Any, dropout: str) -> None:
    try:
        from transformers import Trainer
    except ImportError as error:
        raise ArgumentError(
            "from_trainer needs transformers: pip install 'metasketch[hf]'"
        ) from error
    if not isinstance(trainer, Trainer):
        raise ArgumentError(
            f"trainer is a {type(trainer).__name__}; it must be a transformers.Trainer"
        )
    if dropout not in get_args(Dropout):
        raise ArgumentError(f"dropout={dropout!r}: give one of {list(get_args(Dropout))}")


@dataclass(frozen=True)
class _Plan:
    """What a Trainer would train on, and how.

    Attributes:
        trainer: the user's, only read.
        numbers: a copy of it over the numbers of the examples.
        data, collate: what its data loader reads, without columns that the model does not take.
        functional: a copy of its model, in training mode.
        size: examples of a microbatch; the last one of an epoch may have fewer.
        accumulated: microbatches of a step; the last one of an epoch may have fewer.
        batches_an_epoch: microbatches.
        num_steps: T.
    """

    trainer: Any
    numbers: Any
    data: Any
    collate: Callable[[list[Any]], Mapping[str, Any]]
    functional: FunctionalModel
    size: int
    accumulated: int
    batches_an_epoch: int
    num_steps: int

    @classmethod
    def of(cls, trainer: Any) -> "_Plan":
        args = trainer.args
        loader = trainer.get_train_dataloader()
        accumulated, batches = args.gradient_accumulation_steps, len(loader)
        num_steps = args.max_steps
        if num_steps <= 0:
            num_steps = math.ceil(args.num_train_epochs * math.ceil(batches / accumulated))
        return cls(
            trainer=trainer,
            numbers=_over_numbers(trainer, loader.dataset),
            data=loader.dataset,
            collate=loader.collate_fn,
            functional=FunctionalModel.copy_of(trainer.model),
            size=args.train_batch_size,
            accumulated=accumulated,
            batches_an_epoch=batches,
            num_steps=num_steps,
        )

    @property
    def device(self) -> torch.device:
        params, _, _ = self.functional.initial()
        return params.device

    def steps(self) -> Iterator[Step]:
        """The examples of each step, read from a data loader as ``Trainer._run_epoch`` reads it.

        What it draws from the ambient generator, and when, is what training draws.
        """
        loader, done = self.numbers.get_train_dataloader(), 0
        for epoch in range(self.num_steps):
            loader.set_epoch(epoch)
            batches = iter(loader)
            for first in range(0, self.batches_an_epoch, self.accumulated):
                if done == self.num_steps:
                    return
                num = min(self.accumulated, self.batches_an_epoch - first)
                yield [next(batches) for _ in range(num)]
                done += 1

    def inputs(self, numbers: Sequence[int]) -> dict[str, Any]:
        """One microbatch, as the Trainer gives it to its model."""
        before = _ambient()
        batch = dict(self.collate([self.data[i] for i in numbers]))
        if _ambient() != before:
            raise DataError(
                f"reading examples {list(numbers)[:8]}, or collating them, draws random numbers "
                "(as masking for a masked language model does): the Trainer draws them in an order "
                "that is not replayed. Draw them once, beforehand, and train on the result"
            )
        if not isinstance(batch.get("labels"), Tensor):
            raise DataError(
                "the Trainer's batches have no 'labels', of which the losses of examples are made: "
                f"they have {sorted(batch)}"
            )
        return {**map_tensors(lambda t: t.to(self.device), batch)}

    def _model(self) -> Any:
        """The copy of the model at its initial weights, while a block runs."""
        params, stats, counts = self.functional.initial()
        views = self.functional.layout.views(params), self.functional.stats_layout.views(stats)
        return self.functional.bound(*views, counts, differentiable=False)

    @torch.no_grad()
    def loss(self) -> tuple[TrainerLoss, bool]:
        """The loss, found on one microbatch, and whether the model draws random numbers in it."""
        inputs = self.inputs(range(min(self.size, len(self.data))))
        start, before = torch.get_rng_state(), _ambient()

        def own_loss(inputs: Mapping[str, Tensor], num_items: Tensor) -> Tensor:
            torch.set_rng_state(start)
            with self._model() as model:
                loss: Tensor = self.trainer.compute_loss(
                    model, dict(inputs), num_items_in_batch=num_items
                )
            return loss

        with self._model() as model:
            output = model(**inputs)
            name = type(self.trainer.model).__name__
        draws = _ambient() != before or self._draws_on_gpu(inputs)
        if not isinstance(getattr(output, "logits", None), Tensor):
            raise ModelError(
                f"{name} returns no logits, of which the losses of examples are made: write the "
                "training as a Recipe, with a loss of your own"
            )
        kind, over_step = find_kind(own_loss, output.logits, inputs, name)
        # Where the Trainer has counted items it takes the loss to be divided by them already, and
        # adds microbatches up, whether or not the model did divide.
        added = bool(self.trainer.model_accepts_loss_kwargs) and not over_step
        return TrainerLoss(kind, over_step, added), draws

    def _draws_on_gpu(self, inputs: Mapping[str, Any]) -> bool:
        if self.device.type != "cuda":
            return False
        before = torch.cuda.get_rng_state(self.device)
        with self._model() as model:
            model(**inputs)
        return not torch.equal(torch.cuda.get_rng_state(self.device), before)

    def check_replayable(self) -> None:
        """Refuse where the Trainer's random numbers are not those of its model alone."""
        args = self.trainer.args
        evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
        if self.device.type != "cpu":
            why = "on a GPU the kernels decide what is drawn"
        elif evaluates or args.eval_on_start:
            why = "evaluations in between draw too: set eval_strategy='no'"
        else:
            return
        raise ModelError(
            f"the model draws random numbers (dropout), which cannot be replayed as the Trainer "
            f"would draw them: {why}. Set dropout to 0, or give dropout='seeded' for a training "
            "that is the same in distribution"
        )

    @torch.no_grad()
    def generators(self, loss: TrainerLoss, step: Step) -> tuple[Tensor, ...]:
        """States of torch's generator before each microbatch of a step; it is left after them."""
        found = []
        for numbers in step:
            inputs = self.inputs(numbers)
            others = _ambient()[1:]
            found.append(torch.get_rng_state())
            with self._model() as model:
                loss.told_apart(model, inputs)
            if _ambient()[1:] != others:
                raise ModelError(
                    "the model draws from Python's or NumPy's generator, which is not replayed: "
                    "turn that off, or give dropout='seeded'"
                )
        return tuple(found)

    def recipe(
        self,
        loss: TrainerLoss,
        steps: Sequence[Step],
        ids: Sequence[str] | None,
        show: Callable[[Any], Any] | None,
    ) -> Recipe:
        collate, size = self.collate, self.size

        def collate_each(items: list[Any]) -> Microbatches:
            parts = [items[i : i + size] for i in range(0, len(items), size)]
            return loss.microbatches([collate(part) for part in parts])

        optimizer, scheduler = _optimizer_and_scheduler(self.numbers, self.num_steps)
        args = self.trainer.args
        return Recipe(
            model=self.trainer.model,
            loss=loss,
            data=self.data,
            collate=collate_each,
            optimizer=optimizer,
            schedule=scheduler,
            batches=[torch.tensor([i for part in step for i in part]) for step in steps],
            microbatch=size,
            clip_norm=args.max_grad_norm or None,
            seed=args.seed,
            ids=ids,
            show=show,
        )


class _Numbers(torch.utils.data.Dataset[int]):
    """The data set whose examples are their own numbers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i


def _over_numbers(trainer: Any, data: Any) -> Any:
    """A shallow copy of a Trainer whose data loader gives lists of numbers of examples."""
    numbers = copy.copy(trainer)
    numbers.train_dataset, numbers.data_collator = _Numbers(len(data)), list
    numbers._get_train_sampler = lambda dataset=None: trainer._get_train_sampler(data)
    numbers.args = copy.copy(trainer.args)
    numbers.args.dataloader_num_workers, numbers.args.dataloader_prefetch_factor = 0, None
    numbers.args.dataloader_persistent_workers = False
    return numbers


def _optimizer_and_scheduler(numbers: Any, num_steps: int) -> tuple[Any, Any]:
    """Those that training would make, or the user's, which stay as they are."""
    if numbers._created_lr_scheduler:
        numbers.lr_scheduler = None
    numbers.optimizer = getattr(numbers.optimizer, "optimizer", numbers.optimizer)
    if numbers.optimizer is not None and numbers.lr_scheduler is None:
        numbers.optimizer = _same_parameters(numbers.optimizer)  # a new scheduler would move it
    numbers.create_optimizer()
    numbers.create_scheduler(num_training_steps=num_steps)
    return numbers.optimizer, numbers.lr_scheduler


def _same_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimiser over the same parameters."""
    memo: dict[int, nn.Parameter] = {
        id(p): p for group in optimizer.param_groups for p in group["params"]
    }
    return copy.deepcopy(optimizer, memo)


def _ambient() -> tuple[Any, ...]:
    """The state of the generators that models and data sets draw from, to be compared."""
    name, keys, *rest = np.random.get_state()
    numpy = (name, np.asarray(keys).tobytes(), *rest)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy
