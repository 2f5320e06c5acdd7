"""Progress for a person: the loops of the library yield, this shows."""

from collections.abc import Generator
from typing import TypeVar

from tqdm import tqdm

Result = TypeVar("Result")


def exhaust(steps: Generator[int, None, Result]) -> Result:
    """Run a generator of steps to its end without a word, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def drive(
    steps: Generator[int, None, Result],
    total: int,
    title: str,
    show: bool | None = None,
    unit: str = "step",
) -> Result:
    """Run a generator of steps to its end under a progress bar and return its result.

    Args:
        show: True, False, or None for a bar exactly where the error stream is a terminal.
        unit: what one step is.
    """
    with tqdm(
        total=total,
        desc=title,
        unit=unit,
        leave=False,
        disable=None if show is None else not show,
    ) as bar:
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            bar.update()
