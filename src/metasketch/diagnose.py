"""The doctor: will attributions of a run predict retraining? Asked before a budget is spent.

The linear prediction is compared with retraining where it will be used, for removals of 1 % and
5 % of the examples. One forward sweep along a removal predicts its effect on every query exactly as
the exact rows would, so the comparison gives the LDS of exact rows, the ceiling of every method:

    LDS_q = Spearman over S of (-Y w_S, f_q(w - w_S) - f_q(w)),    Y w_S = Vᵀ (J w_S)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from metasketch import symptoms
from metasketch.errors import ArgumentError
from metasketch.influence import Array
from metasketch.jackknife import jackknife
from metasketch.metrics import rank_correlation
from metasketch.quality import Interval
from metasketch.queries import Queries, check_outputs
from metasketch.query_gradients import QueryGradients
from metasketch.remedies import remedies
from metasketch.removals import draw
from metasketch.retrain import retrained
from metasketch.run import Run
from metasketch.sizes import parse_bytes
from metasketch.symptoms import Finding
from metasketch.verdict import Verdict, judged

FRACTIONS = (0.01, 0.05)

LEVEL = 0.9

_ENOUGH = 32
"""Removals of each fraction that make a verdict as good as need be."""


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found. Printing it gives the verdict, the checks, and what to change.

    Attributes:
        verdict: what the run carries from now on.
        ceilings: predicted LDS of exact rows by fraction removed, with an interval.
        along: cosine of predicted and true changes along random directions of all weights, of the
            same size as the smaller removal, mean over queries.
        findings: of the other checks.
        advice: knobs to turn, where the run did not pass.
        predicted, true: changes of every query for each removal, (M, K), in the order of the
            fractions.
        diverged: retrainings that did, and were left out.
    """

    verdict: Verdict
    ceilings: Mapping[float, Interval]
    along: float
    findings: tuple[Finding, ...] = field(repr=False)
    advice: tuple[str, ...] = field(repr=False)
    predicted: Array = field(repr=False)
    true: Array = field(repr=False)
    diverged: int = 0

    @property
    def passed(self) -> bool:
        """Whether a budget is well spent on this run."""
        return self.verdict.passed

    @property
    def score(self) -> float:
        """Predicted LDS of exact rows."""
        return self.verdict.score

    def __str__(self) -> str:
        lines = [f"The run is {self.verdict}.", ""]
        for p, ceiling in self.ceilings.items():
            lines.append(f"  LDS of exact rows, {100 * p:g} % removed   {ceiling}")
        lines.append(f"  along random directions          {self.along:.3f}")
        lines += ["", *(f"  {finding}" for finding in self.findings)]
        if self.diverged:
            lines.append(f"  {self.diverged} retrainings diverged and were left out")
        if self.advice:
            lines += ["", "What to change, the first first:"]
            lines += [f"  - {knob}" for knob in self.advice]
        return "\n".join(lines)


def diagnose(
    run: Run,
    queries: Queries,
    retrainings: int = 8,
    fractions: Sequence[float] = FRACTIONS,
    *,
    precision: bool = True,
    seed: int = 0,
    memory: int | float | str = "4GiB",
    progress: bool | None = None,
) -> Diagnosis:
    """Check a run before a budget is spent on it.

    Args:
        run: the training run; it carries the verdict afterwards, in its store too.
        queries: what would be attributed; a hundred of them are enough.
        retrainings: removals in all, shared evenly by the fractions: 8 give a quick verdict, 64
            one that is within about 0.1 of the truth.
        fractions: shares of the examples that are removed; the verdict is on the first.
        precision: train in float64 besides, and compare: this triples the memory of a state.
        seed: of removals and directions.
        memory: budget for the queries' gradients: see `Queries.gram`.
        progress: show bars; by default on a terminal.

    Returns:
        The diagnosis. Cost: as many retrainings, 3 more (and 3 in float64), one forward sweep for
        each, and one replay; sweeps go in blocks, and small retrainings side by side.
    """
    sizes = _sizes(run, retrainings, fractions)
    outputs = queries.values(run)
    check_outputs(queries, outputs)
    each = retrainings // len(sizes)
    masks = _masks(run, sizes, each, seed)
    w = run.weights.cpu()
    directions = symptoms.signs(run.num_examples, 2, seed).to(masks) * w
    with run.computing():
        V = QueryGradients(queries.of(run), parse_bytes(memory, "memory"))
        bar = V.combine(symptoms.signs(V.num_queries, 1, seed).T / V.num_queries)
        row = run.replay(run.named(bar), progress=progress)
        size = torch.linalg.vector_norm(row).clamp(min=torch.finfo(row.dtype).tiny)
        sent = torch.cat([masks * w, directions, (row / size).cpu()])
        tangents = run.flat(run.forward(sent.to(run.weights), progress=progress))
        predicted = V.pair(tangents[:-1]).T  # (M + 2, K)
    step = fractions[0] ** 0.5
    W = torch.cat([w * (1 - masks), w + step * directions])
    found = retrained(run, queries, W, progress=progress)
    true, M = found.delta, len(masks)
    expected = torch.cat([-predicted[:M], step * predicted[M:]])
    kept = ~found.diverged
    ceilings = {
        p: _ceiling(expected[part][kept[part]], true[part][kept[part]])
        for p, part in _parts(fractions, each).items()
    }
    findings = [
        symptoms.replays(run, progress),
        symptoms.adjoint(run, bar[0], row[0], tangents[-1] * size),
        *(symptoms.precise(run, queries, directions[0], predicted[M]) if precision else ()),
        symptoms.loss_scale(run),
        symptoms.interpolated(run, queries),
    ]
    verdict = _verdict(ceilings, fractions[0], retrainings, findings)
    run.judge(verdict)
    return Diagnosis(
        verdict,
        ceilings,
        _cosine(expected[M:][kept[M:]], true[M:][kept[M:]]),
        tuple(findings),
        _advice(run, verdict, each),
        expected[:M][kept[:M]].numpy(),
        true[:M][kept[:M]].numpy(),
        int(found.diverged.sum()),
    )


