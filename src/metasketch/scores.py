"""Scores as small records, for tables and figures: one for each estimate that was judged.

A file of them is JSON that a person can read; experiments write it, `metasketch.tables` and
`metasketch.plots` read it.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from metasketch import files
from metasketch.errors import ArgumentError, StoreError
from metasketch.geometry import Geometry
from metasketch.influence import Influence
from metasketch.metrics import by_quartile, lds, per_query_error, relative_error, row_norms
from metasketch.removals import Removals

FORMAT = "metasketch-scores"
VERSION = 1


@dataclass(frozen=True)
class Score:
    """How one estimate did.

    Attributes:
        problem: what was trained.
        seed: of the problem; means and standard errors are over seeds.
        method: what made the estimate: one of `metasketch.methods`, "oracle-svd",
            "oracle-spherical"; "exact" is the ceiling, MAGIC.
        num_queries: k.
        budget: B; k for the exact matrix.
        fraction: share of examples that were removed.
        lds: mean over queries.
        relative_error, per_query_error: Frobenius, and the mean over queries.
        lds_quartiles, error_quartiles: by row norm, Q1 (the smallest) to Q4; empty below 4 queries.
        sweeps: what it cost, replays and forward passes together.
    """

    problem: str
    seed: int
    method: str
    num_queries: int
    budget: int
    fraction: float
    lds: float
    relative_error: float
    per_query_error: float
    lds_quartiles: tuple[float, ...] = ()
    error_quartiles: tuple[float, ...] = ()
    sweeps: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lds_quartiles", "error_quartiles"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def share(self) -> float:
        """B / k."""
        return self.budget / self.num_queries


@dataclass(frozen=True)
class RowNorms:
    """The row norms of one exact matrix: what the geometry figure needs.

    Attributes:
        problem, seed: as in `Score`.
        norms: ‖Y_q‖, (K,).
        gradient_correlation: see `metasketch.geometry.Geometry`.
    """

    problem: str
    seed: int
    norms: tuple[float, ...] = field(repr=False)
    gradient_correlation: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "norms", tuple(self.norms))

    @property
    def geometry(self) -> Geometry:
        return Geometry(np.array(self.norms), self.gradient_correlation)


def score(
    influence: Influence,
    Y: Any,
    removals: Removals,
    *,
    problem: str,
    seed: int,
    fraction: float,
    method: str | None = None,
) -> Score:
    """Judge one estimate by every measure.

    Args:
        influence: the estimate.
        Y: the exact matrix (K, N), or an `Influence` that holds it.
        removals: true effects, for the LDS.
        problem, seed, fraction: see `Score`.
        method: its name there; by default ``influence.method``.
    """
    scores, errors = lds(influence, removals), per_query_error(influence, Y)
    norms = row_norms(Y)
    enough = len(norms) >= 4
    return Score(
        problem=problem,
        seed=seed,
        method=method or influence.method,
        num_queries=influence.num_queries,
        budget=influence.budget or influence.num_queries,
        fraction=fraction,
        lds=float(scores.mean()),
        relative_error=relative_error(influence, Y),
        per_query_error=float(errors.mean()),
        lds_quartiles=tuple(by_quartile(scores, norms).tolist()) if enough else (),
        error_quartiles=tuple(by_quartile(errors, norms).tolist()) if enough else (),
        sweeps=float(sum(influence.sweeps.values())),
    )


def write_scores(
    path: str | os.PathLike[str],
    scores: Iterable[Score],
    geometries: Iterable[RowNorms] = (),
    about: str = "",
) -> None:
    """Write records as one JSON file, in a fixed order.

    Args:
        about: what was measured, when, and by which command.
    """
    ordered = sorted(scores, key=lambda s: (s.problem, s.seed, s.num_queries, s.fraction,
                                            s.budget, s.method))  # fmt: skip
    content = {
        "format": FORMAT,
        "version": VERSION,
        "about": about,
        "scores": [_rounded(asdict(s)) for s in ordered],
        "geometries": [_rounded(asdict(g)) for g in geometries],
    }
    files.write_json(Path(path), content)


def read_scores(path: str | os.PathLike[str]) -> tuple[list[Score], list[RowNorms]]:
    """The records of a file."""
    source = Path(path)
    try:
        content = files.read_json(source, "write it again")
    except FileNotFoundError:
        raise StoreError(f"{source} does not exist: write_scores makes it") from None
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise StoreError(f"{source} holds no scores of version {VERSION}")
    try:
        return (
            [Score(**record) for record in content["scores"]],
            [RowNorms(**record) for record in content["geometries"]],
        )
    except (KeyError, TypeError) as error:
        raise StoreError(f"{source} is damaged ({error}): write it again") from None


def _rounded(value: Any) -> Any:
    """Numbers to six digits: more would be noise in a file that is kept."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, with its standard error (NaN for a single one)."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        found = np.asarray(values, dtype=np.float64)
        error = found.std(ddof=1) / np.sqrt(len(found)) if len(found) > 1 else np.nan
        return cls(float(found.mean()), float(error), len(found))

    def __str__(self) -> str:
        if np.isnan(self.error):
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.error:.3f}"


def means(
    scores: Iterable[Score], by: Sequence[str], value: str | Callable[[Score], float]
) -> dict[tuple[Hashable, ...], Mean]:
    """Means over seeds of a value, for every combination of some attributes.

    >>> few = [Score("p", seed, "mage", 4, 2, 0.01, seed / 4, 0.5, 0.5) for seed in (1, 3)]
    >>> means(few, ["method", "share"], "lds")[("mage", 0.5)]
    Mean(mean=0.5, error=0.25, count=2)
    """
    names = {f.name for f in fields(Score)} | {"share"}
    if isinstance(value, str) and value not in names:
        raise ArgumentError(f"{value!r} is no attribute of a score; it has {sorted(names)}")
    groups: dict[tuple[Hashable, ...], list[tuple[int, float]]] = {}
    for s in scores:
        found = getattr(s, value) if isinstance(value, str) else value(s)
        groups.setdefault(tuple(getattr(s, name) for name in by), []).append((s.seed, found))
    for key, pairs in groups.items():
        seeds = [seed for seed, _ in pairs]
        if len(set(seeds)) < len(seeds):
            raise ArgumentError(
                f"several scores of one seed fall into one group {dict(zip(by, key, strict=True))}:"
                " name more attributes, or choose among the scores first"
            )
    return {key: Mean.of([v for _, v in pairs]) for key, pairs in groups.items()}


def one_fraction(scores: Sequence[Score]) -> list[Score]:
    """The scores at the smallest fraction removed of each problem: errors are the same at all."""
    least: dict[str, float] = {}
    for s in scores:
        least[s.problem] = min(s.fraction, least.get(s.problem, s.fraction))
    return [s for s in scores if s.fraction == least[s.problem]]
