"""Small line charts as SVG: panels in a grid, a curve for each method, whiskers over seeds."""

import numpy as np

_COLORS = {
    "sage": "#c0392b",
    "sage, reconstruction": "#c0392b",
    "gram": "#e67e22",
    "spell": "#6a3d9a",
    "mage": "#1b7837",
    "random": "#2b6cb0",
    "first": "#b8860b",
    "pca": "#e7298a",
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 220, 46, 30

Curves = dict[str, list[list[float]]]


def panels(grid: list[list[tuple[str, Curves]]], x: list[float], label: str) -> str:
    """An SVG of panels: rows of (title, curves); curves hold the values of all seeds at each x."""
    wide, high = _WIDTH + _LEFT + 20, _HEIGHT + _TOP + 40
    names = list(dict.fromkeys(n for row in grid for _, curves in row for n in curves))
    width, height = wide * max(map(len, grid)), high * len(grid) + 24 * (1 + len(names) // 6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, row in enumerate(grid):
        for j, (title, curves) in enumerate(row):
            parts.append(f'<g transform="translate({j * wide + _LEFT},{i * high + _TOP})">')
            parts += _panel(title, curves, x, label)
            parts.append("</g>")
    for number, name in enumerate(names):
        left = 20 + (number % 6) * 165
        down = high * len(grid) + 16 + 24 * (number // 6)
        parts.append(
            f'<line x1="{left}" x2="{left + 24}" y1="{down - 4}" y2="{down - 4}" {_stroke(name)}/>'
            f'<text x="{left + 30}" y="{down}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, curves: Curves, x: list[float], label: str) -> list[str]:
    top = max(1.0, *(max(v) for c in curves.values() for v in c if v))
    bottom = min(0.0, *(min(v) for c in curves.values() for v in c if v))

    def right(value: float) -> float:
        return (value - x[0]) / (x[-1] - x[0]) * _WIDTH

    def down(value: float) -> float:
        return (top - value) / (top - bottom) * _HEIGHT

    parts = [
        f'<text x="{_WIDTH / 2}" y="-10" text-anchor="middle" font-weight="bold">{title}</text>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 32}" text-anchor="middle">{label}</text>',
    ]
    for value in x:
        parts.append(
            f'<text x="{right(value):.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{value:g}</text>'
        )
    for value in np.linspace(bottom, top, 6):
        parts.append(
            f'<text x="-6" y="{down(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>'
            f'<line x2="{_WIDTH}" y1="{down(value):.1f}" y2="{down(value):.1f}" stroke="#eee"/>'
        )
    for name, values in curves.items():
        points = [(right(a), down(float(np.mean(v)))) for a, v in zip(x, values, strict=True) if v]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" {_stroke(name)}/>')
        for a, v in zip(x, values, strict=True):
            if len(v) > 1:
                parts.append(
                    f'<line x1="{right(a):.1f}" x2="{right(a):.1f}" y1="{down(min(v)):.1f}" '
                    f'y2="{down(max(v)):.1f}" {_stroke(name)}/>'
                )
    return parts


def _stroke(name: str) -> str:
    dashes = ' stroke-dasharray="4 3"' if "oracle" in name else ""
    thick = 2.6 if name.startswith("sage") else 1.4
    return f'stroke="{_COLORS.get(name, "#111")}" stroke-width="{thick}"{dashes}'
