"""Tables of scores: Markdown for people, CSV for programs, with standard errors over seeds."""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass

from metasketch.errors import ArgumentError
from metasketch.plots import EXACT, LOOKS, Value, at
from metasketch.scores import Mean, RowNorms, Score, means, one_fraction

Cell = str | int | float | Mean | None


@dataclass(frozen=True)
class Table:
    """A small table.

    Attributes:
        columns: their heads.
        rows: cells; a `Mean` is written with its standard error, None stays empty.
        note: what to know for reading it.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """The table in GitHub's Markdown, numbers to the right."""
        numeric = [
            all(not isinstance(row[j], str) for row in self.rows) for j in range(len(self.columns))
        ]
        lines = [
            _line(self.columns),
            _line(["---:" if right else "---" for right in numeric]),
            *(_line([_text(cell) for cell in row]) for row in self.rows),
        ]
        return "\n".join([*lines, *(["", self.note] if self.note else [])]) + "\n"

    def csv(self) -> str:
        """The same as CSV: each column of means is followed by one of standard errors."""
        wide = [
            any(isinstance(row[j], Mean) for row in self.rows) for j in range(len(self.columns))
        ]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        heads: list[str] = []
        for column, has_error in zip(self.columns, wide, strict=True):
            heads += [column, f"{column} (standard error)"] if has_error else [column]
        writer.writerow(heads)
        for row in self.rows:
            cells: list[Cell] = []
            for cell, has_error in zip(row, wide, strict=True):
                if isinstance(cell, Mean):
                    cells += [cell.mean, None if cell.count < 2 else cell.error]
                else:
                    cells += [cell, None] if has_error else [cell]
            writer.writerow(cells)
        return text.getvalue()


def against_budget(scores: Iterable[Score], num_queries: int, value: Value = "lds") -> Table:
    """A measure by method and B/k, for one number of queries.

    One row for each problem, fraction removed and method.
    """
    every = [s for s in scores if s.num_queries == num_queries]
    if value != "lds":
        every = one_fraction(every)
    shares = sorted({s.share for s in every if s.method != EXACT})
    if not shares:
        raise ArgumentError(f"there are no scores at num_queries={num_queries}")
    cells = means(every, ["problem", "fraction", "method", "share"], value)
    rows = []
    for problem, fraction in sorted({(s.problem, s.fraction) for s in every}):
        here = [s for s in every if (s.problem, s.fraction) == (problem, fraction)]
        for method in _methods(here):
            ceiling = cells.get((problem, fraction, method, 1.0)) if method == EXACT else None
            line = [ceiling or cells.get((problem, fraction, method, share)) for share in shares]
            rows.append((problem, f"{100 * fraction:g} %", _label(method), *line))
    heads = ("problem", "removed", "method", *(f"B = {share:g} k" for share in shares))
    return Table(heads, tuple(rows), _seeds(every))


def two_objectives(scores: Iterable[Score], num_queries: int, budget: int) -> Table:
    """Relative Frobenius error, mean error per query, and their ratio: one weights queries by their
    squared row norms, the other equally (the paper's table 3)."""
    kept = at(scores, num_queries, budget)
    rows: list[tuple[Cell, ...]] = []
    for problem in sorted({s.problem for s in kept}):
        here = [s for s in kept if s.problem == problem and s.method != EXACT]
        for method in _methods(here):
            own = [s for s in here if s.method == method]
            error = Mean.of([s.relative_error for s in own])
            each = Mean.of([s.per_query_error for s in own])
            ratio = f"{each.mean / error.mean:.3g}" if error.mean > 0 else None
            rows.append((problem, _label(method), error, each, ratio))
    heads = ("problem", "method", "relative Frobenius error", "mean error per query", "ratio")
    return Table(heads, tuple(rows), _seeds(kept))


def by_quartile(
    scores: Iterable[Score], num_queries: int, budget: int, value: Value = "lds"
) -> Table:
    """A measure by quartile of row norm and method (the paper's table 4)."""
    if value == "relative_error":
        raise ArgumentError('value="relative_error" is one number for all queries: take another')
    name = "lds_quartiles" if value == "lds" else "error_quartiles"
    kept = [s for s in at(scores, num_queries, budget) if value == "lds" or s.method != EXACT]
    methods = _methods(kept)
    rows: list[tuple[Cell, ...]] = []
    for problem in sorted({s.problem for s in kept}):
        for q in range(4):
            line: list[Cell] = []
            for method in methods:
                own = [s for s in kept if (s.problem, s.method) == (problem, method)]
                line.append(Mean.of([getattr(s, name)[q] for s in own]) if own else None)
            rows.append((problem, f"Q{q + 1}", *line))
    return Table(("problem", "quartile", *map(_label, methods)), tuple(rows), _seeds(kept))


def geometry(geometries: Iterable[RowNorms]) -> Table:
    """Orders of magnitude that row norms span, the share of the top quartile, and how well the
    norms of query gradients, which are known for free, rank the rows."""
    found = list(geometries)
    rows: list[tuple[Cell, ...]] = []
    for problem in sorted({g.problem for g in found}):
        seeds = [g.geometry for g in found if g.problem == problem]
        known = [g.gradient_correlation for g in seeds if g.gradient_correlation is not None]
        rows.append(
            (
                problem,
                len(seeds[0].row_norms),
                Mean.of([g.orders_of_magnitude for g in seeds]),
                Mean.of([g.top_quartile_share for g in seeds]),
                Mean.of(known) if known else None,
            )
        )
    heads = (
        *("problem", "queries", "orders of magnitude", "energy in the top quartile"),
        "rank correlation of gradient and row norms",
    )
    count = len({g.seed for g in found})
    return Table(heads, tuple(rows), f"Mean ± standard error over {count} seeds.")


def _methods(scores: Iterable[Score]) -> list[str]:
    """Those that occur: beyond the paper first, then in the order of legends."""
    names = {s.method for s in scores}
    return [*sorted(names - set(LOOKS)), *(name for name in LOOKS if name in names)]


def _label(method: str) -> str:
    return LOOKS[method].label if method in LOOKS else method


def _seeds(scores: Iterable[Score]) -> str:
    count = len({s.seed for s in scores})
    return f"Mean ± standard error over {count} seeds." if count > 1 else "One seed."


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
