"""Sizes in bytes as people write them, both ways; and durations."""

import re

from metasketch.errors import ArgumentError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(size: int | float | str, what: str) -> int:
    """Bytes of a size such as ``"4GiB"``, ``"500 MB"`` or a plain number of bytes.

    >>> parse_bytes("1.5KiB", "memory")
    1536
    """
    if isinstance(size, int | float) and not isinstance(size, bool):
        number, unit = float(size), "b"
    else:
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*", str(size))
        if match is None or (match[2] or "b").lower() not in _UNITS:
            raise ArgumentError(
                f"{what}={size!r} is not a size: write a number of bytes, or a text such as "
                '"4GiB", "500MB"'
            )
        number, unit = float(match[1]), (match[2] or "b").lower()
    if not 0 < number < float("inf"):
        raise ArgumentError(f"{what}={size!r}: a size must be positive and finite")
    return int(number * _UNITS[unit])


def format_bytes(size: int | float) -> str:
    """A size for a person.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_duration(seconds: float) -> str:
    """A time for a person.

    >>> format_duration(0.25), format_duration(90), format_duration(1800), format_duration(9000)
    ('250 ms', '90.0 s', '30 min', '2.5 h')
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
