"""Plots as SVG that a page can hold: no scripts, no styles of their own, no dependencies."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from metasketch.geometry import Geometry

Array = np.ndarray[Any, Any]

WIDTH, HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 40
_MOST_POINTS = 400


def row_norms(geometry: Geometry) -> str:
    """‖Y_q‖ relative to the largest, in decreasing order, on a logarithmic scale; without zeros."""
    norms = geometry.sorted_norms
    exponents = np.log10(norms[norms > 0] / norms[0])
    low = min(-1, int(np.floor(exponents.min())))
    ticks = [(exponent, _power(exponent)) for exponent in range(0, low - 1, low // 7)]
    labels = "queries, largest norm first", "norm / largest norm"
    return _line(exponents, (low, 0.0), ticks, norms_in_words(geometry), labels)


def energy(geometry: Geometry) -> str:
    """Share of ‖Y‖² that the queries accumulate, largest norm first; the top quartile shaded."""
    ticks = [(value / 4, f"{25 * value}%") for value in range(5)]
    labels = "queries, largest norm first", "share of the energy"
    share, words = geometry.cumulative_energy, energy_in_words(geometry)
    return _line(share, (0.0, 1.0), ticks, words, labels, shaded=-(-len(share) // 4))


def norms_in_words(geometry: Geometry) -> str:
    """How far apart the norms are."""
    span = f"The norms of the rows span {geometry.orders_of_magnitude:.1f} orders of magnitude"
    return span + (f"; {geometry.num_zero:,} are zero" if geometry.num_zero else "")


def energy_in_words(geometry: Geometry) -> str:
    """What the largest rows hold."""
    share = geometry.top_quartile_share
    return f"The quarter of queries with the largest norms holds {share:.1%} of the energy"


def _power(exponent: int) -> str:
    digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if exponent == 0 else f"10{digits}"


def _line(
    values: Array,
    span: tuple[float, float],
    ticks: Sequence[tuple[float, str]],
    words: str,
    labels: tuple[str, str],
    shaded: int = 0,
) -> str:
    """One line over the number of queries, with its axes; classes are for the page's style."""
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    count = len(values)

    def x(position: float) -> float:
        return _LEFT + (right - _LEFT) * (position - 1) / max(count - 1, 1)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * (value - span[0]) / (span[1] - span[0])

    parts = [f"<title>{escape(words)}</title>"]
    if shaded:
        wide = x(shaded) - _LEFT
        parts.append(
            f'<rect class="shade" x="{_LEFT}" y="{_TOP}" width="{wide:.1f}" '
            f'height="{bottom - _TOP}"/>'
        )
    for value, label in ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{right}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{escape(label)}</text>'
        )
    for position, anchor in ((1, "start"), (count, "end")):
        parts.append(
            f'<text class="tick" x="{x(position):.1f}" y="{bottom + 16}" '
            f'text-anchor="{anchor}">{position}</text>'
        )
    kept = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(int))
    points = " ".join(f"{x(i + 1):.1f},{y(float(values[i])):.1f}" for i in kept.tolist())
    parts.append(f'<polyline class="line" points="{points}"/>')
    if count == 1:
        parts.append(f'<circle class="dot" cx="{x(1):.1f}" cy="{y(float(values[0])):.1f}" r="3"/>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(labels[0])}</text>"
    )
    parts.append(
        f'<text class="axis" x="{-(_TOP + bottom) / 2:.1f}" y="12" transform="rotate(-90)" '
        f'text-anchor="middle">{escape(labels[1])}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">'
        f"{''.join(parts)}</svg>"
    )
