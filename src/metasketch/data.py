"""Training data: which examples each step sees, and the batch that they make.

A batch depends on (seed, step) alone, so every sweep sees what training saw. Items of a Dataset
are read under a seed of (seed, epoch, example), so that ordinary random transforms replay.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from metasketch.errors import DataError
from metasketch.randomness import derive_seed, generator, seeded
from metasketch.state import checksum

Batch = Any
Collate = Callable[[list[Any]], Batch]
Augment = Callable[[Batch, torch.Generator], Batch]


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """Apply a function to every tensor of nested tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, item) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, item) for item in batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    return batch


def tensors_of(batch: Batch) -> list[Tensor]:
    """Every tensor of a batch, in a fixed order."""
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def batch_digest(batch: Batch) -> int:
    """A checksum of everything in a batch that a loss could read as a tensor."""
    return derive_seed(*(checksum(t) for t in tensors_of(batch)))


@dataclass(frozen=True)
class Order:
    """Which examples each step sees.

    Attributes:
        batches: the examples of each step, int64 on the CPU.
        epochs: the epoch of each step, under which Dataset items are seeded (the step itself
            where an explicit order knows no epochs).
    """

    batches: tuple[Tensor, ...]
    epochs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.batches)


def shuffled(n: int, batch_size: int, epochs: int, drop_last: bool, seed: int) -> Order:
    """A fresh permutation of the n examples each epoch, cut into batches."""
    batches: list[Tensor] = []
    labels: list[int] = []
    for epoch in range(epochs):
        parts = torch.randperm(n, generator=generator(seed, "order", epoch)).split(batch_size)
        if drop_last and len(parts[-1]) < batch_size:
            parts = parts[:-1]
        batches += parts
        labels += [epoch] * len(parts)
    return Order(tuple(batches), tuple(labels))


def explicit(batches: Sequence[Any], n: int) -> Order:
    """An order given step by step, checked against the number of examples."""
    checked = []
    for step, given in enumerate(batches):
        indices = torch.as_tensor(given).cpu()
        if indices.dim() != 1 or indices.numel() == 0 or indices.is_floating_point():
            raise DataError(
                f"batches[{step}] must be a non-empty vector of integer indices; it is "
                f"{indices.dtype} of shape {tuple(indices.shape)}"
            )
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= n:
            raise DataError(
                f"batches[{step}] names example {low if low < 0 else high}; the data set has {n} "
                f"examples, 0 to {n - 1}"
            )
        checked.append(indices.to(torch.int64))
    if not checked:
        raise DataError("batches is empty: a run needs at least one step")
    return Order(tuple(checked), tuple(range(len(checked))))


