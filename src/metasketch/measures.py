"""Ready measurements of a trained model, one number a query: ``measure(model, batch) -> (batch,)``.

Each says of itself which values are good (``better``), which decides what a helpful example is.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metasketch.errors import ArgumentError
from metasketch.losses import (
    at_least_float32,
    cross_entropy,
    hf_causal_lm,
    hf_cross_entropy,
    labels_of,
)

__all__ = [
    "cross_entropy",
    "hf_completion_nll",
    "hf_cross_entropy",
    "hf_margin",
    "hf_next_token_nll",
    "margin",
    "next_token_nll",
]


def margin(model: nn.Module, batch: Any) -> Tensor:
    """Log-odds of the right class of ``(x, y)``: its logit less the log-sum-exp of the others.

        margin = logit_y - log Σ_{c ≠ y} exp(logit_c) = log(p_y / (1 - p_y))

    Positive exactly where the model gives its class more than one half. Higher is better.
    """
    x, y = batch
    return log_odds(model(x), y)


margin.better = "higher"  # type: ignore[attr-defined]


def log_odds(logits: Tensor, y: Tensor) -> Tensor:
    """log(p_y / (1 - p_y)) from logits (batch, classes)."""
    own = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, y[..., None], True)
    others = logits.masked_fill(own, -torch.inf).logsumexp(-1)
    return torch.as_tensor(logits.gather(-1, y[..., None])[..., 0] - others)


def hf_margin(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The same of a Hugging Face classifier, whose batch has the class as ``labels``."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return log_odds(at_least_float32(model(**inputs).logits), batch["labels"])


hf_margin.better = "higher"  # type: ignore[attr-defined]


def hf_completion_nll(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Negative log-likelihood of a completion under a Hugging Face causal model: (batch,).

    Args:
        batch: ``input_ids``, ``attention_mask`` (optional) and ``labels``, -100 at the prompt and
            at padding; without labels every token but the first is asked about.
    """
    sums, _ = hf_causal_lm(model, batch)
    return sums


def hf_next_token_nll(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Negative log-likelihood of the last token of each text, given those before it: (batch,).

    Args:
        batch: ``input_ids`` and, where texts are padded (on either side), ``attention_mask``.
    """
    labels = labels_of({key: value for key, value in batch.items() if key != "labels"})
    places = torch.arange(labels.shape[1], device=labels.device)
    last = torch.where(labels != -100, places, -1).amax(dim=1, keepdim=True)
    return hf_completion_nll(model, {**batch, "labels": labels.masked_fill(places != last, -100)})


def next_token_nll(model: nn.Module, batch: Any) -> Tensor:
    """Negative log-likelihood of the last token of each sequence, given those before it.

    Args:
        batch: sequences of tokens (batch, length + 1), by themselves, in a tuple, or under
            ``input_ids``; the last token is the one that is asked about.
        model: gives logits (batch, length, vocabulary), or those of the last position alone.
    """
    tokens = batch["input_ids"] if isinstance(batch, Mapping) else batch
    tokens = tokens[0] if isinstance(tokens, tuple | list) else tokens
    if tokens.dim() != 2 or tokens.shape[1] < 2:
        raise ArgumentError(
            f"next_token_nll takes sequences (batch, length + 1) of at least two tokens, the last "
            f"of which is asked about; the batch has shape {tuple(tokens.shape)}"
        )
    logits = model(tokens[:, :-1])
    logits = logits[:, -1] if logits.dim() == 3 else logits
    return F.cross_entropy(logits, tokens[:, -1], reduction="none")
