"""Learning-rate schedules: ``(step, num_steps) -> multiplier`` of the optimiser's rate."""

import math
from collections.abc import Callable

from metasketch.errors import ArgumentError

Schedule = Callable[[int, int], float]


def constant() -> Schedule:
    """The optimiser's own rate at every step."""
    return lambda step, num_steps: 1.0


def one_cycle(peak: float = 0.3, start: float = 0.1, end: float = 0.0) -> Schedule:
    """Linearly from ``start`` at step 0 to 1 at the fraction ``peak`` of the run, then to ``end``.

    >>> [round(one_cycle(peak=0.5, start=0.0)(step, 4), 2) for step in range(4)]
    [0.0, 0.5, 1.0, 0.5]
    """
    if not 0.0 <= peak <= 1.0:
        raise ArgumentError(f"one_cycle(peak={peak}): the peak is a fraction of the run, 0 to 1")

    def multiplier(step: int, num_steps: int) -> float:
        top = peak * num_steps
        if step < top:
            return start + (1.0 - start) * step / top
        return 1.0 + (end - 1.0) * (step - top) / max(num_steps - top, 1e-12)

    return multiplier


def linear_warmup(warmup: int | float) -> Schedule:
    """Linearly from 0 to 1 over ``warmup`` steps (or that fraction of the run), then constant."""
    return _with_warmup(warmup, lambda fraction: 1.0)


def linear(warmup: int | float = 0, end: float = 0.0) -> Schedule:
    """Warm-up, then linearly from 1 down to ``end``."""
    return _with_warmup(warmup, lambda fraction: 1.0 + (end - 1.0) * fraction)


def cosine(warmup: int | float = 0, end: float = 0.0) -> Schedule:
    """Warm-up, then half a cosine from 1 down to ``end``."""
    return _with_warmup(
        warmup, lambda fraction: end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * fraction))
    )


def _with_warmup(warmup: int | float, after: Callable[[float], float]) -> Schedule:
    if warmup < 0 or (isinstance(warmup, float) and warmup > 1):
        raise ArgumentError(
            f"warmup={warmup}: give a number of steps as an integer, or a fraction of the run "
            "between 0.0 and 1.0"
        )

    def multiplier(step: int, num_steps: int) -> float:
        steps = warmup * num_steps if isinstance(warmup, float) else warmup
        if step < steps:
            return step / steps
        return after((step - steps) / max(num_steps - steps, 1))

    return multiplier


def table(schedule: Schedule | None, num_steps: int) -> tuple[float, ...]:
    """The multiplier of every step, checked: what is trained with is what is recorded."""
    if schedule is None:
        schedule = constant()
    values = []
    for step in range(num_steps):
        value = float(schedule(step, num_steps))
        if not (math.isfinite(value) and value >= 0):
            raise ArgumentError(
                f"the schedule gives {value} at step {step} of {num_steps}: a multiplier of the "
                "learning rate must be finite and not negative"
            )
        values.append(value)
    return tuple(values)