class Examples:
    """The n examples, by index: rows of tensors held in memory, or items of a Dataset."""

    def __init__(self, data: Any, collate: Collate | None, seed: int) -> None:
        if isinstance(data, TensorDataset):
            data = data.tensors
        if isinstance(data, np.ndarray):
            data = torch.as_tensor(data)
        if isinstance(data, tuple):
            data = tuple(torch.as_tensor(d) if isinstance(d, np.ndarray) else d for d in data)
        self.data, self.seed = data, seed
        self.in_memory = collate is None and _is_tensors(data)
        self.collate: Collate = collate or default_collate
        self.n = _length(data, self.in_memory)
        if self.n == 0:
            raise DataError("the data set is empty: there is nothing to train on")
        self._versions = self._version()

    def _version(self) -> list[int]:
        return [t._version for t in tensors_of(self.data)] if self.in_memory else []

    def check_unchanged(self) -> None:
        """Refuse data that was changed in place since it was handed over."""
        if self._version() != self._versions:
            raise DataError(
                "the training data was changed in place after the recipe was made; make the "
                "recipe again, or hand it a copy"
            )

    def fetch(self, indices: Tensor, epoch: int) -> Batch:
        """The batch of some examples as they look in some epoch."""
        if self.in_memory:
            return map_tensors(lambda t: t[indices.to(t.device)], self.data)
        return self.collate([self._item(int(i), epoch) for i in indices])

    def _item(self, index: int, epoch: int) -> Any:
        with seeded(torch.device("cpu"), self.seed, "item", epoch, index):
            try:
                return self.data[index]
            except Exception as error:
                raise DataError(
                    f"reading example {index} of the data set failed: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def check_repeatable(self, indices: Tensor, epoch: int) -> None:
        """Read some items twice and refuse a Dataset whose items differ between reads."""
        if self.in_memory:
            return
        for i in indices.tolist():
            one = [self.collate([self._item(i, epoch)]) for _ in range(2)]
            if batch_digest(one[0]) != batch_digest(one[1]):
                raise DataError(
                    f"example {i} of the data set differs between two reads under the same seed. "
                    "Draw from torch's, Python's or NumPy's global generator in its transforms, "
                    "instead of from the clock, a generator of its own, or a counter"
                )

    def fingerprint(self) -> int:
        """What identifies the data: every bit of tensors, the type and length of a Dataset."""
        if self.in_memory:
            return batch_digest(self.data)
        return derive_seed(type(self.data).__qualname__, self.n)


def _is_tensors(data: Any) -> bool:
    if isinstance(data, dict):
        data = tuple(data.values())
    if isinstance(data, tuple):
        return len(data) > 0 and all(isinstance(d, Tensor) for d in data)
    return isinstance(data, Tensor)


def _length(data: Any, in_memory: bool) -> int:
    if in_memory:
        tensors = tensors_of(data)
        if any(t.dim() == 0 for t in tensors):
            raise DataError("a tensor of the data has no dimension: the first one counts examples")
        lengths = {len(t) for t in tensors}
        if len(lengths) != 1:
            raise DataError(
                f"the tensors of the data have different lengths {sorted(lengths)}: the first "
                "dimension of each counts the same examples"
            )
        return lengths.pop()
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise DataError(
            f"data is a {type(data).__name__}: give a tensor, a tuple or dict of tensors, or a "
            "map-style Dataset (with __len__ and __getitem__)"
        )
    return len(data)


@dataclass(frozen=True)
class Batches:
    """The batch of every step, on the device of the run."""

    examples: Examples
    order: Order
    augment: Augment | None
    seed: int
    device: torch.device

    @property
    def checked(self) -> bool:
        """Whether batches are made by code, so that each read has to be compared by its digest."""
        return self.augment is not None or not self.examples.in_memory

    def load(self, step: int) -> Batch:
        """The batch of one step."""
        batch = self.examples.fetch(self.order.batches[step], self.order.epochs[step])
        if self.augment is not None:
            with seeded(self.device, self.seed, "augment", step):
                batch = self.augment(batch, generator(self.seed, "augment", step))
        return map_tensors(lambda t: t.to(self.device, non_blocking=True), batch)

    def along(self, steps: Iterator[int]) -> Iterator[tuple[int, Batch]]:
        """The batches of some steps in order, each read while the one before it is used."""
        if self.examples.in_memory and self.augment is None:
            for step in steps:
                yield step, self.load(step)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="metasketch-data") as reader:
            threads = torch.get_num_threads()

            def read(step: int) -> tuple[int, Batch]:
                if threading.current_thread() is not threading.main_thread():
                    torch.set_num_threads(threads)
                return step, self.load(step)

            ahead = None
            for step in steps:
                following = reader.submit(read, step)
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()


def slice_batch(batch: Batch, start: int, stop: int, m: int) -> Batch:
    """Examples start to stop of a batch of m."""

    def cut(t: Tensor) -> Tensor:
        if t.dim() == 0 or len(t) != m:
            raise DataError(
                f"a batch of {m} examples holds a tensor of shape {tuple(t.shape)}, which cannot "
                "be cut into microbatches: every tensor's first dimension must count examples"
            )
        return t[start:stop]

    return map_tensors(cut, batch)
