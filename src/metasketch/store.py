"""A run on disk: safetensors and JSON, written atomically, free of pickle.

run.json                what was trained and how: format, versions, the recipe's facts, choices
states/t.safetensors    the state before step t, with the digests of the steps since the last
final.safetensors       the state after the last step; its presence says that training ended
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from metasketch import files
from metasketch.errors import StoreError
from metasketch.state import State

FORMAT = "metasketch-run"
VERSION = 1

_REMEDY = "delete the store and train again"


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
        with files.locked(self.folder / "lock") as mine:
            if not mine:
                raise StoreError(
                    f"another process is writing the store {self.folder}: wait for it to end, or "
                    "give another folder"
                )
            files.remove_parts(self.folder)
            yield

    def write_state(self, path: Path, state: State, notes: Mapping[str, Any]) -> None:
        files.write_tensors(path, state.tensors(), {**notes, "counts": dict(state.counts)})

    def read_state(self, path: Path, device: torch.device) -> tuple[State, dict[str, Any]]:
        tensors, notes = files.read_tensors(path, device, _REMEDY)
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
        files.write_json(
            self.record, files.sealed({**content, "format": FORMAT, "version": VERSION})
        )

    def read_record(self) -> dict[str, Any]:
        try:
            content = files.read_json(self.record, _REMEDY)
        except FileNotFoundError:
            raise StoreError(
                f"{self.record} does not exist: no run was stored there; train(recipe, store=...) "
                "makes one"
            ) from None
        files.check_format(content, self.record, FORMAT, VERSION, "the record of a run", _REMEDY)
        return content


def differences(stored: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """In what two recipes' facts differ, in words."""
    return [
        f"{name} ({stored.get(name)} in the store, {ours.get(name)} here)"
        if not isinstance(ours.get(name), int) or abs(int(ours[name])) < 10**9
        else name
        for name in sorted({*stored, *ours})
        if stored.get(name) != ours.get(name)
    ]
