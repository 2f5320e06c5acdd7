"""The doctor's single checks: each looks at one thing and says what it found.

replay         the training, taken again, gives the same bits
adjoint        ⟨s, J u⟩ = ⟨Jᵀ s, u⟩: the two modes are transposes of each other
precision      single precision gives the derivatives of double precision
difference     (f(w + hu) - f(w - hu)) / 2h = Y u, in float64
loss scale     losses and gradients are of sizes that arithmetic likes
interpolated   queries whose measurement single precision cannot tell from zero
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metasketch import optim
from metasketch.double import doubled
from metasketch.errors import MetasketchError, MismatchError
from metasketch.gradient import gradient, parts
from metasketch.measurement import Measurement
from metasketch.progress import drive
from metasketch.queries import Queries
from metasketch.query_gradients import QueryGradients
from metasketch.randomness import generator
from metasketch.recipe import Recipe
from metasketch.retrain import retrained
from metasketch.run import Run
from metasketch.train import train

F64 = torch.float64

ADJOINT = {torch.float32: 1e-3, F64: 1e-8}
PRECISION = 0.02
DIFFERENCE = 0.02
"""Relative errors up to which a check passes."""

_SAME_FUNCTION = 1e-3
"""How far apart the first step's losses may be in two precisions, relative to their size."""

_LOSS = 1e-6, 1e6
_GRADIENT = 1e-25
"""Sizes of mean losses and of gradients beyond which single precision loses digits."""

_READ = 0.01
"""Relative error of a query in float32 from which on it counts as interpolated."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: of the check.
        passed: None where it could not be made, or only informs.
        value: what was measured, smaller is better, where there is a number.
        words: for a person.
    """

    name: str
    passed: bool | None
    value: float | None
    words: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAILED", None: "note"}[self.passed]
        return f"{self.name:<13} {mark:<7} {self.words}"


def replays(run: Run, progress: bool | None = None) -> Finding:
    """Take the whole training again. Cost: 1, in units of training."""
    with run.computing():
        try:
            drive(run.trajectory.verify(), run.num_steps, "training again", progress)
        except MismatchError as error:
            return Finding("replay", False, None, str(error))
    return Finding("replay", True, 0.0, "the training, taken again, gives the same bits")


def adjoint(run: Run, bar: Tensor, row: Tensor, tangent: Tensor) -> Finding:
    """Compare ⟨bar, J row⟩ with ‖row‖², where row = barᵀ J.

    Args:
        bar: a cotangent, (P + R,).
        row: its replay, (N,).
        tangent: the forward sweep along the row, (P + R,).
    """
    left, right = (bar.double() * tangent.double()).sum(), row.double().square().sum()
    gap = float((left - right).abs() / right) if float(right) > 0 else 0.0
    passed = gap < ADJOINT.get(run.final.params.dtype, 1e-3)
    words = f"reverse and forward mode agree to {gap:.1e}"
    if not passed:
        words += ": one of them is wrong here; please report the model's layers"
    return Finding("adjoint", passed, gap, words)


def precise(
    run: Run, queries: Queries, u: Tensor, Y_u: Tensor, h: float = 1e-3
) -> tuple[Finding, Finding]:
    """Train in float64, and compare: Y u of both, and Y u with a finite difference of retraining.

    Args:
        u: a direction, (N,), whose entries are not larger than the run's weights.
        Y_u: of the run, (K,).
        h: step of the difference.

    Cost: three trainings and one sweep in float64.
    """
    try:
        twin = _twin(run)
    except _DiffersError as reason:
        return tuple(  # type: ignore[return-value]
            Finding(name, None, None, str(reason)) for name in ("precision", "difference")
        )
    with twin.computing():
        V = QueryGradients(queries.of(twin))
        exact = V.pair(twin.flat(twin.forward(u[None].to(twin.final.params), progress=False)))[:, 0]
    W = twin.weights + h * torch.stack([u, -u]).to(twin.weights)
    ends = retrained(twin, queries, W, progress=False).outputs
    gap, off = _relative(Y_u, exact), _relative((ends[0] - ends[1]) / (2 * h), exact)
    words = f"derivatives in {_called(run)} are those of float64 to {gap:.1e}"
    if gap >= PRECISION:
        words += ": training amplifies rounding; train in float64, or make it smoother"
    if run.final.params.dtype == F64:
        words = "the run is in float64"
    said = f"a finite difference of retraining agrees to {off:.1e} (step {h:g}, float64)"
    if not off < DIFFERENCE:
        said += ": the run bends within so small a step, or its derivative is wrong"
    return (
        Finding("precision", gap < PRECISION, gap, words),
        Finding("difference", off < DIFFERENCE, off, said),
    )


