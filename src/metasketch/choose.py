"""Which implementation of the Hessian product is fastest here: measured on the first step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from metasketch.blame import derivative_error
from metasketch.environment import stopwatch
from metasketch.gradient import IMPLEMENTATIONS, VMAPPED, DoubleBackward, parts
from metasketch.state import State
from metasketch.step import Step

SAMPLE_ROWS = 4
"""Rows of the block that is measured; larger ones behave alike."""

_REFERENCE = "loop"

_VMAPPED_HANDICAP = 1.15
"""On a ResNet-9 vmap was as fast as the others at 4 rows, and 12 % slower than they at 16."""


@dataclass(frozen=True)
class Timing:
    """Seconds that one step took with each implementation, and why others cannot be used."""

    rows: int
    seconds: dict[str, float]
    failures: dict[str, str]

    @property
    def fastest(self) -> str:
        """A vmapped one has to be clearly faster: what it holds grows with the rows of a block, and
        with it the time of a row."""

        def handicapped(how: str) -> float:
            return self.seconds[how] * (_VMAPPED_HANDICAP if how in VMAPPED else 1.0)

        return min(self.seconds, key=handicapped)


def measure(step: Step, w: Tensor, pushes: bool, b: int, candidates: tuple[str, ...]) -> Timing:
    """Time one step of a sweep with each candidate that can be used, and check that they agree.

    Cost: about 15 steps with a block of at most four rows.
    """
    rows = min(b, SAMPLE_ROWS)
    state = step.initial()
    batch = step.batches.load(0)
    seconds: dict[str, float] = {}
    failures: dict[str, Exception] = {}
    reference: Tensor | None = None
    for how in sorted(candidates, key=_REFERENCE.__ne__):
        try:
            answer = _product(step, state, w, batch, pushes, how)
            seconds[how] = _timed(step, state, w, batch, pushes, rows, how)
        except (RuntimeError, NotImplementedError) as error:
            failures[how] = error
            continue
        if reference is None:
            reference = answer
        elif not _close(answer, reference):
            failures[how] = RuntimeError("its result differs from the double backward's")
            del seconds[how]
    if not seconds:
        part = next(parts(step.recipe, 0, batch, w))
        raise derivative_error(step.function, part, state, failures)
    best = min(seconds.values())
    near = [how for how, time_taken in seconds.items() if time_taken < 2 * best]
    for how in near if len(near) > 1 else []:
        # The first run also paid for whatever is set up once.
        again = (_timed(step, state, w, batch, pushes, rows, how) for _ in range(2))
        seconds[how] = min(again)
    return Timing(rows, seconds, {how: str(e).splitlines()[0] for how, e in failures.items()})


def _product(step: Step, state: State, w: Tensor, batch: object, pushes: bool, how: str) -> Tensor:
    """The Hessian of the first microbatch times a fixed direction, by which implementations are
    compared. Behind it comes the update, the same for all, whose Jacobian can be ill-conditioned:
    that of Adam's first step makes rounding as large as the answer."""
    part = next(parts(step.recipe, 0, batch, w))
    linear = IMPLEMENTATIONS[how](step.function, part, state, pushes)
    if isinstance(linear, DoubleBackward):
        linear.check_twice()
    block = _directions(step, w, 1)
    stats, answer = w.new_zeros(1, len(state.stats)), torch.zeros_like(block)
    if pushes:
        linear.push(block, stats, w.new_ones(1, len(part.w)), answer)
    else:
        linear.pull(block, stats, answer)
    return answer


def _directions(step: Step, w: Tensor, rows: int) -> Tensor:
    """Fixed directions in parameters, dense and of varied size, (rows, P)."""
    ramp = torch.linspace(-1.0, 1.0, step.model.layout.size, dtype=w.dtype, device=w.device)
    return torch.stack([torch.cos((3.0 + i) * ramp) for i in range(rows)])


def _timed(
    step: Step, state: State, w: Tensor, batch: object, pushes: bool, rows: int, how: str
) -> float:
    """Seconds of one step of a sweep."""
    params, m = _directions(step, w, rows), len(step.recipe.order.batches[0])
    tangent = state.zeros(rows)
    now = stopwatch(w.device)
    start = now()
    block, scratch = State(params, tangent.stats, tangent.slots), torch.empty_like(params)
    if pushes:
        step.push(state, 0, w, batch, block, w.new_ones(rows, m), how, scratch)
    else:
        step.pull(state, 0, w, batch, block, how, scratch)
    return now() - start


def _close(answer: Tensor, reference: Tensor) -> bool:
    tolerance = 1e-8 if reference.dtype == torch.float64 else 1e-3
    gap = torch.linalg.vector_norm(answer - reference)
    return bool(gap <= tolerance * torch.linalg.vector_norm(reference))


def names() -> tuple[str, ...]:
    return tuple(IMPLEMENTATIONS)
