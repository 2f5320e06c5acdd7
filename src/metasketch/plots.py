"""Figures of scores: error and LDS against the budget, their decay with k, geometry, quartiles.

Each function takes the records of `metasketch.scores` and returns a matplotlib figure; `save`
writes it. Needs the extra ``plots``: ``pip install 'metasketch[plots]'``.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; each method has
a marker of its own besides. Bands and bars are one standard error over seeds.
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from metasketch.errors import ArgumentError, MetasketchError
from metasketch.scores import Mean, RowNorms, Score, means, one_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Literal["lds", "relative_error", "per_query_error"]

WORDS = {
    "lds": "linear datamodelling score",
    "relative_error": "relative Frobenius error",
    "per_query_error": "mean error per query",
}

EXACT, SVD, SPHERICAL = "exact", "oracle-svd", "oracle-spherical"


@dataclass(frozen=True)
class Look:
    """How a method is drawn, and what a legend calls it."""

    label: str
    color: str
    marker: str = ""
    dashes: str = "-"


LOOKS = {
    "spell": Look("SPELL", "#0072B2", "o"),
    "mage": Look("MAGE", "#009E73", "^"),
    "pca": Look("PCA", "#CC79A7", "D"),
    "random": Look("random probes", "#56B4E9", "v"),
    "first": Look("first B queries", "#E69F00", "s"),
    SPHERICAL: Look("oracle: spherical SVD", "#555555", dashes="-."),
    SVD: Look("oracle: SVD", "#000000", dashes=":"),
    EXACT: Look("exact Y (MAGIC)", "#000000", dashes="--"),
}
_OTHERS = (("#D55E00", "P"), ("#882255", "X"), ("#332288", "*"), ("#117733", "h"))
"""For methods beyond the paper, in the order of their names."""

_CEILINGS = {"lds": (SPHERICAL, EXACT), "relative_error": (SVD,), "per_query_error": (SPHERICAL,)}
"""What bounds a measure; the other oracles have no place in its panel."""

_BOUNDS = (EXACT, SVD, SPHERICAL)

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "savefig.dpi": 160,
}


def _styled(draw: Callable[..., "Figure"]) -> Callable[..., "Figure"]:
    """Draw in the one style, and say what is missing where matplotlib is."""

    @functools.wraps(draw)
    def styled(*arguments: Any, **options: Any) -> "Figure":
        try:
            import matplotlib
        except ImportError:
            raise MetasketchError(
                "figures need matplotlib: pip install 'metasketch[plots]'"
            ) from None
        with matplotlib.rc_context(STYLE):
            return draw(*arguments, **options)

    return styled


@_styled
def against_budget(scores: Iterable[Score], value: Value = "lds") -> "Figure":
    """A measure against B/k, by method, with its ceilings: a row for each problem (and fraction
    removed, where it matters), a column for each number of queries."""
    kept = _chosen(scores, value)
    rows = sorted({(s.problem, s.fraction) for s in kept})
    columns = sorted({s.num_queries for s in kept})
    looks = _looks(kept)
    fig, axes = _panels(len(rows), len(columns), 2.5, 2.2, sharex=True, sharey="row")
    for i, (problem, fraction) in enumerate(rows):
        for j, k in enumerate(columns):
            ax = axes[i][j]
            here = [s for s in kept if (s.problem, s.fraction, s.num_queries)
                    == (problem, fraction, k)]  # fmt: skip
            for method, look in looks.items():
                _against(ax, [s for s in here if s.method == method], "share", value, look)
            if i == 0:
                ax.set_title(f"k = {k} queries")
        said = f"{problem}, {100 * fraction:g} % removed" if value == "lds" else problem
        axes[i][0].set_ylabel(f"{said}\n{WORDS[value]}")
    for ax in axes[-1]:
        ax.set_xlabel("B / k")
    for row in axes:
        _scale(row, value)
    _legend(fig, axes, looks)
    return fig


@_styled
def decay(scores: Iterable[Score], budget: int, fraction: float | None = None) -> "Figure":
    """Error and LDS against the number of queries at a fixed budget: a row for each problem."""
    every = [s for s in scores if s.method == EXACT or s.budget == budget]
    fractions = sorted({s.fraction for s in every})
    if fraction is not None:
        every = [s for s in every if s.fraction == fraction]
    elif fractions:
        every = [s for s in every if s.fraction == fractions[0]]
    sizes = {s.num_queries for s in every if s.method != EXACT}
    every = [s for s in every if s.num_queries in sizes]
    if len(sizes) < 2:
        raise ArgumentError(
            f"budget={budget}: there are scores for {len(sizes)} numbers of queries at this "
            "budget; a decay needs at least two"
        )
    problems = sorted({s.problem for s in every})
    panels: tuple[Value, ...] = ("relative_error", "lds")
    looks = _looks(every)
    fig, axes = _panels(len(problems), 2, 3.2, 2.4, sharex=True)
    for i, problem in enumerate(problems):
        for ax, value in zip(axes[i], panels, strict=True):
            for method, look in looks.items():
                if method in _BOUNDS and method not in _CEILINGS[value]:
                    continue
                here = [s for s in every if (s.problem, s.method) == (problem, method)]
                _against(ax, here, "num_queries", value, look)
            ax.set_xscale("log", base=2)
            ax.set_xticks(sorted(sizes), [str(k) for k in sorted(sizes)])
            ax.minorticks_off()
            ax.set_ylabel(f"{problem}\n{WORDS[value]}" if ax is axes[i][0] else WORDS[value])
            _scale([ax], value)
    for ax in axes[-1]:
        ax.set_xlabel(f"number of queries k, at B = {budget}")
    _legend(fig, axes, looks)
    return fig


@_styled
def geometry(geometries: Iterable[RowNorms]) -> "Figure":
    """Row norms of the exact Y in decreasing order, and the energy that they accumulate: a line for
    each problem, the mean over its seeds."""
    found = list(geometries)
    if not found:
        raise ArgumentError("there are no row norms to draw")
    fig, axes = _panels(1, 2, 3.4, 2.7)
    left, right = axes[0]
    right.axvspan(0, 0.25, color="#EEEEEE", lw=0)
    right.annotate("top quartile", (0.125, 0.03), ha="center", fontsize=8, color="#555555")
    looks = [*LOOKS.values()]
    for number, problem in enumerate(sorted({g.problem for g in found})):
        seeds = [g.geometry for g in found if g.problem == problem]
        K = min(len(g.row_norms) for g in seeds)
        place = (np.arange(K) + 0.5) / K
        shares = np.stack([g.sorted_norms[:K] / g.sorted_norms[0] for g in seeds])
        tiny = shares[shares > 0].min()
        line = np.exp(np.log(np.maximum(shares, tiny)).mean(0))
        color = looks[number % 5].color
        orders = np.mean([g.orders_of_magnitude for g in seeds])
        share = np.mean([g.top_quartile_share for g in seeds])
        left.plot(place, line, color=color, label=f"{problem}: {orders:.1f} orders of magnitude")
        energy = np.mean([g.cumulative_energy[:K] for g in seeds], axis=0)
        edge = np.arange(1, K + 1) / K
        said = f"{problem}: {100 * share:.4g} % in the top quartile"
        right.plot([0, *edge], [0, *energy], color=color, label=said)
    left.set_yscale("log")
    left.set_ylabel("row norm, relative to the largest")
    right.set_ylabel("cumulative share of the energy")
    right.set_ylim(0, 1.02)
    left.legend(loc="lower left", fontsize=8)
    right.legend(loc="center right", fontsize=8)
    for ax in (left, right):
        ax.set_xlabel("share of the queries, largest norms first")
        ax.set_xlim(0, 1)
    return fig


@_styled
def quartiles(
    scores: Iterable[Score], num_queries: int, budget: int, fraction: float | None = None
) -> "Figure":
    """Error and LDS by quartile of row norm at one budget: a row for each problem."""
    kept = at(scores, num_queries, budget, fraction)
    problems = sorted({s.problem for s in kept})
    looks = _looks(kept)
    fig, axes = _panels(len(problems), 2, 3.2, 2.4, sharex=True)
    for i, problem in enumerate(problems):
        pairs = (("per-query relative error", "error_quartiles"),
                 ("linear datamodelling score", "lds_quartiles"))  # fmt: skip
        for ax, (words, name) in zip(axes[i], pairs, strict=True):
            drawn = {m: look for m, look in looks.items()
                     if m != SVD and (m != EXACT or name == "lds_quartiles")}  # fmt: skip
            dots = [method for method in drawn if drawn[method].marker]
            for method, look in drawn.items():
                here = [s for s in kept if (s.problem, s.method) == (problem, method)]
                values = [Mean.of([getattr(s, name)[q] for s in here]) for q in range(4)]
                line = [v.mean for v in values]
                if not look.marker:
                    ax.plot(range(4), line, color=look.color, ls=look.dashes, lw=1.0)
                    continue
                shift = 0.09 * (dots.index(method) - (len(dots) - 1) / 2)
                bars = [0 if np.isnan(v.error) else v.error for v in values]
                ax.errorbar(
                    np.arange(4) + shift,
                    line,
                    bars,
                    color=look.color,
                    marker=look.marker,
                    ls="none",
                )
            ax.set_ylabel(f"{problem}\n{words}" if ax is axes[i][0] else words)
    for ax in axes[-1]:
        ax.set_xticks(range(4), ["Q1 (smallest)", "Q2", "Q3", "Q4 (largest)"])
        ax.set_xlabel("quartile of row norm")
    axes[0][0].set_title(f"k = {num_queries}, B = {budget}", loc="left")
    shown = {
        m: replace(look, dashes="none") if look.marker else look
        for m, look in looks.items()
        if m != SVD
    }
    _legend(fig, axes, shown)
    return fig


def save(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure; the same figure gives the same bytes."""
    figure.savefig(path, metadata={"Software": None})


