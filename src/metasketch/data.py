"""Training data: which examples each step sees, and the batch that they make.

A batch depends on (seed, step) alone, so every sweep sees what training saw. Items of a Dataset
are read under a seed of (seed, epoch, example), so that ordinary random transforms replay.
"""

import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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


_CHUNK = 1 << 24
"""Entries of a tensor that are checked at once: a checksum needs as much memory again."""

_PRINTED = (str, bytes, bool, int, float, complex, type(None))


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """Apply a function to every tensor of nested tuples, lists and mappings."""
    return _map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _map_leaves(function: Callable[[Any], Any], batch: Batch) -> Batch:
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_leaves(function, item) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_map_leaves(function, item) for item in batch)
    if isinstance(batch, Mapping):
        return {key: _map_leaves(function, value) for key, value in batch.items()}
    return function(batch)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Every tensor of a batch, in a fixed order."""
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def batch_digest(batch: Batch) -> int:
    """A checksum of everything in a batch that a loss could read: tensors, arrays, text."""
    found: list[int | str] = []
    _map_leaves(lambda leaf: found.append(_leaf_digest(leaf)), batch)
    return derive_seed(*found)


def _leaf_digest(leaf: Any) -> int | str:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        leaf = torch.as_tensor(np.ascontiguousarray(leaf))
    if isinstance(leaf, Tensor):
        chunks = leaf.detach().reshape(-1).split(_CHUNK)
        return checksum(leaf) if len(chunks) == 1 else derive_seed(*map(checksum, chunks))
    return repr(leaf) if isinstance(leaf, _PRINTED) else type(leaf).__qualname__


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


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def explicit(batches: Sequence[Any], n: int) -> Order:
    """An order given step by step, checked against the number of examples."""
    if not isinstance(batches, Sequence | np.ndarray | Tensor) or isinstance(batches, str):
        raise DataError(
            f"batches is a {type(batches).__name__}; it must be a list of index tensors, one a step"
        )
    checked = []
    for step, given in enumerate(batches):
        try:
            indices = torch.as_tensor(given).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"batches[{step}] is not a vector of indices: {error}") from None
        if indices.dim() != 1 or indices.numel() == 0 or indices.dtype not in _INTEGERS:
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
        if collate is not None and not callable(collate):
            raise DataError(f"collate is a {type(collate).__name__}; it must be a function")
        self.data, self.seed = _as_tensors(data), seed
        self.tensors = _is_tensors(self.data)
        self.in_memory = self.tensors and collate is None
        self.collate: Collate = collate or default_collate
        self.n = _length(self.data, self.tensors)
        if self.n == 0:
            raise DataError("the data set is empty: there is nothing to train on")
        self._versions = self._version()
        self._digest: int | None = None

    def _version(self) -> list[int]:
        return [t._version for t in tensors_of(self.data)] if self.tensors else []

    def check_unchanged(self) -> None:
        """Refuse data that was changed in place since it was handed over.

        PyTorch counts the changes that are made through it; those made through NumPy, in memory
        that both share, show in the bits, which are noted at the first call.
        """
        changed = self._version() != self._versions
        if not changed and self.tensors:
            digest = self.fingerprint()
            changed = digest != (digest if self._digest is None else self._digest)
            self._digest = digest if self._digest is None else self._digest
        if changed:
            raise DataError(
                "the training data was changed in place after the recipe was made; make the "
                "recipe again, or hand it a copy"
            )

    def fetch(self, indices: Tensor, epoch: int) -> Batch:
        """The batch of some examples as they look in some epoch."""
        if self.in_memory:
            return map_tensors(lambda t: t[indices.to(t.device)], self.data)
        return self._collated(indices.tolist(), epoch)

    def _collated(self, indices: list[int], epoch: int) -> Batch:
        items = [self._item(i, epoch) for i in indices]
        with seeded(torch.device("cpu"), self.seed, "collate", epoch, *indices):
            try:
                return self.collate(items)
            except Exception as error:
                raise DataError(
                    f"collating examples {_few(indices)} into a batch failed: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _item(self, index: int, epoch: int) -> Any:
        with seeded(torch.device("cpu"), self.seed, "item", epoch, index):
            try:
                if self.tensors:
                    return map_tensors(lambda t: t[index], self.data)
                return self.data[index]
            except Exception as error:
                raise DataError(
                    f"reading example {index} of the data set failed: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def looks(self, show: Callable[[Any], Any] | None) -> Callable[[int], Any] | None:
        """What ``show`` makes of an example, by its number, as it looks in the first epoch."""
        return None if show is None else partial(self._shown, show)

    def _shown(self, show: Callable[[Any], Any], index: int) -> Any:
        item = self._item(index, epoch=0)
        try:
            return show(item)
        except Exception as error:
            raise DataError(
                f"show failed on example {index}: {type(error).__name__}: {error}"
            ) from error

    def check_repeatable(self, indices: Tensor, epoch: int) -> None:
        """Read some items twice and refuse a Dataset whose items differ between reads."""
        if self.in_memory:
            return
        for i in indices.tolist():
            one = [self._collated([i], epoch) for _ in range(2)]
            if batch_digest(one[0]) != batch_digest(one[1]):
                raise DataError(
                    f"example {i} of the data set differs between two reads under the same seed. "
                    "Draw from torch's, Python's or NumPy's global generator in its transforms, "
                    "instead of from the clock, a generator of its own, or a counter"
                )

    def fingerprint(self) -> int:
        """What identifies the data: every bit of tensors, the type and length of a Dataset."""
        if self.tensors:
            return batch_digest(self.data)
        return derive_seed(type(self.data).__qualname__, self.n)


def _few(indices: list[int]) -> str:
    more = ", ..." if len(indices) > 8 else ""
    return f"[{', '.join(map(str, indices[:8]))}{more}]"


def _as_tensors(data: Any) -> Any:
    """Arrays as tensors that share their memory; a Dataset as it is."""
    if isinstance(data, TensorDataset):
        return data.tensors
    if isinstance(data, np.ndarray):
        return _tensor(data)
    if not isinstance(data, tuple | dict):
        return data
    wrong = [x for x in _values(data) if not isinstance(x, Tensor | np.ndarray)]
    if wrong:
        raise DataError(
            f"data is a {type(data).__name__} that holds a {type(wrong[0]).__name__}: a tuple or "
            "dict must hold tensors or arrays, whose first dimension counts examples. Make "
            "tensors of them, or give a list of examples"
        )
    return _map_leaves(_tensor, data)


def _tensor(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    with warnings.catch_warnings():
        # Read-only memory is as good as any other: the library writes to no data.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            return torch.as_tensor(leaf)
        except TypeError as error:
            raise DataError(f"an array of the data cannot become a tensor: {error}") from None


def _values(data: Any) -> tuple[Any, ...]:
    return tuple(data.values()) if isinstance(data, dict) else tuple(data)


def _is_tensors(data: Any) -> bool:
    if isinstance(data, dict | tuple):
        return len(data) > 0
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
            batch = self._augmented(self.augment, batch, step)
        return map_tensors(lambda t: t.to(self.device, non_blocking=True), batch)

    def _augmented(self, augment: Augment, batch: Batch, step: int) -> Batch:
        with seeded(self.device, self.seed, "augment", step):
            try:
                batch = augment(batch, generator(self.seed, "augment", step))
            except Exception as error:
                raise DataError(
                    f"augment failed on the batch of step {step}: {type(error).__name__}: {error}"
                ) from error
        if batch is None:
            raise DataError("augment returned None: it must return the batch")
        return batch

    def check_repeatable(self, step: int) -> Batch:
        """The batch of one step, made twice where code makes it, and refused if that differs."""
        if self.examples.in_memory and self.augment is None:
            return self.load(step)
        indices = self.order.batches[step]
        self.examples.check_repeatable(indices[:2], self.order.epochs[step])
        one, other = self.load(step), self.load(step)
        if batch_digest(one) != batch_digest(other):
            maker = "augment" if self.augment is not None else "collate"
            raise DataError(
                f"the batch of step {step} differs between two reads under the same seed: {maker} "
                "must draw from the generator that it is given, or from torch's, Python's or "
                "NumPy's global one, instead of from one of its own or the clock"
            )
        return one

    def along(self, steps: Iterator[int]) -> Generator[tuple[int, Batch], None, None]:
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


class Microbatches(tuple[Batch, ...]):
    """The batch of a step, collated microbatch by microbatch.

    What a ``collate`` returns where each microbatch is padded, or otherwise made, by itself, as
    torch's gradient accumulation over a DataLoader does.
    """


def microbatch(batch: Batch, number: int, rows: slice, m: int) -> Batch:
    """One microbatch of a step of m examples: the one that was collated, or one cut out."""
    if not isinstance(batch, Microbatches):
        return batch if rows == slice(0, m) else slice_batch(batch, rows.start, rows.stop, m)
    size = rows.stop - rows.start
    if number >= len(batch) or (rows.stop == m) != (number == len(batch) - 1):
        raise DataError(
            f"collate made {len(batch)} microbatches of a step of {m} examples; microbatch "
            f"{number} of the recipe has {size} of them: cut where Recipe(microbatch=...) does"
        )
    return batch[number]


def slice_batch(batch: Batch, start: int, stop: int, m: int) -> Batch:
    """Examples start to stop of a batch of m."""
    if isinstance(batch, Mapping):
        return {key: slice_batch(value, start, stop, m) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(slice_batch(item, start, stop, m) for item in batch))
    if isinstance(batch, tuple | list) and any(isinstance(x, _NESTED) for x in batch):
        return type(batch)(slice_batch(item, start, stop, m) for item in batch)
    if isinstance(batch, _PRINTED):
        return batch  # the same for every example
    if not _counts(batch, m):
        kind = f"a {type(batch).__name__}"
        if isinstance(batch, Tensor | np.ndarray):
            kind = f"a tensor of shape {tuple(batch.shape)}"
        raise DataError(
            f"a batch of {m} examples holds {kind}, which cannot be cut into microbatches: the "
            "first dimension of every tensor, and the length of every list, must count examples"
        )
    return batch[start:stop]


_NESTED = (Tensor, np.ndarray, tuple, list, Mapping)


def _counts(leaf: Any, m: int) -> bool:
    """Whether a part of a batch has one entry for each of m examples."""
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.ndim > 0 and len(leaf) == m
    return isinstance(leaf, tuple | list) and len(leaf) == m