class _DiffersError(Exception):
    """Why a run has no twin in float64."""


def _twin(run: Run) -> Run:
    """The run in float64; refused where its first step is another one."""
    if run.final.params.dtype == F64:
        return run
    budget = run.budget.total or f"{run.budget.states} states"
    try:
        other = doubled(run.recipe)
        losses, twins = _losses(run), _losses(train(_first_step(other), run.weights, "2 states"))
    except (MetasketchError, RuntimeError, TypeError) as error:
        raise _DiffersError(f"does not train in float64: {str(error).splitlines()[0]}") from None
    if not bool((losses - twins).norm() <= _SAME_FUNCTION * twins.norm()):
        raise _DiffersError(
            "not compared: in float64 the first step has other losses (other random masks, or a "
            "precision that is written into the code)"
        )
    return train(other, run.weights, budget, progress=False)


def _first_step(recipe: Recipe) -> Recipe:
    first = [recipe.order.batches[0]]
    return replace(recipe, batches=first, batch_size=None, epochs=None, schedule=None)


def _losses(run: Run) -> Tensor:
    """Of the first step's first microbatch, (m,)."""
    return _step_at(run, 0)[0].double()


def _step_at(run: Run, t: int) -> tuple[Tensor, Tensor]:
    """Losses and gradient of the first microbatch of step t, at the first or the last state."""
    with run.computing():
        step = run.step
        state = step.initial() if t == 0 else run.final
        part = next(parts(run.recipe, t, step.batches.load(t), run.weights))
        found = gradient(step.function, part, state)
    return found.losses, found.g


def _relative(found: Tensor, exact: Tensor) -> float:
    """The median over queries of the relative error, beside their typical size."""
    size = exact.abs()
    return float(((found - exact).abs() / size.clamp(min=1e-300)).median())


def _called(run: Run) -> str:
    return str(run.final.params.dtype).removeprefix("torch.")


def loss_scale(run: Run) -> Finding:
    """Sizes of the loss and its gradient at both ends of the run. Cost: two gradients."""
    sizes = []
    for t in (0, run.num_steps - 1):
        losses, g = _step_at(run, t)
        sizes.append((float(losses.mean()), float(g.abs().max())))
    (first, _), (last, _) = sizes
    words = f"mean loss {first:.3g} at the start, {last:.3g} at the end"
    low, high = _LOSS
    if not low < abs(first) < high:
        return Finding("loss scale", False, abs(first), f"{words}: scale the loss to a size near 1")
    if min(g for _, g in sizes) < _GRADIENT:
        words += ": gradients vanish in single precision"
        return Finding("loss scale", False, min(g for _, g in sizes), words)
    optimizer = run.recipe.optimizer
    if isinstance(optimizer, optim.Adam) and optimizer.eps_root == 0:
        moments = run.final.slots["exp_avg_sq"]
        share = float((moments.sqrt() < 10 * optimizer.eps).double().mean())
        if share > 0.1:
            words += (
                f"; in {100 * share:.0f} % of the parameters Adam's step is decided by eps, where "
                "it is not smooth: set eps_root"
            )
            return Finding("loss scale", False, share, words)
    return Finding("loss scale", True, abs(first), words)


def interpolated(run: Run, queries: Queries) -> Finding:
    """Queries that float32 reads wrongly. Cost: one forward pass over the queries."""
    with run.computing():
        exact = queries.of(run).all_values()
        try:
            coarse = Measurement(run, queries.examples, queries.measure, torch.float32).all_values()
        except MetasketchError as error:
            return Finding("interpolated", None, None, str(error))
    count = int(((coarse - exact).abs() > _READ * exact.abs()).sum())
    words = f"{count} of {queries.num_queries} queries are read wrongly in float32"
    if count:
        words += ": metasketch measures in float64, and so must whoever checks them"
    return Finding("interpolated", None, count / queries.num_queries, words)


def signs(N: int, count: int, seed: int) -> Tensor:
    """Directions of random signs, (count, N)."""
    rows = [torch.randint(2, (N,), generator=generator(seed, "doctor", j)) for j in range(count)]
    return 2.0 * torch.stack(rows).double() - 1.0
