"""The result: how much each training example matters to each query, as two factors.

    Ŷ = C Q,    Ŷ[q, i] ≈ ∂f_q / ∂w_i,    C (K, r),  Q (r, N)

A positive entry means that more weight on example i raises the measurement of query q, so removing
the example lowers it by about that much. The matrix Ŷ itself, K × N, is made only when asked for.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from metasketch import files
from metasketch.errors import ArgumentError, StoreError
from metasketch.quality import Quality
from metasketch.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Array = np.ndarray[Any, Any]
Kind = Literal["helpful", "harmful"]
Better = Literal["lower", "higher"]

FORMAT = "metasketch-influence"
VERSION = 1
SIGN = (
    "score[q, i] = d(measurement of query q) / d(weight of example i): positive means that more "
    "weight on the example raises the measurement; removing it changes the measurement by about "
    "-score * weight"
)
UNITS = "units of the measurement for one unit of data weight (1 = present, 0 = removed)"


@dataclass(frozen=True, eq=False)
class Influence:
    """Influence of N training examples on K queries, in factored form.

    Attributes:
        coefficients: C, (K, r), float64.
        basis: Q, (r, N), float64.
        method: what made it, see `metasketch.methods`.
        better: which values of the measurement are good: it decides what helpful means.
        outputs: the queries' measurements at the run's weights, (K,), where known.
        weights: data weights at which the derivative was taken, (N,); ones by default.
        budget: B, where there was one.
        sweeps: what it cost: replays, forward passes, and the prior, each in sweeps.
        quality: estimated quality of each query's scores, where it was audited: see
            `metasketch.audit`.
        facts: what was trained and asked: digests of the recipe, the data, the queries.
        notes: remarks on how it came about, in words.
        query_ids, example_ids: their names, where there are any.
        query_looks, example_looks: what ``show`` of the queries and the recipe makes of them, by
            number, for a report; a file does not hold these.
    """

    coefficients: Array = field(repr=False)
    basis: Array = field(repr=False)
    method: str = "unknown"
    better: Better = "lower"
    outputs: Array | None = field(default=None, repr=False)
    weights: Array | None = field(default=None, repr=False)
    budget: int | None = None
    sweeps: Mapping[str, float] = field(default_factory=dict)
    quality: Quality | None = field(default=None, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    query_ids: tuple[str, ...] | None = field(default=None, repr=False)
    example_ids: tuple[str, ...] | None = field(default=None, repr=False)
    query_looks: Callable[[int], Any] | None = field(default=None, repr=False)
    example_looks: Callable[[int], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        C, Q = (_matrix(x, name) for x, name in ((self.coefficients, "C"), (self.basis, "Q")))
        if C.shape[1] != Q.shape[0]:
            raise ArgumentError(
                f"the factors do not fit: coefficients {C.shape} and basis {Q.shape}; they must "
                "be (K, r) and (r, N)"
            )
        if self.better not in get_args(Better):
            raise ArgumentError(f"better={self.better!r}: give one of {list(get_args(Better))}")
        object.__setattr__(self, "coefficients", C)
        object.__setattr__(self, "basis", Q)
        for name, length in (("outputs", len(C)), ("weights", Q.shape[1])):
            object.__setattr__(self, name, _vector(getattr(self, name), name, length))
        for name, length in (("query_ids", len(C)), ("example_ids", Q.shape[1])):
            object.__setattr__(self, name, _names(getattr(self, name), name, length))

    @classmethod
    def from_factors(cls, coefficients: Any, basis: Any, **about: Any) -> "Influence":
        """An influence from any two arrays or tensors (K, r) and (r, N)."""
        return cls(coefficients, basis, **about)

    @classmethod
    def from_dense(cls, Y: Any, **about: Any) -> "Influence":
        """An influence from a whole matrix (K, N), by the smaller of the two trivial factorings."""
        Y = _matrix(Y, "Y")
        K, N = Y.shape
        if K <= N:
            return cls(np.eye(K), Y, **about)
        return cls(Y, np.eye(N), **about)

    @property
    def num_queries(self) -> int:
        """K."""
        return len(self.coefficients)

    @property
    def num_examples(self) -> int:
        """N."""
        return int(self.basis.shape[1])

    @property
    def rank(self) -> int:
        """r, the number of columns of C."""
        return int(self.basis.shape[0])

    def rows(self, queries: Any) -> Array:
        """Scores of some queries, (b, N): numbers, names, or a slice of them."""
        rows: Array = self.coefficients[self._places(queries, "query")] @ self.basis
        return rows

    def row(self, query: int | str) -> Array:
        """Scores of every example for one query, (N,)."""
        return self.rows([query])[0]  # type: ignore[no-any-return]

    def dense(self) -> Array:
        """Ŷ, (K, N): K × N numbers of 8 bytes, which nothing else here needs."""
        Y: Array = self.coefficients @ self.basis
        return Y

    def top(
        self, query: int | str, n: int = 10, kind: Kind = "helpful"
    ) -> list[tuple[int | str, float]]:
        """The examples that matter most to a query, the strongest first: [(example, score), ...].

        With ``better="lower"`` (a loss) an example is helpful where its score is negative: more
        weight on it lowers the loss, and removing it raises the loss. Only examples of the asked
        kind are named, so there may be fewer than n.

        Args:
            query: its number, or its name.
            n: how many examples.
            kind: "helpful": without it the measurement would be worse; "harmful": better.

        Returns:
            Example (its name, where examples have names) and score Ŷ[q, i].
        """
        if kind not in get_args(Kind):
            raise ArgumentError(f"kind={kind!r}: give one of {list(get_args(Kind))}")
        if n < 0:
            raise ArgumentError(f"n={n}: must not be negative")
        scores = self.row(query)
        wanted = self._helpfulness(scores) * (1 if kind == "helpful" else -1)
        order = np.argsort(-wanted, kind="stable")[:n]
        return [(self._example(i), float(scores[i])) for i in order.tolist() if wanted[i] > 0]

    def harmfulness(self) -> Array:
        """How harmful each example is to all queries together, (N,): the effect of its presence.

        Summed over queries, in units of the measurement, positive where removing the example
        makes the measurements better. Mislabelled examples stand at the top.
        """
        total = self._helpfulness(self.coefficients.sum(0) @ self.basis)
        harm: Array = -total * self._at()
        return harm

    def predict(self, weights: Any) -> Array:
        """Predicted change of every measurement when training has these weights instead.

            f_q(w') - f_q(w) ≈ Σ_i Ŷ_qi (w'_i - w_i)

        Args:
            weights: w', (N,) or (M, N).

        Returns:
            (K,) or (M, K).
        """
        w = _array(weights, "weights")
        if w.shape[-1:] != (self.num_examples,) or w.ndim > 2:
            raise ArgumentError(
                f"weights has shape {w.shape}; give one weight for each of the "
                f"{self.num_examples} examples, ({self.num_examples},) or (M, {self.num_examples})"
            )
        if not np.isfinite(w).all():
            raise ArgumentError("weights holds NaN or infinity")
        change: Array = (w - self._at()) @ self.basis.T @ self.coefficients.T
        return change

    def predict_removal(self, removed: Any) -> Array:
        """Predicted change of every measurement when training goes without some examples.

            Δ̂_q(S) = - Σ_{i in S} w_i Ŷ_qi

        Args:
            removed: one set S: numbers or names of examples, or a mask (N,) of booleans, giving
                (K,); or many: (M, size) numbers, a mask (M, N), or a list of sets, giving (M, K).

        Returns:
            (K,) or (M, K). Positive: the measurement rises without those examples.
        """
        sets, single = self._sets(removed)
        at = self._at()
        sums = np.array([self.basis[:, S] @ at[S] for S in sets]).reshape(len(sets), self.rank)
        change: Array = -(sums @ self.coefficients.T)
        return change[0] if single else change

    def by_group(self, labels: Any) -> Array:
        """Scores summed over groups of examples, (K, num_groups).

        Args:
            labels: the group of each example, (N,): class, source, author. The columns of the
                result are in the order of ``numpy.unique(labels)``.
        """
        found = np.asarray(labels)
        if found.shape != (self.num_examples,):
            raise ArgumentError(
                f"labels has shape {found.shape}; give the group of each of the "
                f"{self.num_examples} examples"
            )
        groups, member = np.unique(found, return_inverse=True)
        summed = np.zeros((self.rank, len(groups)))
        np.add.at(summed.T, member, self.basis.T)
        scores: Array = self.coefficients @ summed
        return scores

    def table(self, n: int | None = 10, kind: Kind | None = None) -> dict[str, list[Any]]:
        """The strongest scores of each query as columns, for pandas, pyarrow or a file.

        Args:
            n: examples for each query (and kind); None for all of them.
            kind: "helpful", "harmful", or both.
        """
        kinds: tuple[Kind, ...] = get_args(Kind) if kind is None else (kind,)
        n = self.num_examples if n is None else n
        columns: dict[str, list[Any]] = {
            name: [] for name in ("query", "kind", "example", "score", "effect_of_removal")
        }
        at, place = self._at(), _index(self.example_ids)
        for q in range(self.num_queries):
            name = self.query_ids[q] if self.query_ids else q
            for each in kinds:
                for example, score in self.top(q, n, each):
                    i = place[example] if isinstance(example, str) else example
                    row = (name, each, example, score, -score * float(at[i]))
                    for column, value in zip(columns.values(), row, strict=True):
                        column.append(value)
        return columns

    def to_pandas(self, n: int | None = 10, kind: Kind | None = None) -> "pd.DataFrame":
        """`table` as a pandas frame (needs pandas)."""
        import pandas as pd

        return pd.DataFrame(self.table(n, kind))

    def to_arrow(self, n: int | None = 10, kind: Kind | None = None) -> "pa.Table":
        """`table` as a pyarrow table (needs pyarrow), with sign and units in its metadata."""
        import pyarrow as pa

        said = {"sign": SIGN, "units": UNITS, "method": self.method}
        return pa.table(self.table(n, kind)).replace_schema_metadata(said)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; docs/formats.md describes it. Returns its path."""
        target = Path(path).expanduser()
        tensors = {"coefficients": self.coefficients, "basis": self.basis}
        for name in ("outputs", "weights"):
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name)
        notes = {
            "format": FORMAT,
            "version": VERSION,
            "metasketch": __version__,
            "sign": SIGN,
            "units": UNITS,
            "method": self.method,
            "better": self.better,
            "budget": self.budget,
            "sweeps": dict(self.sweeps),
            "quality": None if self.quality is None else self.quality.facts(),
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "query_ids": self.query_ids,
            "example_ids": self.example_ids,
        }
        files.write_tensors(target, {k: torch.from_numpy(v) for k, v in tensors.items()}, notes)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Influence":
        """Read what `save` wrote, verified."""
        source = Path(path).expanduser()
        tensors, notes = files.read_tensors(
            source, torch.device("cpu"), "make it again from its run, or from its store"
        )
        if notes.get("format") != FORMAT:
            raise StoreError(f"{source} is not an influence that metasketch saved")
        if notes.get("version") != VERSION:
            raise StoreError(
                f"{source} was written in version {notes.get('version')} of the format; this "
                f"metasketch reads version {VERSION}: use the one that wrote it "
                f"({notes.get('metasketch')})"
            )
        about: dict[str, Any] = {key: notes[key] for key in _SAVED}
        about["notes"] = tuple(about["notes"])
        if about["quality"] is not None:
            about["quality"] = Quality.of(about["quality"])
        for name in ("query_ids", "example_ids"):
            about[name] = None if about[name] is None else tuple(about[name])
        about |= {name: tensor.numpy() for name, tensor in tensors.items()}
        return cls(**about)

    @classmethod
    def concatenate(cls, parts: Sequence["Influence"]) -> "Influence":
        """One influence over the queries of several, which share a run.

        The ranks add up; the factors stay factors.
        """
        if not parts:
            raise ArgumentError("there is nothing to concatenate: give at least one influence")
        first = parts[0]
        for other in parts[1:]:
            _check_same_run(first, other)
        C = np.zeros((sum(p.num_queries for p in parts), sum(p.rank for p in parts)))
        row = column = 0
        for p in parts:
            C[row : row + p.num_queries, column : column + p.rank] = p.coefficients
            row, column = row + p.num_queries, column + p.rank
        kinds = sorted({key for p in parts for key in p.sweeps})
        return cls(
            C,
            np.concatenate([p.basis for p in parts]),
            method="+".join(dict.fromkeys(p.method for p in parts)),
            better=first.better,
            outputs=_joined([p.outputs for p in parts]),
            weights=first.weights,
            budget=sum(p.budget or 0 for p in parts) or None,
            sweeps={kind: sum(p.sweeps.get(kind, 0) for p in parts) for kind in kinds},
            facts={k: v for k, v in first.facts.items() if k not in QUERY_FACTS},
            notes=tuple(dict.fromkeys(note for p in parts for note in p.notes)),
            query_ids=_joined_ids(parts),
            example_ids=first.example_ids,
            query_looks=_joined_looks(parts),
            example_looks=first.example_looks,
        )

    def _helpfulness(self, scores: Array) -> Array:
        return -scores if self.better == "lower" else scores

    def _at(self) -> Array:
        return np.ones(self.num_examples) if self.weights is None else self.weights

    def _example(self, i: int) -> int | str:
        return self.example_ids[i] if self.example_ids else i

    def _places(self, given: Any, what: Literal["query", "example"]) -> Array:
        """Numbers of queries or examples that were given by number, name, mask or slice."""
        ids = self.query_ids if what == "query" else self.example_ids
        count = self.num_queries if what == "query" else self.num_examples
        if isinstance(given, slice):
            return np.arange(count)[given]
        found = np.asarray(_host(given))
        if found.ndim != 1:
            raise ArgumentError(f"give the {what} as a list of numbers or names; it is {given!r}")
        if found.dtype == bool:
            if len(found) != count:
                raise ArgumentError(f"a mask has one entry for each {what}: {count}")
            return np.flatnonzero(found)
        if found.dtype.kind in "US":
            places = _index(ids)
            if unknown := [str(name) for name in found if str(name) not in places]:
                raise ArgumentError(f"there is no {what} named {unknown[0]!r}")
            return np.array([places[str(name)] for name in found], dtype=np.int64)
        if found.size == 0:
            return found.astype(np.int64)
        if found.dtype.kind not in "iu":
            raise ArgumentError(f"a {what} is a number or a name; it is {found.dtype}")
        bad = found[(found < 0) | (found >= count)]
        if len(bad):
            raise ArgumentError(f"there is no {what} {bad[0]}: there are {count}, from 0")
        return found.astype(np.int64)

    def _sets(self, removed: Any) -> tuple[list[Array], bool]:
        """The sets of removed examples, and whether only one was given."""
        given = _host(removed)
        if isinstance(given, np.ndarray) and given.ndim == 2:
            sets, single = list(given), False
        elif isinstance(given, list | tuple) and any(np.ndim(_host(x)) > 0 for x in given):
            sets, single = [_host(x) for x in given], False
        else:
            sets, single = [given], True
        places = [self._places(S, "example") for S in sets]
        for S in places:
            if len(np.unique(S)) < len(S):
                raise ArgumentError("a set of removed examples names an example twice")
        return places, single