def at(
    scores: Iterable[Score], num_queries: int, budget: int, fraction: float | None = None
) -> list[Score]:
    """The scores at one budget and number of queries, with those of the exact Y; at the smallest
    fraction removed, unless one is given."""
    found = [
        s
        for s in scores
        if s.num_queries == num_queries and (s.budget == budget or s.method == EXACT)
    ]
    p = fraction if fraction is not None else min((s.fraction for s in found), default=None)
    found = [s for s in found if s.fraction == p]
    if not any(s.method != EXACT for s in found):
        raise ArgumentError(
            f"there are no scores at num_queries={num_queries}, budget={budget}, fraction={p}"
        )
    return found


def _chosen(scores: Iterable[Score], value: Value) -> list[Score]:
    """What belongs into panels of a measure: errors do not depend on the fraction removed."""
    if value not in WORDS:
        raise ArgumentError(f"value={value!r}: give one of {sorted(WORDS)}")
    every = [s for s in scores if s.method not in _BOUNDS or s.method in _CEILINGS[value]]
    if not every:
        raise ArgumentError("there are no scores to draw")
    return every if value == "lds" else one_fraction(every)


def _looks(scores: Sequence[Score]) -> dict[str, Look]:
    """The looks of the methods that occur, in the order of the legend."""
    names = {s.method for s in scores}
    beyond = sorted(names - set(LOOKS))
    extra = {
        name: Look(name, *_OTHERS[number % len(_OTHERS)]) for number, name in enumerate(beyond)
    }
    return {**extra, **{name: look for name, look in LOOKS.items() if name in names}}


