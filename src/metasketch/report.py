"""The page to look at: what was found, in one HTML file that needs no network."""

import base64
import json
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from metasketch import files, webpage
from metasketch.data import Examples
from metasketch.diagnose import Diagnosis
from metasketch.errors import ArgumentError, MismatchError
from metasketch.geometry import Geometry
from metasketch.influence import Influence
from metasketch.looks import Look, look
from metasketch.metrics import lds, lds_interval
from metasketch.progress import drive
from metasketch.queries import Queries
from metasketch.recipe import Recipe
from metasketch.removals import Removals
from metasketch.sizes import format_bytes, parse_bytes
from metasketch.strongest import Effects, Strong, Strongest, strongest
from metasketch.verdict import Verdict

Array = np.ndarray[Any, Any]

MOST_QUERIES = 2000
"""Queries that a page lists."""


def report(
    influence: Influence,
    path: str | os.PathLike[str],
    *,
    recipe: Recipe | None = None,
    queries: Queries | None = None,
    title: str | None = None,
    noun: str | None = None,
    diagnosis: Diagnosis | Verdict | None = None,
    removals: Removals | None = None,
    n: int = 10,
    size: int | float | str = "30MB",
    progress: bool | None = None,
) -> Path:
    """Write a page that shows what was found: one HTML file, for any browser, without a network.

    It has what was trained and measured, the quality of the result, and each query with its most
    helpful and most harmful examples. Examples can be ticked, and the page predicts what removing
    them would do to every query:

        Δ̂_q(S) = - Σ_{i in S} w_i Ŷ_qi

    Args:
        influence: what `attribute` made, or `Influence.load` read.
        path: the file to write.
        recipe, queries: whose ``ids`` and ``show`` name and draw examples and queries. An influence
            that `attribute` has just made knows them; one that was loaded from a file does not.
        title: of the page.
        noun: what the measurement is called in sentences, such as "loss".
        diagnosis: what the doctor said of the run: see `metasketch.diagnose`, and ``run.verdict``.
        removals: models that were retrained, see `metasketch.evaluate.removals`: the page says how
            well the scores predict them, for every query.
        n: most helpful and most harmful examples of each query.
        size: of the file at most. Where not everything fits, the examples that matter least are
            there by name alone, and the page says how many.
        progress: show a bar; by default on a terminal.

    Returns:
        The path. Cost: K × N × rank multiplications, no training steps.
    """
    if n < 1:
        raise ArgumentError(f"n={n}: show at least one example of each kind")
    if influence.num_queries == 0 or influence.num_examples == 0:
        raise ArgumentError("there is nothing to show: the influence has no queries or no examples")
    budget = parse_bytes(size, "size")
    influence = _dressed(influence, recipe, queries)
    noun = noun or webpage.noun_of(influence)
    found = strongest(influence, n, MOST_QUERIES)
    scores, measured = _estimated(influence), None
    if removals is not None:
        scores = [(score,) for score in lds(influence, removals).tolist()]
        measured = lds_interval(influence, removals), removals.num_subsets
    geometry = Geometry(found.norms)
    head = webpage.head(influence, geometry, title, noun, diagnosis, measured)
    room = budget - len(webpage.page(head, [], ""))
    table = _Table(influence, found, noun, room, scores)
    data, left_out = drive(table.steps(), table.num_steps, "report", progress, "item")
    content = webpage.page(head, left_out, data)
    if len(content) > budget:
        raise ArgumentError(
            f"size={size!r} is too small: names, scores and queries alone take "
            f"{format_bytes(len(content))}. Give more, or a smaller n than {n}"
        )
    target = Path(path).expanduser()
    files.write_atomically(target, content)
    return target


def _estimated(influence: Influence) -> list[tuple[float, ...]] | None:
    """Estimated LDS of each query relative to exact scores, with its interval's ends."""
    q = influence.quality
    if q is None:
        return None
    triples = zip(q.lds.tolist(), q.lds_low.tolist(), q.lds_high.tolist(), strict=True)
    return [triple if np.isfinite(triple).all() else () for triple in triples]


def _dressed(influence: Influence, recipe: Recipe | None, queries: Queries | None) -> Influence:
    """The influence with names and looks from recipe and queries, which must be its own."""
    if recipe is not None:
        _check_own("recipe", recipe.examples, influence.num_examples, influence.facts.get("data"))
        influence = replace(
            influence,
            example_ids=influence.example_ids or _tuple(recipe.ids),
            example_looks=recipe.examples.looks(recipe.show) or influence.example_looks,
        )
    if queries is not None:
        stated = influence.facts.get("query data")
        _check_own("queries", queries.examples, influence.num_queries, stated)
        influence = replace(
            influence,
            query_ids=influence.query_ids or _tuple(queries.ids),
            query_looks=queries.examples.looks(queries.show) or influence.query_looks,
        )
    return influence


