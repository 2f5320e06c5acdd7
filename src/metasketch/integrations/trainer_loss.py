"""The loss of a Hugging Face Trainer, example by example.

A model of transformers returns one number for a microbatch. Here its examples are told apart: the
loss is computed anew from the logits, and compared with the model's own number, so that what cannot
be told apart is refused and nothing is taken on faith from a class's name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metasketch.data import Microbatches
from metasketch.errors import LossError
from metasketch.losses import at_least_float32, token_losses

Sums = tuple[Tensor, Tensor]
"""Of each example, the sum of what it loses, and the number of things that it loses it on."""


def _next_tokens(logits: Tensor, labels: Tensor) -> Sums | None:
    return token_losses(logits, labels) if logits.dim() == 3 and labels.dim() == 2 else None


def _cross_entropy(logits: Tensor, labels: Tensor) -> Sums | None:
    """Of classes, of sequences or of their tokens."""
    if logits.dim() != labels.dim() + 1 or labels.is_floating_point():
        return None
    logits = at_least_float32(logits).flatten(0, -2)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=-100)
    counted = labels != -100
    return losses.view(len(labels), -1).sum(1), counted.view(len(labels), -1).sum(1)


def _squared_error(logits: Tensor, labels: Tensor) -> Sums | None:
    if not labels.is_floating_point():
        return None
    logits = logits.squeeze(-1) if logits.dim() > labels.dim() else logits
    if logits.shape != labels.shape:
        return None
    errors = (logits - labels).square().view(len(labels), -1)
    return errors.mean(1), torch.ones(len(labels), device=labels.device)


def _several_labels(logits: Tensor, labels: Tensor) -> Sums | None:
    if not labels.is_floating_point() or logits.shape != labels.shape:
        return None
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.view(len(labels), -1).mean(1), torch.ones(len(labels), device=labels.device)


KINDS: dict[str, Callable[[Tensor, Tensor], Sums | None]] = {
    "next tokens": _next_tokens,
    "cross-entropy": _cross_entropy,
    "squared error": _squared_error,
    "several labels": _several_labels,
}
"""Losses of examples from logits and labels; None where the shapes do not fit."""


@dataclass(frozen=True, eq=False)
class TrainerLoss:
    """(sums, counts) of one microbatch whose total over a step is what the Trainer minimises.

    The losses are divided before the backward pass, as the Trainer divides them: under a base in
    bfloat16 that decides how gradients are rounded. So the counts of a step add up to one.

    Attributes:
        kind: of `KINDS`.
        over_step: the mean is over everything that the step counts; otherwise it is over each
            microbatch, and the microbatches are averaged, or added up.
        added: they are added up.
        generators: states of torch's generator before each microbatch of each step, where the
            model draws from it.
    """

    kind: str
    over_step: bool
    added: bool
    generators: tuple[tuple[Tensor, ...], ...] | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], step: int) -> Sums:
        if self.generators is not None:
            torch.set_rng_state(self.generators[step][batch["number"]])
        sums, counts = self.told_apart(model, batch["inputs"])
        if self.over_step:
            divisor = batch["items"]
        else:
            divisor = counts.sum() if self.added else counts.sum() * batch["parts"]
        ones = torch.zeros_like(sums)
        if batch["number"] == 0:
            ones[0] = 1.0
        return sums / divisor, ones

    def microbatches(self, parts: Sequence[Mapping[str, Any]]) -> Microbatches:
        """The batch of a step, from what the model takes of each microbatch."""
        shifts = 1 if self.kind == "next tokens" else 0
        labels = [part["labels"] for part in parts]
        items = sum(int((x[:, shifts:] if shifts else x).ne(-100).sum()) for x in labels)
        return Microbatches(
            {"inputs": dict(part), "number": i, "parts": len(parts), "items": items}
            for i, part in enumerate(parts)
        )

    def told_apart(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Sums:
        labels = inputs["labels"]
        # Without labels a model does not compute a loss of its own; encoder-decoders need them.
        config = getattr(model, "config", None)
        needed = getattr(config, "is_encoder_decoder", False)
        given = inputs if needed else {k: v for k, v in inputs.items() if k != "labels"}
        found = KINDS[self.kind](model(**given).logits, labels)
        assert found is not None
        return found


def find_kind(
    own_loss: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    logits: Tensor,
    inputs: Mapping[str, Tensor],
    name: str,
) -> tuple[str, bool]:
    """Which kind the loss of a model is, and whether it is divided by the count it is given.

    Args:
        own_loss: the scalar that the Trainer makes of a microbatch and a number of items.
        logits: of the microbatch.
        name: of the model, for the message.
    """
    labels = inputs["labels"]
    items = torch.tensor(2.0 * len(labels), device=labels.device)
    loss, halved = (float(own_loss(inputs, n)) for n in (items, 2 * items))
    if not math.isfinite(loss) or loss == 0:
        raise LossError(
            f"the loss of {name} on the first examples is {loss}, by which its kind cannot be "
            "told: put examples first of which something counts"
        )
    tried = {}
    for kind, tell_apart in KINDS.items():
        found = tell_apart(logits, labels)
        if found is None:
            continue
        sums, counts = found
        mean, total = float(sums.sum() / counts.sum()), float(sums.sum())
        if _close(loss, total / float(items)) and _close(halved, total / float(2 * items)):
            return kind, True
        if _close(loss, mean) and _close(halved, mean):
            return kind, False
        tried[kind] = mean
    compared = ", ".join(f"{kind} {mean:.6g}" for kind, mean in tried.items()) or "none fits"
    raise LossError(
        f"the loss of {name} cannot be told apart by examples: it is {loss:.6g}, and what can be "
        f"computed from logits of shape {tuple(logits.shape)} and labels of shape "
        f"{tuple(labels.shape)} is another number ({compared}). It may have further terms, such as "
        "a router's: turn them off, or write the loss out in a Recipe"
    )


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-5 * max(abs(a), abs(b))
