"""The state of a training run between two steps, and tangents and cotangents of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from metasketch.randomness import generator


@dataclass(frozen=True)
class State:
    """Everything that one step hands to the next: (parameters, statistics, optimiser slots).

    The same class holds a block of b tangents or cotangents, with a leading dimension b.

    Attributes:
        params: trainable parameters, flat, (P,) or (b, P).
        stats: BatchNorm running statistics, flat, (R,) or (b, R).
        slots: the optimiser's memory by name (momentum, second moments), each (P,) or (b, P).
        counts: BatchNorm's numbers of batches seen: integers, hence without a derivative.
    """

    params: Tensor
    stats: Tensor
    slots: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under the names that a store gives them."""
        slots = {f"slots/{name}": tensor for name, tensor in self.slots.items()}
        return {"params": self.params, "stats": self.stats, **slots}

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def zeros(self, b: int) -> "State":
        """A block of b zero tangents (or cotangents) of this state."""
        return State(
            self.params.new_zeros(b, *self.params.shape),
            self.stats.new_zeros(b, *self.stats.shape),
            {name: slot.new_zeros(b, *slot.shape) for name, slot in self.slots.items()},
        )


_KEYS = 1 << 16


@lru_cache(maxsize=8)
def _keys(device: torch.device, length: int, salt: str) -> Tensor:
    """Fixed odd 64-bit multipliers."""
    keys = torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator("digest", salt))
    return (keys | 1).to(device)


def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of the bits of a tensor, computed where the tensor lies.

    A multilinear hash modulo 2^64 with fixed keys: every bit and its place count, and it costs
    one pass over memory, so that every step of a training run can afford it.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8
    head, tail = raw[: 8 * whole], raw[8 * whole :]
    words = head.view(torch.int64) if head.data_ptr() % 8 == 0 else head.clone().view(torch.int64)
    rows, rest = divmod(words.numel(), _KEYS)
    keys = _keys(tensor.device, _KEYS, "columns")
    total = (words[rows * _KEYS :] * keys[:rest]).sum() * 3
    if rows:
        block = words[: rows * _KEYS].view(rows, _KEYS)
        # Integer matrix products exist on the CPU alone, where they need no intermediate.
        columns = (block * keys).sum(dim=1) if block.is_cuda else torch.mv(block, keys)
        total = total + (columns * _keys(tensor.device, rows, "rows")).sum()
    if tail.numel():
        total = total + (tail.to(torch.int64) * keys[: tail.numel()]).sum() * 5
    return int(total + 7 * raw.numel()) & (2**64 - 1)


def digest(state: State) -> int:
    """What identifies a state: its parameters and statistics, bit for bit.

    The optimiser's slots are left out: a wrong one shows in the next step's parameters.
    """
    return (checksum(state.params) * 31 + checksum(state.stats)) & (2**64 - 1)