def _sizes(run: Run, retrainings: int, fractions: Sequence[float]) -> list[int]:
    """Examples that are removed at a time, for each fraction."""
    if not fractions:
        raise ArgumentError("fractions is empty: name the shares of the examples to remove")
    N, least = run.num_examples, 4 * len(fractions)
    whole = isinstance(retrainings, int) and not isinstance(retrainings, bool)
    if not whole or retrainings < least:
        raise ArgumentError(
            f"retrainings={retrainings!r}: a whole number of at least {least}, four for each "
            "fraction; 8 are quick, 64 are thorough"
        )
    for p in fractions:
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p < 1:
            raise ArgumentError(f"fractions names {p!r}: a share lies between 0 and 1")
    return [min(max(round(p * N), 1), N - 1) for p in fractions]


def _masks(run: Run, sizes: Sequence[int], each: int, seed: int) -> Tensor:
    """1 where an example is removed, (M, N), float64, on the CPU."""
    subsets = [S for size in sizes for S in draw(run.num_examples, size, each, seed)]
    masks = torch.zeros(len(subsets), run.num_examples, dtype=run.weights.dtype)
    for mask, S in zip(masks, subsets, strict=True):
        mask[S] = 1.0
    return masks


def _parts(fractions: Sequence[float], each: int) -> dict[float, slice]:
    return {p: slice(i * each, (i + 1) * each) for i, p in enumerate(fractions)}


def _ceiling(expected: Tensor, true: Tensor) -> Interval:
    """Mean LDS over queries, with an interval over removals."""
    x, y = expected.numpy(), true.numpy()
    if len(x) < 4:
        return Interval(float("nan"), -1.0, 1.0)

    def mean(kept: Array) -> Array:
        return np.array(rank_correlation(x[kept], y[kept]).mean())

    ends = jackknife(mean, len(x), LEVEL)
    estimate, low, high = (float(np.clip(end, -1.0, 1.0)) for end in ends)
    return Interval(estimate, low, high)


def _cosine(expected: Tensor, true: Tensor) -> float:
    """Mean over queries of the cosine of predicted and true changes."""
    inner = (expected * true).sum(0)
    sizes = (expected.square().sum(0) * true.square().sum(0)).sqrt()
    return float((inner / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)).mean())


def _verdict(
    ceilings: Mapping[float, Interval], p: float, retrainings: int, findings: Sequence[Finding]
) -> Verdict:
    at = ceilings[p]
    sound = all(f.passed is not False for f in findings if f.name in ("replay", "adjoint"))
    score = 0.0 if np.isnan(at.estimate) else at.estimate
    return Verdict(judged(at.low, at.high), score, at.low, at.high, p, retrainings, sound)


def _advice(run: Run, verdict: Verdict, each: int) -> tuple[str, ...]:
    if verdict.word == "smooth":
        return ()
    if verdict.word == "unclear" and each < _ENOUGH:
        return (f"ask again with retrainings={_ENOUGH * 2}: these are too few to tell",)
    return remedies(run.recipe)
