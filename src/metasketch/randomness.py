"""Randomness from counters: every draw is seeded by what it is for, never by what came before.

The ambient generators (torch's, Python's, NumPy's) are what layers, losses and transforms of a
user draw from, so they are seeded for each use, under a lock (data may be read ahead in another
thread), and put back when a call of the library ends.
"""

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch

_LOCK = threading.RLock()


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a tuple of counters and words, well mixed."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A private CPU generator, seeded by `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextlib.contextmanager
def seeded(device: torch.device, *parts: int | str) -> Iterator[None]:
    """Seed the ambient generators from ``parts`` while the block runs.

    What they were before is not put back here, because that costs more than the seeding: the
    calls of the library are wrapped in `preserved` once, outside their loops.
    """
    seed = derive_seed(*parts)
    with _LOCK:
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        yield


@contextlib.contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Leave the ambient generators after the block as they were before it."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
