"""Records of scores, their tables, and the figures drawn from them."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import metasketch as ms
from benchmarks import digits, figures
from metasketch import plots, tables
from metasketch.removals import Removals, draw
from metasketch.scores import Mean, RowNorms, Score, means, read_scores, score, write_scores
from tests import problems

METHODS = ("spell", "mage", "oracle-svd", "oracle-spherical", "beyond")


def made(seeds: int = 3) -> list[Score]:
    """Scores that are known functions of method, budget and seed."""
    found = []
    for seed in range(seeds):
        for k in (20, 40):
            for p in (0.01, 0.05):
                every = [("exact", k), *((m, B) for m in METHODS for B in (4, 8, 16))]
                for m, B in every:
                    lds = 0.9 if m == "exact" else 0.1 * METHODS.index(m) + B / k / 4 + 0.01 * seed
                    error = 0.0 if m == "exact" else 1 - B / k
                    quarters = tuple(lds + 0.01 * q for q in range(4))
                    found.append(
                        Score("toy", seed, m, k, B, p, lds, error, 2 * error, quarters, quarters)
                    )
    return found


def norms() -> list[RowNorms]:
    return [RowNorms("toy", seed, tuple(np.logspace(0, -3 - seed, 8)), 0.9) for seed in range(3)]


def test_a_score_holds_every_measure(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    Y = rng.standard_normal((8, 30)) * np.logspace(0, -2, 8)[:, None]
    subsets = np.stack([S.numpy() for S in draw(30, 5, 20, seed=0)])
    removals = Removals(subsets, -Y[:, subsets].sum(2).T, np.zeros(8))
    estimate = ms.evaluate.oracle(Y, 3)
    found = score(estimate, Y, removals, problem="toy", seed=4, fraction=0.2)
    scores = ms.evaluate.lds(estimate, removals)
    assert (found.method, found.budget, found.num_queries) == ("oracle-svd", 3, 8)
    assert found.lds == scores.mean()
    assert found.lds_quartiles[0] == pytest.approx(scores[[7, 6]].mean())
    assert found.relative_error == ms.evaluate.relative_error(estimate, Y)
    path = tmp_path / "few.json"
    write_scores(path, [found, *made()], norms(), "made by a test")
    again, geometries = read_scores(path)
    assert len(again) == len(made()) + 1
    kept = next(s for s in again if s.seed == 4)
    assert kept.lds == pytest.approx(found.lds, rel=1e-5)
    np.testing.assert_allclose(kept.lds_quartiles, found.lds_quartiles, rtol=1e-5)
    assert geometries[1].geometry.orders_of_magnitude == pytest.approx(4.0, rel=1e-5)
    assert json.loads(path.read_text())["about"] == "made by a test"


def test_means_have_standard_errors() -> None:
    found = means(made(), ["method", "num_queries", "budget", "fraction"], "lds")
    mean = found[("mage", 20, 8, 0.05)]
    assert mean.mean == pytest.approx(0.1 + 0.1 + 0.01)
    assert mean.error == pytest.approx(0.01 / math.sqrt(3))
    assert str(mean) == "0.210 ± 0.006"
    assert str(Mean.of([0.5])) == "0.500"
    with pytest.raises(ms.ArgumentError, match="several scores of one seed"):
        means(made(), ["method"], "lds")
    with pytest.raises(ms.ArgumentError, match="'speed' is no attribute"):
        means(made(), ["method"], "speed")


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ms.StoreError, match="does not exist"):
        read_scores(tmp_path / "none.json")
    path = tmp_path / "other.json"
    path.write_text('{"format": "other"}')
    with pytest.raises(ms.StoreError, match="no scores"):
        read_scores(path)
    write_scores(path, made())
    content = json.loads(path.read_text())
    del content["scores"][0]["lds"]
    path.write_text(json.dumps(content))
    with pytest.raises(ms.StoreError, match="damaged"):
        read_scores(path)


def test_a_table_of_lds() -> None:
    table = tables.against_budget(made(), 20)
    lines = table.markdown().splitlines()
    assert lines[0] == "| problem | removed | method | B = 0.2 k | B = 0.4 k | B = 0.8 k |"
    assert lines[1] == "| --- | --- | --- | ---: | ---: | ---: |"
    assert "| toy | 5 % | MAGE | 0.160 ± 0.006 | 0.210 ± 0.006 | 0.310 ± 0.006 |" in lines
    assert (
        "| toy | 1 % | exact Y (MAGIC) | 0.900 ± 0.000 | 0.900 ± 0.000 | 0.900 ± 0.000 |" in lines
    )
    assert lines[-1] == "Mean ± standard error over 3 seeds."
    assert [row[2] for row in table.rows[:3]] == ["beyond", "SPELL", "MAGE"]
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert rows[0][3:5] == ["B = 0.2 k", "B = 0.2 k (standard error)"]
    mage = next(r for r in rows if r[1:3] == ["5 %", "MAGE"])
    assert float(mage[3]) == pytest.approx(0.16)
    assert float(mage[4]) == pytest.approx(0.01 / math.sqrt(3))
    errors = tables.against_budget(made(), 20, "relative_error")
    assert {row[1] for row in errors.rows} == {"1 %"}  # they do not depend on it


def test_tables_of_the_appendix() -> None:
    both = tables.two_objectives(made(), 20, 4)
    mage = next(row for row in both.rows if row[1] == "MAGE")
    assert [str(cell) for cell in mage[2:]] == ["0.800 ± 0.000", "1.600 ± 0.000", "2"]
    quarters = tables.by_quartile(made(1), 20, 4)
    assert quarters.columns[-1] == "exact Y (MAGIC)"
    assert str(quarters.rows[2][quarters.columns.index("SPELL")]) == "0.070"
    assert quarters.markdown().endswith("One seed.\n")
    errors = tables.by_quartile(made(), 20, 4, "per_query_error")
    assert "exact Y (MAGIC)" not in errors.columns
    shape = tables.geometry(norms())
    assert str(shape.rows[0][2]) == "4.000 ± 0.577"


MISTAKES: dict[str, tuple[Any, str]] = {
    "k": (lambda: tables.against_budget(made(), 7), "num_queries=7"),
    "B": (lambda: tables.two_objectives(made(), 20, 5), "budget=5"),
    "value": (lambda: tables.by_quartile(made(), 20, 4, "relative_error"), "one number"),
    "no value": (lambda: plots.against_budget(made(), "speed"), "value='speed'"),  # type: ignore[arg-type]
    "nothing": (lambda: plots.against_budget([]), "no scores"),
    "no norms": (lambda: plots.geometry([]), "no row norms"),
    "one size": (lambda: plots.decay(made(), 5), "at least two"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named(what: str) -> None:
    call, words = MISTAKES[what]
    with pytest.raises(ms.ArgumentError, match=words):
        call()


def test_lines_are_where_the_scores_are() -> None:
    figure = plots.against_budget(made(), "lds")
    assert len(figure.axes) == 4  # two fractions, two numbers of queries
    lines = {line.get_color(): line for line in figure.axes[0].lines}
    mage = lines[plots.LOOKS["mage"].color]
    np.testing.assert_allclose(mage.get_xdata(), [0.2, 0.4, 0.8])
    np.testing.assert_allclose(mage.get_ydata(), [0.16, 0.21, 0.31])
    ceiling = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(ceiling[0].get_ydata(), [0.9, 0.9])
    errors = plots.against_budget(made(), "relative_error")
    assert len(errors.axes) == 2
    decay = plots.decay(made(), 8)
    mage = next(x for x in decay.axes[1].lines if x.get_color() == plots.LOOKS["mage"].color)
    np.testing.assert_allclose(mage.get_xdata(), [20, 40])
    np.testing.assert_allclose(mage.get_ydata(), [0.21, 0.16])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["beyond", "SPELL", "MAGE", "oracle: spherical SVD", "exact Y (MAGIC)"]


def test_colours_differ_for_any_colour_vision() -> None:
    """Every pair of coloured methods differs by lightness or by marker."""
    looks = [look for look in plots.LOOKS.values() if look.marker]
    assert len({look.marker for look in looks}) == len(looks)
    assert len({look.color for look in looks}) == len(looks)


@pytest.mark.parametrize("method", ["mage", "spell", "random", "first", "pca"])
def test_the_stand_in_of_the_benchmark_gives_what_sweeps_give(method: str) -> None:
    run = ms.train(problems.recipe("mlp", "adamw", "plain"))
    queries = ms.Queries(problems.inputs("mlp", 12, seed=2), ms.losses.cross_entropy)
    options: dict[str, Any] = {"warmup": 2} if method == "spell" else {}
    real = ms.attribute(run, queries, method, 4, **options)
    Y = torch.from_numpy(ms.attribute(run, queries, "exact").dense())
    found = digits.simulated(Y, queries.gram(run), method, 4, **options)
    assert np.abs(found.dense() - real.dense()).max() < 1e-8 * np.abs(real.dense()).max()
    assert found.sweeps == {"replay": 4, "forward": 0 if method == "pca" else 4}


def test_make_figures_draws_every_type(tmp_path: Path) -> None:
    paths = figures.drawn(made(), norms(), tmp_path)
    assert {p.stem for p in paths} == {
        *("lds", "error", "error-per-query", "quartiles", "decay", "geometry"),
    }
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    again = tmp_path / "again.png"
    plots.save(plots.geometry(norms()), again)
    assert again.read_bytes() == (tmp_path / "geometry.png").read_bytes()
    written = figures.tabulated(made(), norms(), tmp_path)
    assert {p.suffix for p in written} == {".md", ".csv"}
    assert len(written) == 12
