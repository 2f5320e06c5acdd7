"""A run on disk: safetensors and JSON, written atomically, free of pickle.

    run.json                what was trained and how: format, versions, the recipe's facts, choices
    states/t.safetensors    the state before step t, with the digests of the steps since the last
    final.safetensors       the state after the last step; its presence says that training ended

Every file is written beside its place and moved there when it is whole, and carries a checksum of
its contents, so that a file is right, or absent, or refused by name.
"""

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from metasketch.errors import StoreError
from metasketch.randomness import derive_seed
from metasketch.state import State, checksum

FORMAT = "metasketch-run"
VERSION = 1

_PART = ".part-"
"""How names of files begin that are not whole yet."""


def write_atomically(path: Path, content: bytes) -> None:
    """Put a whole file in place, or leave what was there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # NOTE: not by tempfile, whose files only their owner may read: stores are shared.
        part = path.with_name(f"{_PART}{os.getpid()}-{threading.get_ident()}-{path.name}")
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise StoreError(
            f"writing {path} failed: {error.strerror or error}. What was finished before is kept: "
            "make room (or another folder), and make the same call again"
        ) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise StoreError(
            f"{path} does not exist: no run was stored there; train(recipe, store=...) makes one"
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({error}): delete the store and train again") from None
    if not isinstance(content, dict):
        raise StoreError(f"{path} is damaged (not a table): delete the store and train again")
    return content


def _content_checksum(tensors: Mapping[str, Tensor], notes: str) -> str:
    return str(derive_seed(notes, *(f"{k}:{checksum(tensors[k])}" for k in sorted(tensors))))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """One safetensors file with small facts in its header."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(notes, sort_keys=True)
    metadata = {"notes": text, "checksum": _content_checksum(on_cpu, text)}
    write_atomically(path, save(on_cpu, metadata))


def read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote, verified."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        notes = metadata.get("notes", "")
        intact = metadata.get("checksum") == _content_checksum(tensors, notes)
        facts = json.loads(notes) if intact else {}
    except FileNotFoundError:
        raise StoreError(
            f"{path} is missing from the store: delete the store and train again"
        ) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({error}): delete the store and train again") from None
    if not intact:
        raise StoreError(
            f"{path} is damaged (its contents do not have the checksum that it states): delete "
            "the store and train again"
        )
    return {name: tensor.to(device) for name, tensor in tensors.items()}, facts


class RunStore:
    """The folder of one run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        # A sweep may come after the process has gone elsewhere.
        self.folder = Path(folder).expanduser().absolute()

    @property
    def record(self) -> Path:
        return self.folder / "run.json"

    @property
    def final(self) -> Path:
        return self.folder / "final.safetensors"

    def state_path(self, t: int) -> Path:
        return self.folder / "states" / f"{t:09d}.safetensors"

    def stored_states(self) -> list[int]:
        """Steps whose state is on disk, in order."""
        names = (path.stem for path in (self.folder / "states").glob("*.safetensors"))
        return sorted(int(name) for name in names if name.isdigit())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store for writing. The lock is the operating system's: it dies with us."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / "lock").open("w")
        except OSError as error:
            raise StoreError(f"the store {self.folder} cannot be written: {error}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(
                    f"another process is writing the store {self.folder}: wait for it to end, or "
                    "give another folder"
                ) from None
            for part in self.folder.rglob(f"{_PART}*"):  # of one that was killed while writing
                part.unlink(missing_ok=True)
            yield

    def write_state(self, path: Path, state: State, notes: Mapping[str, Any]) -> None:
        write_tensors(path, state.tensors(), {**notes, "counts": dict(state.counts)})

    def read_state(self, path: Path, device: torch.device) -> tuple[State, dict[str, Any]]:
        tensors, notes = read_tensors(path, device)
        try:
            slots = {
                name.removeprefix("slots/"): tensor
                for name, tensor in tensors.items()
                if name.startswith("slots/")
            }
            return State(tensors["params"], tensors["stats"], slots, notes["counts"]), notes
        except KeyError as error:
            raise StoreError(f"{path} is not the state of a run: it lacks {error}") from None

    def write_record(self, content: Mapping[str, Any]) -> None:
        content = {**content, "format": FORMAT, "version": VERSION}
        content.pop("checksum", None)
        write_json(self.record, {**content, "checksum": _record_checksum(content)})

    def read_record(self) -> dict[str, Any]:
        content = read_json(self.record)
        if content.get("format") != FORMAT:
            raise StoreError(f"{self.record} is not the record of a run")
        if content.get("version") != VERSION:
            raise StoreError(
                f"{self.record} was written in version {content.get('version')} of the format; "
                f"this metasketch reads version {VERSION}: train again, or use the metasketch "
                f"that wrote it ({content.get('metasketch', 'unknown')})"
            )
        stated = content.pop("checksum", None)
        if stated != _record_checksum(content):
            raise StoreError(
                f"{self.record} is damaged (its contents do not have the checksum that it "
                "states): delete the store and train again"
            )
        return content


def _record_checksum(content: Mapping[str, Any]) -> str:
    return str(derive_seed(json.dumps(content, sort_keys=True)))


def differences(stored: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """In what two recipes' facts differ, in words."""
    return [
        f"{name} ({stored.get(name)} in the store, {ours.get(name)} here)"
        if not isinstance(ours.get(name), int) or abs(int(ours[name])) < 10**9
        else name
        for name in sorted({*stored, *ours})
        if stored.get(name) != ours.get(name)
    ]