def _tuple(ids: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if ids is None else tuple(ids)


def _check_own(what: str, data: Examples, count: int, stated: Any) -> None:
    """Refuse pictures of other data than were attributed; a Dataset is known by its length."""
    if data.n != count:
        raise MismatchError(
            f"{what} has {data.n} items, and the influence {count}: give the {what} that was "
            "attributed"
        )
    if data.tensors and stated is not None and data.fingerprint() != stated:
        raise MismatchError(
            f"the data of {what} are not those of the influence (their checksums differ): give "
            f"the {what} that was attributed"
        )


@dataclass
class _Table:
    """The data of the page, one table that its script reads.

    Attributes:
        room: bytes that the table may have.
        scores: of each query the measured LDS, or the estimated one with its interval's ends;
            empty where it is not known.
    """

    influence: Influence
    found: Strongest
    noun: str
    room: int
    scores: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        self.order = self.found.examples()
        self.place = {i: place for place, i in enumerate(self.order)}

    @property
    def num_steps(self) -> int:
        return len(self.found.each) + len(self.order)

    def steps(self) -> Generator[int, None, tuple[str, list[str]]]:
        """The table as text, and in words what it leaves out; one step an item."""
        C = self.influence.coefficients
        table: dict[str, Any] = {
            "noun": self.noun,
            "better": self.influence.better,
            "num_queries": self.influence.num_queries,
            "factor": _packed(C) if self._by_factors else None,
            "together": self._placed(self.found.together),
            "queries": [],
            "examples": [],
        }
        for q in range(len(self.found.each)):
            table["queries"].append(self._query(q))
            yield q
        examples = [{"name": _name(self.influence.example_ids, i, "example"), "index": i}
                    for i in self.order]  # fmt: skip
        room = self.room - webpage.size_of(_json(table)) - webpage.size_of(_json(examples))
        table["examples"] = examples
        whole = 0
        for i, example in zip(self.order, examples, strict=True):
            if room > 0:
                more = self._more(i)
                room -= webpage.size_of(_json(more))
                if room > 0:
                    example.update(more)
                    whole += 1
            yield i
        return _json(table), self._left_out(whole)

    @property
    def _by_factors(self) -> bool:
        """Whether an example's column is kept as its r coordinates, instead of K effects."""
        return self.influence.rank < self.influence.num_queries

    def _query(self, q: int) -> dict[str, Any]:
        outputs, looks = self.influence.outputs, self.influence.query_looks
        return {
            "name": _name(self.influence.query_ids, q, "query"),
            "value": _short(outputs[q])
            if outputs is not None and np.isfinite(outputs[q])
            else None,
            "norm": _short(self.found.norms[q]),
            "lds": [] if self.scores is None else [_short(x) for x in self.scores[q]],
            "look": _looks(looks, q),
            **self._placed(self.found.each[q]),
        }

    def _more(self, i: int) -> dict[str, Any]:
        """Look and column of effects of one example."""
        column = self.influence.basis[:, i]
        if not self._by_factors:
            column = self.influence.coefficients @ column
        weight = 1.0 if self.influence.weights is None else self.influence.weights[i]
        return {
            "look": _looks(self.influence.example_looks, i),
            "column": _packed(-weight * column),
        }

    def _placed(self, strong: Strong) -> dict[str, Any]:
        """Examples by their place in the page's list."""

        def places(effects: Effects) -> list[list[float]]:
            return [[self.place[i], _short(effect)] for i, effect in effects]

        return {"helpful": places(strong.helpful), "harmful": places(strong.harmful)}

    def _left_out(self, whole: int) -> list[str]:
        """What the page does not hold, in words."""
        influence, named = self.influence, len(self.order)
        said = [
            f"Of {influence.num_examples:,} training examples the {named:,} are here that are "
            "among the strongest of a query, or of all queries together."
        ]
        if whole < named:
            said.append(
                f"Of these, {named - whole:,} are here by name and score alone, without a picture "
                "or text, and cannot be ticked: the file would be larger than was asked."
            )
        if len(self.found.each) < influence.num_queries:
            said.append(
                f"Of {influence.num_queries:,} queries the first {len(self.found.each):,} are "
                "listed; the plots, and the list for all queries together, cover every query."
            )
        for what, looks, owner in (
            ("training examples", influence.example_looks, "recipe"),
            ("queries", influence.query_looks, "queries"),
        ):
            if looks is None:
                said.append(
                    f"Pictures or texts of the {what}: give the {owner} a function "
                    f"show=..., or an influence from a file its {owner}=..."
                )
        return said


def _name(ids: Sequence[str] | None, i: int, what: str) -> str:
    return str(ids[i]) if ids else f"{what} {i}"


def _looks(looks: Callable[[int], Any] | None, i: int) -> Look | None:
    return None if looks is None else look(looks(i))


def _packed(numbers: Array) -> str:
    """Numbers as base64 of little-endian float32, row by row."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode()


def _short(value: Any) -> float:
    """Six significant digits: more than a page shows."""
    return float(f"{float(value):.6g}")


def _json(table: Any) -> str:
    """JSON that cannot end the script element that holds it, whatever its texts say."""
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
