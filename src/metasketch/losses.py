"""Ready training losses: per example, or as (sums, counts) where the mean is over tokens."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each example of a batch ``(x, y)``: (batch,).

    Outputs with further dimensions (segmentation) are averaged over them.
    """
    x, y = batch
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def causal_lm(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Next-token losses of sequences of tokens (batch, length), as (sums, counts).

    ``model(tokens)`` gives logits (batch, length, vocabulary). The step's loss is the mean over
    the batch's tokens.
    """
    tokens = batch["input_ids"] if isinstance(batch, Mapping) else batch
    tokens = tokens[0] if isinstance(tokens, tuple | list) else tokens
    return token_losses(model(tokens), tokens)


def hf_causal_lm(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Next-token losses of a Hugging Face causal model, as (sums, counts).

    Args:
        batch: ``input_ids``, ``attention_mask`` (optional) and ``labels`` (optional, -100 where a
            token does not count; without them every unmasked token counts).
    """
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return token_losses(model(**inputs).logits, labels_of(batch))


def labels_of(batch: Mapping[str, Tensor]) -> Tensor:
    """The labels of a batch of texts, or where it has none, its tokens that are not padding."""
    if "labels" in batch:
        return batch["labels"]
    if "attention_mask" in batch:
        return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch["input_ids"]


def hf_cross_entropy(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of each example of a Hugging Face classifier: (batch,).

    Args:
        batch: what the model takes, with its classes as ``labels``.
    """
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return F.cross_entropy(
        at_least_float32(model(**inputs).logits), batch["labels"], reduction="none"
    )


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of each sequence's next-token losses and the number of tokens in it."""
    targets = labels[:, 1:]
    logits = at_least_float32(logits[:, :-1].flatten(0, 1))
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=-100)
    return losses.view(targets.shape).sum(1), (targets != -100).sum(1)


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits of a model in half precision as transformers takes their loss: in float32."""
    return logits.float() if logits.element_size() < 4 else logits