QUERY_FACTS = ("queries", "query data", "measure", "better")
"""Facts that belong to the queries, not to the run: see `metasketch.Queries.facts`."""

_SAVED = (
    *("method", "better", "budget", "sweeps", "quality", "facts", "notes"),
    *("query_ids", "example_ids"),
)


def _host(value: Any) -> Any:
    """Tensors as arrays, sets as lists; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return sorted(value) if isinstance(value, set | frozenset) else value


def _array(value: Any, what: str) -> Array:
    try:
        return np.asarray(_host(value), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what} is not an array of numbers: {error}") from None


def _matrix(value: Any, what: str) -> Array:
    matrix = _array(value, what)
    if matrix.ndim != 2:
        raise ArgumentError(f"{what} has shape {matrix.shape}; it must be a matrix")
    if not np.isfinite(matrix).all():
        raise ArgumentError(f"{what} holds NaN or infinity")
    return matrix


def _vector(value: Any, what: str, length: int) -> Array | None:
    if value is None:
        return None
    vector = _array(value, what)
    if vector.shape != (length,):
        raise ArgumentError(f"{what} has shape {vector.shape}; it must be ({length},)")
    return vector


def _names(value: Any, what: str, length: int) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(str(name) for name in value)
    if len(names) != length:
        raise ArgumentError(f"{what} has {len(names)} names for {length}")
    return names


def _index(ids: tuple[str, ...] | None) -> dict[str, int]:
    return {name: place for place, name in enumerate(ids or ())}


def _joined(parts: Sequence[Array | None]) -> Array | None:
    known = [p for p in parts if p is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def _joined_ids(parts: Sequence[Influence]) -> tuple[str, ...] | None:
    if any(p.query_ids is None for p in parts):
        return None
    return tuple(name for p in parts for name in p.query_ids or ())


def _joined_looks(parts: Sequence[Influence]) -> Callable[[int], Any] | None:
    owners = [(p.query_looks, q) for p in parts for q in range(p.num_queries)]
    if all(looks is None for looks, _ in owners):
        return None

    def shown(query: int) -> Any:
        looks, q = owners[query]
        return None if looks is None else looks(q)

    return shown


def _check_same_run(first: Influence, other: Influence) -> None:
    if first.num_examples != other.num_examples:
        raise ArgumentError(
            f"these influences are over {first.num_examples} and {other.num_examples} examples: "
            "only query sets of one run can be put together"
        )
    if first.better != other.better:
        raise ArgumentError(
            f"one measurement is better when {first.better}, the other when {other.better}: keep "
            "them apart, since helpful means opposite signs in them"
        )
    names = {*first.facts, *other.facts} - set(QUERY_FACTS)
    differing = sorted(n for n in names if first.facts.get(n) != other.facts.get(n))
    if differing:
        raise ArgumentError(
            f"these influences are of different runs (they differ in {', '.join(differing)}): "
            "only query sets of one run can be put together"
        )
