"""An attribution on disk: finished blocks of sweeps, shared by every process that works on it.

    attribution.json             what was trained and asked, the method, the blocks, the choices
    gram.safetensors             G, where the method looks at it
    replay/i.safetensors         probes and what their replays gave: Z, U, scales
    forward/i.safetensors        directions and their inner products with every row: Q, C
    audit/i.safetensors          the same for i random directions, by which quality is judged
    prior/i.safetensors          surrogates of Y at a checkpoint: left, right, energies, sizes
    locks/                       held while a block is being worked on; they die with the process

A block is written whole or not at all, carries a checksum, and is never made twice.
docs/formats.md describes the files.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from metasketch import files
from metasketch.measured import Paired, Replayed
from metasketch.surrogate import Surrogate

FORMAT = "metasketch-attribution"
VERSION = 1

_REMEDY = "delete the store and attribute again"

Kind = Literal["replay", "forward", "audit", "prior"]
Record = dict[str, Any]
Content = Replayed | Paired | Surrogate


@dataclass(frozen=True, order=True)
class Block:
    """A piece of work: the replays of some probes, the forward passes that follow them, those of an
    audit, whose number is how many they are, or the surrogates of a checkpoint."""

    kind: Kind
    number: int


class Ledger(Protocol):
    """Where finished work is kept."""

    def record(self) -> Record | None:
        """What was decided; None at the start."""

    def write_record(self, record: Record) -> None: ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Hold the record against others while the block runs."""

    def gram(self) -> Tensor | None: ...

    def write_gram(self, G: Tensor) -> None: ...

    def read(self, block: Block) -> Content | None:
        """A finished block; None where it is not finished."""

    def write(self, block: Block, content: Content) -> None: ...

    def claim(
        self, what: "Block | Literal['gram']", wait: bool = False
    ) -> contextlib.AbstractContextManager[bool]:
        """Hold a piece of work while the code runs; False where another process holds it."""


@dataclass
class Memory:
    """A ledger that ends with the process."""

    _record: Record | None = None
    _blocks: dict[Block, Content] = field(default_factory=dict)
    _gram: Tensor | None = None

    def record(self) -> Record | None:
        return self._record

    def write_record(self, record: Record) -> None:
        self._record = record

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gram(self) -> Tensor | None:
        return self._gram

    def write_gram(self, G: Tensor) -> None:
        self._gram = G

    def read(self, block: Block) -> Content | None:
        return self._blocks.get(block)

    def write(self, block: Block, content: Content) -> None:
        self._blocks[block] = content

    def claim(
        self, what: "Block | Literal['gram']", wait: bool = False
    ) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)


class Folder:
    """A ledger on disk."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser().absolute()

    @property
    def _record_path(self) -> Path:
        return self.folder / "attribution.json"

    @property
    def _gram_path(self) -> Path:
        return self.folder / "gram.safetensors"

    def _path(self, block: Block) -> Path:
        return self.folder / block.kind / f"{block.number:06d}.safetensors"

    def record(self) -> Record | None:
        try:
            content = files.read_json(self._record_path, _REMEDY)
        except FileNotFoundError:
            return None
        files.check_format(
            content, self._record_path, FORMAT, VERSION, "the record of an attribution", _REMEDY
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

    def gram(self) -> Tensor | None:
        found = files.read_or_discard(self._gram_path)
        return None if found is None else found[0]["gram"]

    def write_gram(self, G: Tensor) -> None:
        files.write_tensors(self._gram_path, {"gram": G}, {})

    def read(self, block: Block) -> Content | None:
        found = files.read_or_discard(self._path(block))
        if found is None:
            return None
        tensors, notes = found
        if block.kind == "replay":
            return Replayed(tensors["Z"], tensors["U"], tensors["scales"])
        if block.kind == "prior":
            return Surrogate(**tensors, mean=notes["mean"])
        return Paired(tensors["Q"], tensors["C"], tuple(notes["origin"]))

    def write(self, block: Block, content: Content) -> None:
        if isinstance(content, Replayed):
            tensors = {"Z": content.Z, "U": content.U, "scales": content.scales}
            notes: Mapping[str, Any] = {}
        elif isinstance(content, Surrogate):
            names = ("left", "right", "energies", "sizes")
            tensors = {name: getattr(content, name) for name in names}
            notes = {"mean": content.mean}
        else:
            tensors, notes = {"Q": content.Q, "C": content.C}, {"origin": list(content.origin)}
        files.write_tensors(self._path(block), tensors, notes)

    @contextlib.contextmanager
    def claim(self, what: "Block | Literal['gram']", wait: bool = False) -> Iterator[bool]:
        path = self._path(what) if isinstance(what, Block) else self._gram_path
        name = "-".join(path.relative_to(self.folder).with_suffix("").parts)
        with files.locked(self.folder / "locks" / name, wait) as mine:
            if mine:  # what was being written under this lock before is of nobody who lives
                files.remove_parts(path.parent, path.name)
            yield mine
