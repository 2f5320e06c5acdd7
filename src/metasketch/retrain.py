"""Retrain a run at other data weights, many at a time where that is faster, and ask it again.

    f_q(w_j) = φ_q(θ_T(w_j)),    j = 1, ..., M

Everything else stays as it was in the run: order, batch sizes, augmentation, dropout. A retraining
that stops being finite is reported and leaves the others alone.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metasketch import ensemble
from metasketch.environment import stopwatch
from metasketch.errors import ArgumentError, MetasketchError, NumericalError
from metasketch.gradient import gradient, parts
from metasketch.memory import block_size
from metasketch.progress import drive
from metasketch.queries import Queries
from metasketch.run import Run
from metasketch.state import State


@dataclass(frozen=True)
class Retrained:
    """What the queries measure after retraining.

    Attributes:
        outputs: f(w_j), (M, K), float64; NaN where a retraining diverged.
        full: f at the run's own weights, (K,), float64, computed on the same path: alone or
            together with others, which differ in rounding.
        diverged: (M,) booleans.
        together: retrainings at a time.
    """

    outputs: Tensor
    full: Tensor
    diverged: Tensor
    together: int

    @property
    def delta(self) -> Tensor:
        """f(w_j) - f(w), (M, K); NaN where a retraining diverged."""
        return self.outputs - self.full


@dataclass(frozen=True)
class Finals:
    """The ends of b retrainings: parameters (b, P), statistics (b, R), and which diverged (b,)."""

    params: Tensor
    stats: Tensor
    diverged: Tensor

    @staticmethod
    def concatenate(parts: "Sequence[Finals]") -> "Finals":
        return Finals(
            torch.cat([p.params for p in parts]),
            torch.cat([p.stats for p in parts]),
            torch.cat([p.diverged for p in parts]),
        )

    def to(self, device: torch.device) -> "Finals":
        return Finals(self.params.to(device), self.stats.to(device), self.diverged.to(device))

    def __getitem__(self, rows: Any) -> "Finals":
        return Finals(self.params[rows], self.stats[rows], self.diverged[rows])


def retrained(
    run: Run,
    queries: Queries,
    weights: Any,
    together: int | None = None,
    progress: bool | None = None,
) -> Retrained:
    """Retrain at many data weights and measure every query each time.

    Args:
        run: the training run; only its recipe and the setting it was made in are used.
        queries: what is measured.
        weights: (M, N), finite and not negative; rows equal to the run's own weights change
            exactly nothing.
        together: retrainings at a time; by default what is measured to be fastest here.
        progress: show a bar; by default on a terminal.

    Returns:
        The measurements. Cost: M trainings, less what is shared where they go together.
    """
    W = weightings(run, weights)
    with run.computing():
        b = fastest(run, len(W) + 1) if together is None else together
        if b < 1:
            raise ArgumentError(f"together={together!r}: at least one retraining at a time")
        every = torch.cat([run.weights[None], W])
        steps = (len(W) if b == 1 else -(-len(every) // b)) * run.num_steps
        work = _outputs(run, queries, every, b)
        outputs = drive(work, steps, f"{len(W)} retrainings", progress)
    own = (every == run.weights).all(1).cpu()
    outputs[own] = outputs[0].clone()
    diverged = ~torch.isfinite(outputs).all(1)
    outputs[diverged] = torch.nan
    return Retrained(outputs[1:], outputs[0], diverged[1:], b)


def _outputs(run: Run, queries: Queries, W: Tensor, b: int) -> Generator[int, None, Tensor]:
    """Train at weights W (M, N), b at a time, and measure: only b final states are ever held."""
    found = []
    for rows in W.split(b):
        ends = yield from final_states(run, rows, b)
        found.append(measured(run, queries, ends))
    return torch.cat(found)


def weightings(run: Run, weights: Any) -> Tensor:
    """Data weights of many retrainings, (M, N), checked."""
    try:
        W = torch.as_tensor(weights).detach().to(run.weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"weights is not a matrix of numbers: {error}") from None
    if W.dim() != 2 or W.shape[1] != run.num_examples or len(W) == 0:
        raise ArgumentError(
            f"weights has shape {tuple(W.shape)}; give (M, {run.num_examples}): one row for each "
            "retraining, one weight for each training example"
        )
    if not bool(torch.isfinite(W).all()) or bool((W < 0).any()):
        raise ArgumentError(
            "weights must be finite and not negative (1 = present, 0 = removed) in every row"
        )
    return W


def final_states(run: Run, W: Tensor, together: int) -> Generator[int, None, Finals]:
    """Train at weights W (b, N), b at most ``together``; yields after each step.

    With ``together`` above 1, fewer rows are filled up with the run's own weights, so that the
    rounding of a row does not depend on how many came with it.
    """
    run.recipe.examples.check_unchanged()
    run.step.model.check_unchanged()
    if together == 1:
        return (yield from _alone(run, W))
    padding = run.weights.expand(together - len(W), -1)
    ends = yield from _together(run, torch.cat([W, padding]))
    return ends[: len(W)]


def _together(run: Run, W: Tensor) -> Generator[int, None, Finals]:
    step, b = run.step, len(W)
    states = ensemble.repeated(step.initial(), b)
    finite = torch.ones(b, dtype=torch.bool, device=W.device)
    with closing(step.batches.along(iter(range(run.num_steps)))) as batches:
        for t, batch in batches:
            run.trajectory.verify_batch(batch, t)
            states, still = ensemble.advance(step, states, t, W, batch)
            finite &= still
            yield t
    finite &= torch.isfinite(states.params.sum(1) + states.stats.sum(1))
    return Finals(states.params, states.stats, ~finite)


def _alone(run: Run, W: Tensor) -> Generator[int, None, Finals]:
    ends = []
    for w in W:
        if torch.equal(w, run.weights):
            state, diverged = run.final, False  # it would end in the same bits
        else:
            state, diverged = yield from _one(run, w)
        ends.append(
            Finals(state.params[None], state.stats[None], torch.tensor([diverged], device=w.device))
        )
    return Finals.concatenate(ends)


def _one(run: Run, w: Tensor) -> Generator[int, None, Any]:
    """Train at weights w (N,): the last state, and whether it diverged on the way."""
    step = run.step
    state, spare = step.initial(), None
    with closing(step.batches.along(iter(range(run.num_steps)))) as batches:
        for t, batch in batches:
            run.trajectory.verify_batch(batch, t)
            try:
                state, spare = step.advance(state, t, w, batch, spare), state
            except NumericalError:
                return state, True
            yield t
    return state, not bool(torch.isfinite(state.params.sum() + state.stats.sum()))


def measured(run: Run, queries: Queries, ends: Finals) -> Tensor:
    """f of every query at final states, (b, K), float64 on the CPU; NaN where they diverged."""
    measurement = queries.of(run)
    outputs = torch.full((len(ends.params), queries.num_queries), torch.nan, dtype=torch.float64)
    with run.computing():
        for j in (~ends.diverged).nonzero()[:, 0].tolist():
            outputs[j] = measurement.all_values(State(ends.params[j], ends.stats[j]))
    return outputs


_CANDIDATES = (8, 32, 128)
"""Numbers of retrainings at a time that are tried; what is gained beyond them is small."""

_WORTH = 0.95
"""A larger number has to take at most this share of the time of the best so far."""

_HOPELESS = 2.0
"""Where a number takes more than this, larger ones are not tried."""

_REPEATS = 3


def fastest(run: Run, count: int) -> int:
    """How many of ``count`` retrainings to do at a time: measured on the first step; 1 is alone.

    Cost: a few hundred gradients, of the model's first batch.
    """
    w, state, step = run.weights, run.step.initial(), run.step
    spare = step.initial()

    def alone() -> None:
        step.advance(state, 0, w, step.batches.load(0), spare)

    def together(states: State, W: Tensor) -> None:
        ensemble.advance(step, states, 0, W, step.batches.load(0))

    best, seconds = 1, _seconds(alone, run)
    most = min(count, _most(run))
    for b in sorted({min(b, most) for b in _CANDIDATES} - {1}):
        block = ensemble.repeated(state, b), w.repeat(b, 1)
        try:
            if best == 1 and not _agrees(run):
                break
            taken = _seconds(functools.partial(together, *block), run) / b
        except _CANNOT:
            break
        if taken > _HOPELESS * seconds:
            break
        if taken <= _WORTH * seconds:
            best, seconds = b, taken
    return block_size(count, best)


_CANNOT = (RuntimeError, NotImplementedError, TypeError, ValueError, MetasketchError)
"""What code raises that cannot be batched: it is then run as it is."""


def _most(run: Run) -> int:
    """Retrainings whose states and graphs fit into the memory budget of the run."""
    if run.budget.total is None:
        return max(_CANDIDATES)
    return max(1, run.budget.total // run.sizes.row(vmapped=True))


def _seconds(call: Callable[[], object], run: Run) -> float:
    """The least that a call takes, after a first one."""
    now, times = stopwatch(run.weights.device), []
    for _ in range(_REPEATS + 1):
        start = now()
        call()
        times.append(now() - start)
    return min(times[1:])


def _agrees(run: Run) -> bool:
    """Whether batched gradients of two weightings are those of each alone, to rounding."""
    step, state, w = run.step, run.step.initial(), run.weights
    other = w * torch.linspace(0.5, 1.5, len(w), dtype=w.dtype, device=w.device)
    both = torch.stack([w, other])
    batch = step.batches.load(0)
    part = next(parts(run.recipe, 0, batch, w))
    rows = run.recipe.order.batches[0].to(w.device)[part.rows]
    states = ensemble.repeated(state, 2)
    found = ensemble.gradients(step.function, part, states, both[:, rows]).g
    tolerance = 1e-8 if w.dtype == torch.float64 else 1e-4
    for weights, g in zip(both, found, strict=True):
        expected = gradient(step.function, next(parts(run.recipe, 0, batch, weights)), state).g
        gap = torch.linalg.vector_norm(g - expected)
        if not bool(gap <= tolerance * torch.linalg.vector_norm(expected)):
            return False
    return True
