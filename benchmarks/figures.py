"""Every type of figure and table, from stored scores.

    make figures

Reads the files in benchmarks/results that hold scores, and writes, for each, figures (PNG) and
tables (Markdown and CSV) into a folder of its name.
"""

import argparse
from pathlib import Path

from metasketch import plots, tables
from metasketch.scores import RowNorms, Score, read_scores

RESULTS = Path(__file__).parent / "results"


def middle(scores: list[Score]) -> tuple[int, int]:
    """The largest number of queries, and the budget nearest to a fifth of it."""
    k = max(s.num_queries for s in scores)
    budgets = {s.budget for s in scores if s.num_queries == k and s.budget < k}
    return k, min(budgets, key=lambda B: abs(B - 0.2 * k))


def shared_budget(scores: list[Score]) -> tuple[int, int]:
    """The budget at which most numbers of queries were scored, and how many."""
    sizes: dict[int, set[int]] = {}
    for s in scores:
        if s.method != plots.EXACT:
            sizes.setdefault(s.budget, set()).add(s.num_queries)
    best = max(sizes, key=lambda B: (len(sizes[B]), B))
    return best, len(sizes[best])


def drawn(scores: list[Score], geometries: list[RowNorms], folder: Path) -> list[Path]:
    """Write the figures; those for which the scores say nothing are left out."""
    k, B = middle(scores)
    common, sizes = shared_budget(scores)
    figures = {
        "lds": plots.against_budget(scores, "lds"),
        "error": plots.against_budget(scores, "relative_error"),
        "error-per-query": plots.against_budget(scores, "per_query_error"),
        "quartiles": plots.quartiles(scores, k, B),
    }
    if sizes > 1:
        figures["decay"] = plots.decay(scores, common)
    if geometries:
        figures["geometry"] = plots.geometry(geometries)
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        plots.save(figure, path)
    return paths


def tabulated(scores: list[Score], geometries: list[RowNorms], folder: Path) -> list[Path]:
    k, B = middle(scores)
    found = {
        "lds": tables.against_budget(scores, k, "lds"),
        "error": tables.against_budget(scores, k, "relative_error"),
        "two-objectives": tables.two_objectives(scores, k, B),
        "lds-by-quartile": tables.by_quartile(scores, k, B, "lds"),
        "error-by-quartile": tables.by_quartile(scores, k, B, "per_query_error"),
    }
    if geometries:
        found["geometry"] = tables.geometry(geometries)
    paths = []
    for name, table in found.items():
        for path, text in (
            (folder / f"{name}.md", table.markdown()),
            (folder / f"{name}.csv", table.csv()),
        ):
            path.write_text(text, encoding="utf-8")
            paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sources", nargs="*", type=Path, help="by default all stored scores")
    parser.add_argument("--out", type=Path, default=Path("build/figures"))
    arguments = parser.parse_args()
    for source in arguments.sources or sorted(RESULTS.glob("*.scores.json")):
        scores, geometries = read_scores(source)
        folder = arguments.out / source.name.removesuffix(".json").removesuffix(".scores")
        folder.mkdir(parents=True, exist_ok=True)
        for path in drawn(scores, geometries, folder) + tabulated(scores, geometries, folder):
            print(path)


if __name__ == "__main__":
    main()
