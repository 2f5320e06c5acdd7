"""Memory of this process, as the kernel counts it (Linux)."""

from pathlib import Path


def resident() -> int:
    """Bytes in memory now."""
    return _status("VmRSS")


def high_water() -> int:
    """The most bytes that were in memory since `restart`."""
    return _status("VmHWM")


def restart() -> None:
    """Let the peak start again from here."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")
