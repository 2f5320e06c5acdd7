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


def follow(
    steps: Generator[tuple[int, str], None, Result],
    total: int,
    title: str,
    show: bool | None = None,
    unit: str = "step",
) -> Result:
    """The same for a generator that yields how much is done of the whole, and a remark on it."""
    begun = False
    with tqdm(
        total=total,
        desc=title,
        unit=unit,
        leave=False,
        disable=None if show is None else not show,
    ) as bar:
        while True:
            try:
                done, remark = next(steps)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            if not begun:  # what was done before does not count as speed
                bar.initial, begun = done, True
                bar.n = done
            bar.set_postfix_str(remark, refresh=False)
            bar.update(done - bar.n)
