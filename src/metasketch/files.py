"""Files that are right, or absent, or refused by name: safetensors and JSON, free of pickle.

Every file is written beside its place and moved there when it is whole, and carries a checksum of
its contents. Locks are the operating system's: they die with the process that holds them.
"""

import contextlib
import fcntl
import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from metasketch.errors import MetasketchWarning, StoreError
from metasketch.randomness import derive_seed
from metasketch.state import checksum

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


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A table that `write_json` wrote; ``remedy`` says what to do where it is damaged."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({error}): {remedy}") from None
    if not isinstance(content, dict):
        raise StoreError(f"{path} is damaged (not a table): {remedy}")
    return content


def _content_checksum(tensors: Mapping[str, Tensor], notes: str) -> str:
    return str(derive_seed(notes, *(f"{k}:{checksum(tensors[k])}" for k in sorted(tensors))))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """One safetensors file with small facts in its header."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(notes, sort_keys=True)
    metadata = {"notes": text, "checksum": _content_checksum(on_cpu, text)}
    write_atomically(path, save(on_cpu, metadata))


def read_tensors(
    path: Path, device: torch.device, remedy: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote, verified; ``remedy`` says what to do where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        notes = metadata.get("notes", "")
        intact = metadata.get("checksum") == _content_checksum(tensors, notes)
        facts = json.loads(notes) if intact else {}
    except FileNotFoundError:
        raise StoreError(f"{path} is missing from the store: {remedy}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({error}): {remedy}") from None
    if not intact:
        raise StoreError(
            f"{path} is damaged (its contents do not have the checksum that it states): {remedy}"
        )
    return {name: tensor.to(device) for name, tensor in tensors.items()}, facts


def read_or_discard(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """A file that is whole; None where there is none, or where it was damaged: then it is named
    and deleted, so that it is made again."""
    if not path.exists():
        return None
    try:
        return read_tensors(path, torch.device("cpu"), "it is made again")
    except StoreError as error:
        warnings.warn(str(error), MetasketchWarning, stacklevel=3)
        path.unlink(missing_ok=True)
        return None


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold a lock file while the block runs; False where another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise StoreError(f"the store {path.parent} cannot be written: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def remove_parts(folder: Path, of: str = "") -> None:
    """Delete what processes left that were killed while writing (a file of this name)."""
    for part in folder.rglob(f"{_PART}*{of}"):
        part.unlink(missing_ok=True)


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A table with its checksum."""
    content = {key: value for key, value in content.items() if key != "checksum"}
    return {**content, "checksum": _table_checksum(content)}


def check_format(
    content: Mapping[str, Any], path: Path, name: str, version: int, what: str, remedy: str
) -> None:
    """Refuse a table of another format or version, or with another checksum than it states."""
    if content.get("format") != name:
        raise StoreError(f"{path} is not {what}")
    if content.get("version") != version:
        raise StoreError(
            f"{path} was written in version {content.get('version')} of the format; this "
            f"metasketch reads version {version}: {remedy}, or use the metasketch that wrote it "
            f"({content.get('metasketch', 'unknown')})"
        )
    if content != sealed(content):
        raise StoreError(
            f"{path} is damaged (its contents do not have the checksum that it states): {remedy}"
        )


def _table_checksum(content: Mapping[str, Any]) -> str:
    return str(derive_seed(json.dumps(content, sort_keys=True)))