def _panels(
    rows: int, columns: int, width: float, height: float, **shared: Any
) -> tuple["Figure", Sequence[Sequence["Axes"]]]:
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width * columns + 0.6, height * rows + 0.7), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **shared)


def _against(ax: "Axes", scores: Sequence[Score], x: str, value: str, look: Look) -> None:
    """One method's line; the exact matrix has no budget, so its line goes right across."""
    if not scores:
        return
    if x == "share" and scores[0].method == EXACT:
        ((_, level),) = means(scores, [x], value).items()
        ax.axhline(level.mean, color=look.color, ls=look.dashes, lw=1.0)
        return
    found = sorted((key[0], mean) for key, mean in means(scores, [x], value).items())
    places: Any = [place for place, _ in found]
    line = np.array([mean.mean for _, mean in found])
    error = np.nan_to_num([mean.error for _, mean in found])
    ax.plot(
        places, line, color=look.color, marker=look.marker, ls=look.dashes,
        lw=1.4 if look.marker else 1.0,
    )  # fmt: skip
    ax.fill_between(places, line - error, line + error, color=look.color, alpha=0.18, lw=0)


def _scale(axes: Sequence["Axes"], value: str) -> None:
    """Errors that span more than one order of magnitude go on a logarithmic axis; scores end at 1
    and begin where the lowest of them is."""
    drawn = [y for ax in axes for line in ax.lines for y in np.asarray(line.get_ydata(), float)]
    if value == "lds":
        axes[0].set_ylim(np.floor(10 * min(drawn)) / 10, 1.02)
    elif min(drawn) > 0 and max(drawn) > 10 * min(drawn):
        axes[0].set_yscale("log")
    else:
        axes[0].set_ylim(bottom=0)


def _legend(fig: "Figure", axes: Sequence[Sequence["Axes"]], looks: dict[str, Look]) -> None:
    """One legend for the whole figure, below it."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=k.color, marker=k.marker, ls=k.dashes, label=k.label)
        for k in looks.values()
    ]
    columns = len(handles) if len(axes[0]) > 2 else -(-len(handles) // 2)
    fig.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)
