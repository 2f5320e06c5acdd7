"""The same training in float64: what single precision is compared with."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from metasketch.data import map_tensors
from metasketch.recipe import Recipe


def doubled(recipe: Recipe) -> Recipe:
    """A recipe with the model, and every batch, in float64.

    Order, schedule and augmentation are the same. Random masks may not be: torch draws others in
    another precision.
    """
    model = recipe.functional.materialize(*recipe.functional.initial()).double()

    @functools.wraps(recipe.loss)  # whose parameters say which form it has
    def loss(model: nn.Module, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return recipe.loss(model, map_tensors(_double, batch), *args, **kwargs)

    return replace(recipe, model=model, loss=loss)


def _double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
