"""Named tensors laid end to end in one vector, and back.

The state of a run is kept flat: one vector of parameters, one of running statistics, one for each
slot of the optimiser. An elementwise update, a digest, a copy to disk and the algebra of tangents
are then one operation each, whatever the number of tensors in the model. Names come back at the
boundary. Blocks of vectors have a leading dimension: ``(b, P)``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from metasketch.errors import ArgumentError


@dataclass(frozen=True)
class Layout:
    """Which names stand where in a flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        return cls(tuple(tensors), tuple(t.shape for t in tensors.values()))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each tensor, and the end of the last one."""
        return (0, *accumulate(self.sizes))

    @property
    def size(self) -> int:
        return self.offsets[-1]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors inside ``flat`` (..., P), each (..., *shape), sharing its memory."""
        lead = flat.shape[:-1]
        return [
            flat[..., start : start + size].view(*lead, *shape)
            for start, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=False)
        ]

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """The named tensors inside ``flat``, as views."""
        return dict(zip(self.names, self.views(flat), strict=True))

    def pack(
        self, tensors: Sequence[Tensor], lead: tuple[int, ...] = (), into: Tensor | None = None
    ) -> Tensor:
        """One vector (*lead, P) from tensors in this layout's order, new or in given memory."""
        return torch.cat([tensor.reshape(*lead, -1) for tensor in tensors], dim=-1, out=into)

    def check_block(self, tensors: Mapping[str, Tensor], b: int, what: str) -> list[str]:
        """The names of this layout that are given, each as (b, *shape)."""
        found = [
            (n, shape) for n, shape in zip(self.names, self.shapes, strict=True) if n in tensors
        ]
        for name, shape in found:
            if tensors[name].shape != (b, *shape):
                raise ArgumentError(
                    f"{what}[{name!r}] has shape {tuple(tensors[name].shape)}; a block of {b} rows "
                    f"needs {(b, *shape)}"
                )
        return [name for name, _ in found]

    def block(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """A new block (b, P) from some of the names, each (b, *shape); absent ones are zero."""
        b = len(next(iter(tensors.values())))
        block = like.new_zeros(b, self.size)
        for name, view in zip(self.names, self.views(block), strict=True):
            if name in tensors:
                view.copy_(tensors[name])
        return block
