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
    labels = batch.get("labels")
    if labels is None:
        labels = batch["input_ids"]
        if "attention_mask" in batch:
            labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    return token_losses(model(**inputs).logits, labels)


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of each sequence's next-token losses and the number of tokens in it."""
    targets = labels[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100
    )
    return losses.view(targets.shape).sum(1), (targets != -100).sum(1)
