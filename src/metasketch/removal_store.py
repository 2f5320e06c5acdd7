"""Retrainings on disk, shared by methods and by query sets.

    removals.json                     the run, the subsets, how many go together, what is kept
    states/i.safetensors              final states of chunk i, where they fit: parameters,
                                      statistics, and which diverged
    outputs/QUERIES/i.safetensors     what one set of queries measured at them, (rows, K)
    locks/                            held while a chunk is being worked on

Row 0 of chunk 0 is the run at its own weights, the others are its subsets in order; the last chunk
may be short, and grows with M. Files are written whole or not at all, and carry checksums.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from metasketch import files
from metasketch.retrain import Finals

FORMAT = "metasketch-removals"
VERSION = 1

_REMEDY = "delete the store and retrain again"

Record = dict[str, Any]


class Ledger(Protocol):
    """Where finished retrainings are kept."""

    @property
    def lasting(self) -> bool:
        """Whether final states are worth keeping: somebody may come back to them."""

    def record(self) -> Record | None: ...

    def write_record(self, record: Record) -> None: ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Hold the record against others while the block runs."""

    def states(self, chunk: int) -> Finals | None: ...

    def write_states(self, chunk: int, ends: Finals) -> None: ...

    def outputs(self, queries: str, chunk: int) -> Tensor | None: ...

    def write_outputs(self, queries: str, chunk: int, outputs: Tensor) -> None: ...

    def claim(self, chunk: int, wait: bool) -> contextlib.AbstractContextManager[bool]:
        """Hold a chunk while the code runs; False where another process holds it."""


class Memory:
    """A ledger that forgets: the caller holds the results."""

    lasting = False

    def record(self) -> Record | None:
        return None

    def write_record(self, record: Record) -> None: ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def states(self, chunk: int) -> Finals | None:
        return None

    def write_states(self, chunk: int, ends: Finals) -> None: ...

    def outputs(self, queries: str, chunk: int) -> Tensor | None:
        return None

    def write_outputs(self, queries: str, chunk: int, outputs: Tensor) -> None: ...

    def claim(self, chunk: int, wait: bool) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)


class Folder:
    """A ledger on disk."""

    lasting = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser().absolute()

    @property
    def _record_path(self) -> Path:
        return self.folder / "removals.json"

    def _states_path(self, chunk: int) -> Path:
        return self.folder / "states" / f"{chunk:06d}.safetensors"

    def _outputs_path(self, queries: str, chunk: int) -> Path:
        return self.folder / "outputs" / queries / f"{chunk:06d}.safetensors"

    def record(self) -> Record | None:
        try:
            content = files.read_json(self._record_path, _REMEDY)
        except FileNotFoundError:
            return None
        files.check_format(
            content, self._record_path, FORMAT, VERSION, "the record of removals", _REMEDY
        )
        return content

    def write_record(self, record: Record) -> None:
        content = {**record, "format": FORMAT, "version": VERSION}
        files.write_json(self._record_path, files.sealed(content))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with files.locked(self.folder / "locks" / "record", wait=True):
            files.remove_parts(self.folder, self._record_path.name)
            yield

    def states(self, chunk: int) -> Finals | None:
        found = files.read_or_discard(self._states_path(chunk))
        if found is None:
            return None
        tensors, _ = found
        return Finals(tensors["params"], tensors["stats"], tensors["diverged"])

    def write_states(self, chunk: int, ends: Finals) -> None:
        tensors = {"params": ends.params, "stats": ends.stats, "diverged": ends.diverged}
        files.write_tensors(self._states_path(chunk), tensors, {})

    def outputs(self, queries: str, chunk: int) -> Tensor | None:
        found = files.read_or_discard(self._outputs_path(queries, chunk))
        return None if found is None else found[0]["outputs"]

    def write_outputs(self, queries: str, chunk: int, outputs: Tensor) -> None:
        files.write_tensors(self._outputs_path(queries, chunk), {"outputs": outputs}, {})

    @contextlib.contextmanager
    def claim(self, chunk: int, wait: bool) -> Iterator[bool]:
        with files.locked(self.folder / "locks" / f"chunk-{chunk:06d}", wait) as mine:
            if mine:  # what was being written under this lock before is of nobody who lives
                files.remove_parts(self.folder, f"{chunk:06d}.safetensors")
            yield mine
