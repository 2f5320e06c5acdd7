"""The page: whole, safe whatever its texts say, and working in a real browser."""

import base64
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import metasketch as ms
from metasketch import charts, strongest
from metasketch.diagnose import Diagnosis
from metasketch.geometry import Geometry
from metasketch.looks import MOST_CHARACTERS, look
from metasketch.pictures import MAX_SIDE, as_bytes, data_uri, png
from metasketch.quality import Interval
from metasketch.symptoms import Finding
from metasketch.verdict import Verdict
from metasketch.webpage import noun_of
from tests import browser, problems

EVIL = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>\u2028&amp;\"'\ud800"
K, N = 30, 60


def influence(**changes: Any) -> ms.Influence:
    """Thirty queries of sizes that differ, sixty examples, rank 4; some names are hostile."""
    g = np.random.default_rng(0)
    C = g.normal(size=(K, 4)) * np.logspace(0, -3, K)[:, None]
    about: dict[str, Any] = {
        "method": "spell",
        "budget": 4,
        "sweeps": {"replay": 4, "forward": 4},
        "facts": {"measure": "cross_entropy", "steps": 6, "optimizer": "SGD(lr=0.1)"},
        "outputs": np.abs(g.normal(size=K)),
        "notes": (EVIL,),
        "query_ids": [EVIL, *(f"question {q}" for q in range(1, K))],
        "example_ids": [f"example <{i}>" for i in range(N)],
        "query_looks": lambda q: [EVIL, " token", f" {q}"],
        "example_looks": lambda i: np.full((4, 4), i / N) if i % 2 else f"{EVIL} {i}",
    }
    return ms.Influence.from_factors(C, g.normal(size=(4, N)), **{**about, **changes})


# Pictures.


def decoded(file: bytes) -> Any:
    """Pixels of a PNG of 8 bits, by the letter of its specification."""
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(file):
        (length,) = struct.unpack(">I", file[at : at + 4])
        name, content = file[at + 4 : at + 8], file[at + 8 : at + 8 + length]
        assert struct.unpack(">I", file[at + 8 + length :][:4])[0] == zlib.crc32(name + content)
        chunks[name], at = content, at + 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    c = {0: 1, 2: 3, 6: 4}[colour]
    raw = zlib.decompress(chunks[b"IDAT"])
    rows = [bytearray(c + width * c)]  # c zeros before each row, and a row of zeros above
    for y in range(height):
        kind, *line = raw[y * (1 + width * c) : (y + 1) * (1 + width * c)]
        row, above = bytearray(c), rows[-1]
        for i, value in enumerate(line):
            left, up, corner = row[i], above[i + c], above[i]
            p = left + up - corner
            paeth = min((left, up, corner), key=lambda near: abs(p - near))
            row.append((value + (0, left, up, (left + up) // 2, paeth)[kind]) % 256)
        rows.append(row)
    return np.array([list(row[c:]) for row in rows[1:]], np.uint8).reshape(height, width, c)


shapes = st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 4]))


@given(arrays.arrays(np.uint8, shapes))
def test_a_png_holds_the_pixels(pixels: Any) -> None:
    np.testing.assert_array_equal(decoded(png(pixels)), pixels)


def test_every_filter_is_used_and_read_back() -> None:
    y, x = np.mgrid[:64, :64]
    g = np.random.default_rng(1)
    smooth = np.stack([2 * x, 2 * y, x + y, (x * y) // 32, g.integers(0, 255, x.shape)], axis=0)
    for channel in smooth:
        pixels = channel.astype(np.uint8)[:, :, None]
        np.testing.assert_array_equal(decoded(png(pixels)), pixels)


GREY = np.array([[0, 51], [102, 255]], np.uint8)

PICTURES: dict[str, tuple[Any, Any]] = {
    "bytes": (GREY, GREY[:, :, None]),
    "fractions": (GREY / 255, GREY[:, :, None]),
    "a tensor in half precision": (torch.tensor(GREY / 255).bfloat16() * 0 + 1, 255),
    "whole numbers": (GREY.astype(np.int64), GREY[:, :, None]),
    "stretched": (np.array([[-1.0, 1.0]]), np.array([[[0], [255]]])),
    "one value": (np.full((2, 2), 7.0), 0),
    "booleans": (np.array([[True, False]]), np.array([[[255], [0]]])),
    "channels first": (torch.tensor(GREY)[None].expand(3, 2, 2), np.repeat(GREY[:, :, None], 3, 2)),
    "channels last": (np.repeat(GREY[:, :, None], 3, 2), np.repeat(GREY[:, :, None], 3, 2)),
}


@pytest.mark.parametrize("what", PICTURES)
def test_arrays_are_pictures(what: str) -> None:
    given_, expected = PICTURES[what]
    np.testing.assert_array_equal(as_bytes(given_), expected)


def test_large_pictures_are_averaged() -> None:
    wide = np.zeros((40, 4 * MAX_SIDE), np.uint8)
    wide[:, 2::4] = 200
    small = as_bytes(wide)
    assert small.shape == (10, MAX_SIDE, 1)
    assert (small == 50).all()


WRONG: dict[str, tuple[Any, str]] = {
    "a vector": (np.zeros(3), "has shape"),
    "five channels": (np.zeros((5, 4, 5)), "1, 3 or 4 channels"),
    "NaN": (np.array([[np.nan]]), "NaN"),
    "words": (np.array([["a"]]), "not numbers"),
    "an object": (object(), "not a picture"),
    "bytes": (b"raw", "show returned a bytes"),
    "a dict": ({"a": 1}, "show returned a dict"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_show_may_not_return(what: str) -> None:
    given_, words = WRONG[what]
    with pytest.raises(ms.ArgumentError, match=words):
        look(given_)


def test_looks() -> None:
    assert look(None) is None
    assert look("a text") == {"text": "a text"}
    assert look(["a", " b"]) == {"tokens": ["a", " b"]}
    assert look((GREY, "grey")) == {"picture": data_uri(GREY), "text": "grey"}
    long = look("x" * (MOST_CHARACTERS + 7))
    assert long == {"text": "x" * MOST_CHARACTERS, "more": 7}
    tokens = look(["y" * 1500, "z" * 600, "w"])
    assert tokens == {"tokens": ["y" * 1500], "more": 601}


# Numbers.


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_the_strongest_are_those_of_top(monkeypatch: Any, better: Any) -> None:
    monkeypatch.setattr(strongest, "_BLOCK", 4 * N)  # several blocks
    given_ = influence(better=better, example_ids=None)
    found = strongest.strongest(given_, 5, most_queries=K - 3)
    np.testing.assert_allclose(found.norms, np.linalg.norm(given_.dense(), axis=1))
    assert len(found.each) == K - 3
    for q, strong in enumerate(found.each):
        for kind in ("helpful", "harmful"):
            effects = [(i, -score) for i, score in given_.top(q, 5, kind)]
            assert [i for i, _ in getattr(strong, kind)] == [i for i, _ in effects]
            np.testing.assert_allclose([e for _, e in getattr(strong, kind)],
                                       [e for _, e in effects])  # fmt: skip
    harm = given_.harmfulness() / K
    assert found.together.harmful[0][0] == int(harm.argmax())
    assert abs(found.together.harmful[0][1]) == pytest.approx(harm.max())


def test_ties_zeros_and_weights() -> None:
    Y = np.array([[0.0, -1.0, -1.0, 3.0, -2.0, 0.0]])
    w = np.array([1.0, 1.0, 1.0, 0.0, 2.0, 1.0])
    found = strongest.strongest(ms.Influence.from_dense(Y, weights=w), 9, 1).each[0]
    assert found.helpful == [(4, 4.0), (1, 1.0), (2, 1.0)]
    assert found.harmful == []  # what has no weight is gone already
    first = strongest.strongest(ms.Influence.from_dense(Y), 2, 1).each[0]
    assert first.helpful == [(4, 2.0), (1, 1.0)]


def test_energy_and_norms_in_words() -> None:
    geometry = Geometry(np.array([1.0, 3.0, 0.0, 0.01]))
    assert "90.0%" in charts.energy_in_words(geometry)
    assert "2.5 orders" in charts.norms_in_words(geometry)
    assert "1 are zero" in charts.norms_in_words(geometry)


@pytest.mark.parametrize("norms", [np.ones(1), np.logspace(0, -9, 1000), np.array([0.0, 1.0])])
def test_plots_stay_in_their_frame(norms: Any) -> None:
    for svg in (charts.row_norms(Geometry(norms)), charts.energy(Geometry(norms))):
        (points,) = re.findall(r'points="([^"]*)"', svg)
        places = np.array([[float(v) for v in point.split(",")] for point in points.split()])
        assert (places >= 0).all()
        assert (places <= [charts.WIDTH, charts.HEIGHT]).all()
        assert len(places) <= 400


def test_values_that_are_not_known_are_left_out(tmp_path: Path) -> None:
    outputs = np.ones(K)
    outputs[4] = np.nan
    path = ms.report(influence(outputs=outputs), tmp_path / "a.html")
    values = [q["value"] for q in table(path)["queries"]]
    assert values == [None if q == 4 else 1 for q in range(K)]
    path = ms.report(influence(outputs=None), tmp_path / "b.html")
    assert {q["value"] for q in table(path)["queries"]} == {None}


def test_scores_that_are_all_zero(tmp_path: Path) -> None:
    path = ms.report(ms.Influence.from_dense(np.zeros((2, 3))), tmp_path / "page.html")
    assert "every row is zero" in path.read_text("utf-8")


NOUNS = {
    "cross_entropy": "loss",
    "hf_completion_nll.<locals>.measure": "loss",
    "margin": "margin",
    "Probe.hidden_norm": "hidden norm",
    "main.<locals>.<lambda>": "measurement",
}


@pytest.mark.parametrize("measure", NOUNS)
def test_a_measure_has_a_noun(measure: str) -> None:
    assert noun_of(influence(facts={"measure": measure})) == NOUNS[measure]


# The file.


class Reader(HTMLParser):
    """Elements and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.held: dict[str, list[str]] = {"script": [], "style": []}
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag in self.held:
            self.held[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.held:
            self.held[self._open][-1] += data


def sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_one_file_with_a_policy_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = ms.report(influence(), tmp_path / "sub" / "page.html", title=EVIL)
    page = Reader(path.read_text("utf-8"))
    data, script = page.held["script"]
    (style,) = page.held["style"]
    (policy,) = (a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert f"script-src '{sha256(script)}'" in policy
    assert f"style-src '{sha256(style)}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert [a.get("type") for t, a in page.tags if t == "script"] == ["application/json", None]
    held = {name for _, attributes in page.tags for name in attributes}
    assert not any(name.startswith("on") or name in ("src", "style") for name in held)
    assert not {"img", "iframe", "object", "embed", "form"} & {t for t, _ in page.tags}
    assert "http" not in style + script
    names = [query["name"] for query in json.loads(data)["queries"]]
    assert names[0] == EVIL.replace("\ud800", "?")
    assert "holds training data" in path.read_text("utf-8")


def test_quality_and_doctor_come_first_and_say_how_to_get_them(tmp_path: Path) -> None:
    text = ms.report(influence(), tmp_path / "a.html").read_text("utf-8")
    assert text.index("Not estimated") < text.index("Not asked") < text.index("<dl")
    assert "metasketch evaluate" in text
    verdict = Verdict("rough", 0.31, 0.1, 0.5, 0.01, 8, sound=False)
    said = ms.report(influence(), tmp_path / "b.html", diagnosis=verdict).read_text("utf-8")
    assert '<p class="verdict">Rough, and a check failed</p>' in said
    assert "LDS of about 0.31 [0.10, 0.50] when 1% of the examples are removed" in said
    findings = (Finding("replay", False, None, "<other> bits"), Finding("adjoint", True, 0.0, "ok"))
    none = np.zeros((0, K))
    whole = Diagnosis(verdict, {}, 0.5, findings, ("a smaller rate",), none, none)
    said = ms.report(influence(), tmp_path / "c.html", diagnosis=whole).read_text("utf-8")
    assert "Failed: replay: &lt;other&gt; bits" in said
    assert "To change: a smaller rate" in said
    assert "adjoint" not in said


def test_a_file_as_large_as_asked_says_what_it_left_out(tmp_path: Path) -> None:
    whole = ms.report(influence(), tmp_path / "whole.html").stat().st_size
    noise = np.random.default_rng(0).integers(0, 255, (N, 64, 64), np.uint8)
    large = influence(example_looks=lambda i: noise[i])
    path = ms.report(large, tmp_path / "small.html", size=whole)
    assert path.stat().st_size <= whole
    text = path.read_text("utf-8")
    examples = table(path)["examples"]
    without = sum("column" not in example for example in examples)
    assert 0 < without < len(examples)
    assert f"{without:,} are here by name and score alone" in text
    assert all("column" in example for example in examples[: len(examples) - without])
    with pytest.raises(ms.ArgumentError, match=r"too small.*Give more"):
        ms.report(large, tmp_path / "none.html", size="30KB")
    assert not (tmp_path / "none.html").exists()


def test_measured_quality_is_said_of_the_whole_and_of_each_query(tmp_path: Path) -> None:
    made = influence(facts={}, query_ids=None)
    g = np.random.default_rng(3)
    subsets = np.stack([g.permutation(N)[:6] for _ in range(40)])
    true = made.predict_removal(subsets)
    true[:, 1] *= -1
    measured = ms.evaluate.Removals(subsets, true, np.zeros(K))
    path = ms.report(made, tmp_path / "page.html", removals=measured)
    scores = [query["lds"] for query in table(path)["queries"]]
    np.testing.assert_allclose(scores, [[1.0], [-1.0], *[[1.0]] * (K - 2)])
    text = path.read_text("utf-8")
    assert f"LDS {1 - 2 / K:.2f}" in text
    assert "measured on 40 retrained models" in text


def quality() -> ms.Quality:
    lds = np.linspace(0.2, 0.9, K)
    lds[3] = np.nan
    mean = Interval(0.61, 0.55, 0.66)
    return ms.Quality(
        lds, lds - 0.1, lds + 0.1, lds, lds - 0.1, lds + 0.1, mean, mean, mean, 0.9, 8
    )


def test_estimated_quality_comes_with_its_interval(tmp_path: Path) -> None:
    audited = influence(quality=quality())
    path = ms.report(audited, tmp_path / "page.html")
    text = path.read_text("utf-8")
    assert "LDS 0.61 of that of exact scores" in text
    assert "90% interval 0.55 to 0.66, estimated from 8 sweeps" in text
    queries = table(path)["queries"]
    assert queries[0]["lds"] == pytest.approx([0.2, 0.1, 0.3])
    assert queries[3]["lds"] == []


@pytest.fixture(scope="module")
def attributed() -> tuple[ms.Recipe, ms.Queries, ms.Influence]:
    recipe = problems.recipe("cnn", "sgd", "plain", ids=[f"image {i}" for i in range(10)],
                             show=lambda item: (item[0], f"labelled {int(item[1])}"))  # fmt: skip
    x, y = problems.inputs("cnn", 3, seed=2)
    queries = ms.Queries((x, y), ms.losses.cross_entropy, show=lambda item: item[0])
    return recipe, queries, ms.attribute(ms.train(recipe), queries, "exact")


def table(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Reader(path.read_text("utf-8")).held["script"][0])
    return read


def test_attributions_know_what_their_examples_look_like(attributed: Any, tmp_path: Path) -> None:
    recipe, queries, made = attributed
    fresh = table(ms.report(made, tmp_path / "fresh.html"))
    first = fresh["examples"][0]
    assert first["name"] == f"image {first['index']}"
    assert first["look"]["text"] == f"labelled {int(recipe.data[1][first['index']])}"
    assert first["look"]["picture"] == data_uri(recipe.data[0][first["index"]])
    assert all(query["look"]["picture"].startswith("data:image/png") for query in fresh["queries"])

    loaded = ms.Influence.load(made.save(tmp_path / "one.influence"))
    bare = ms.report(loaded, tmp_path / "bare.html")
    assert table(bare)["examples"][0]["look"] is None
    assert "Pictures or texts of the training examples" in bare.read_text("utf-8")
    again = ms.report(loaded, tmp_path / "again.html", recipe=recipe, queries=queries)
    assert table(again) == fresh


def test_pictures_of_other_data_are_refused(attributed: Any, tmp_path: Path) -> None:
    recipe, queries, made = attributed
    x, y = recipe.data
    other = problems.with_options(recipe, data=(x + 1, y))
    with pytest.raises(ms.MismatchError, match="checksums differ"):
        ms.report(made, tmp_path / "no.html", recipe=other)
    fewer = ms.Queries((x[:2], y[:2]), queries.measure)
    with pytest.raises(ms.MismatchError, match="2 items, and the influence 3"):
        ms.report(made, tmp_path / "no.html", queries=fewer)
    failing = problems.with_options(recipe, show=lambda item: 1 / 0)
    with pytest.raises(ms.DataError, match=r"show failed on example \d+: ZeroDivisionError"):
        ms.report(made, tmp_path / "no.html", recipe=failing)
    with pytest.raises(ms.ArgumentError, match="n=0"):
        ms.report(made, tmp_path / "no.html", n=0)
    with pytest.raises(ms.ArgumentError, match="nothing to show"):
        ms.report(ms.Influence.from_dense(np.zeros((0, 3))), tmp_path / "no.html")


def test_query_sets_that_were_put_together_keep_their_looks(attributed: Any) -> None:
    _, queries, made = attributed
    both = ms.Influence.concatenate([made, made])
    assert both.query_looks is not None
    torch.testing.assert_close(both.query_looks(4), queries.examples.data[0][1])


# In a browser.

needs_chromium = pytest.mark.skipif(
    browser.executable() is None,
    reason="there is no Chromium on the PATH or in $CHROMIUM: apt-get install chromium",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: Any) -> Iterator[browser.Page]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(page: browser.Page, path: Path, width: int = 1200, theme: str = "light") -> None:
    page.complaints.clear()
    page.requests.clear()
    page.look_like(width, 900, theme)
    page.open(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("a <b> & 'c' #1")
    return ms.report(influence(), folder / "page%41.html")


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_it_opens_without_complaints(page: Any, written: Path, width: int, theme: str) -> None:
    opened(page, written, width, theme)
    assert page.complaints == []
    assert {address.split(":")[0] for address in page.requests} <= {"file", "data"}
    assert sum(address.startswith("file") for address in page.requests) == 1
    assert page.run("typeof hacked") == "undefined"
    assert page.run("document.documentElement.scrollWidth") == width  # nothing sticks out
    assert page.run("document.images.length") > 0
    loaded = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
    page.wait(loaded)
    style = "getComputedStyle(document.body)"
    colours = page.run(f"[{style}.color, {style}.backgroundColor]")
    dark_ink, dark_page = (sum(map(int, re.findall(r"\d+", c))) < 300 for c in colours)
    assert (dark_ink, dark_page) == ((True, False) if theme == "light" else (False, True))


@needs_chromium
def test_the_policy_stops_what_slips_through(page: Any, written: Path) -> None:
    opened(page, written)
    refused = (
        "(() => { try { document.body.innerHTML = '<img src=x onerror=hacked=1>' } catch { }"
        " try { setTimeout('hacked=1') } catch { }"
        " const image = new Image(); image.src = 'https://elsewhere.example/';"
        " document.body.append(image);"
        " return new Promise(done => setTimeout(() => done(typeof hacked), 50)) })()"
    )
    assert page.run(refused) == "undefined"
    assert any("img-src" in complaint for complaint in page.complaints)


@needs_chromium
def test_search_and_sort(page: Any, written: Path) -> None:
    opened(page, written)
    made = influence()
    names = "#list details .title b"
    assert page.texts(names)[0] == "All queries together"
    assert page.texts(names)[2:4] == ["question 1", "question 2"]
    page.type("#search", "question 7")
    assert page.texts(names) == ["question 7", "question 17", "question 27"]
    assert page.texts("#count") == ["3 of 30 queries"]
    page.type("#search", "Example <7>")
    listed = [q for q in range(K) for kind in ("helpful", "harmful")
              if "example <7>" in dict(made.top(q, 10, kind))]  # fmt: skip
    assert 0 < len(listed) < K
    assert page.texts("#count") == [f"{len(listed)} of 30 queries"]
    page.type("#search", "onerror TOKEN hacked")
    assert len(page.texts(names)) == K
    page.type("#search", "nowhere")
    assert page.texts(names) == []
    page.type("#search", "")
    orders = {
        "value": np.argsort(-np.asarray(made.outputs), kind="stable"),
        "norm": np.argsort(-np.linalg.norm(made.dense(), axis=1), kind="stable"),
        "number": np.arange(K),
    }
    for key, order in orders.items():
        page.type("#sort", key)
        ids = made.query_ids or ()
        wanted = [ids[q].replace("\u2028", " ").replace("\ud800", "?") for q in order]
        shown = [name.replace("\u2028", " ").replace("\n", " ") for name in page.texts(names)[1:]]
        assert shown == wanted


def numbers_in(text: str) -> list[float]:
    plain = text.replace("−", "-")
    return [float(v) for v in re.findall(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", plain)]


VARIANTS: dict[str, Callable[[], ms.Influence]] = {
    "factors": influence,
    "columns": lambda: ms.Influence.from_dense(influence().dense()),
    "weights": lambda: influence(weights=np.linspace(0.5, 2, N)),
    "higher is better": lambda: influence(better="higher"),
}


@needs_chromium
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_removal_box_predicts_every_query(page: Any, tmp_path: Path, variant: str) -> None:
    made = VARIANTS[variant]()
    opened(page, ms.report(made, tmp_path / "page.html"))
    for which in (0, 12):
        page.click("#list .query[open] .card input", which)
    removed = page.run("document.querySelector('#removed').value")
    places = [int(v) for v in re.findall(r"\d+", removed)]
    assert len(places) == 2
    change = made.predict_removal(places)
    shown = page.run("[...changes]")
    np.testing.assert_allclose(shown, change, rtol=1e-5, atol=1e-7)
    (line,) = page.texts("#removal-line")
    assert numbers_in(line)[-1] == pytest.approx(change.mean(), rel=0.06)
    worse = (change > 0) if made.better == "lower" else (change < 0)
    words = page.texts("#removal-body p")[0]
    assert f"worse for {worse.sum()}, better for {K - worse.sum()}" in words
    assert ("raise" if change.mean() > 0 else "lower") in words
    # The list says the same of each query, and sorts by it.
    page.type("#sort", "change")
    largest = int(np.abs(change).argmax())
    first = page.texts("#list .change")[1]
    assert numbers_in(first) == [pytest.approx(change[largest], rel=0.06)]
    page.click("#removal-body .buttons button")
    assert page.texts("#removal-line") == ["tick examples"]
    assert page.run("document.querySelectorAll('.card input:checked').length") == 0
    assert page.complaints == []


@needs_chromium
def test_queries_sort_by_their_quality(page: Any, tmp_path: Path) -> None:
    opened(page, ms.report(influence(quality=quality()), tmp_path / "page.html"))
    page.type("#sort", "lds")
    names = page.texts("#list details .title b")
    assert names[2:4] == ["question 1", "question 2"]
    assert names[-1] == "question 3"  # whose quality is not known
    assert "LDS 0.22 of exact [0.12, 0.32]" in page.texts("#list .numbers")[2]
    assert page.complaints == []


@needs_chromium
def test_signs_in_words(page: Any, tmp_path: Path) -> None:
    Y = [[-0.12, 0.05, 0.0], [-0.12, 0.05, 0.0]]
    opened(page, ms.report(ms.Influence.from_dense(Y, facts={"measure": "cross_entropy"}),
                           tmp_path / "page.html"))  # fmt: skip
    page.click("#list details summary", 1)
    kinds = page.texts("#list details:nth-child(2) .effect")
    assert [text.replace("\u00a0", " ") for text in kinds] == [
        "removing this would raise the loss by 0.12",
        "removing this would lower the loss by 0.05",
    ]
    assert page.texts("#list details:nth-child(2) h3 > span") == ["Most helpful", "Most harmful"]


@needs_chromium
@pytest.mark.slow
def test_a_thousand_queries_and_two_hundred_thousand_examples(page: Any, tmp_path: Path) -> None:
    k, n, r = 1000, 200_000, 40
    g = np.random.default_rng(0)
    noise = g.integers(0, 255, (64, 32, 32, 3), np.uint8)
    C, Q = g.normal(size=(k, r)), g.normal(size=(r, n)).astype(np.float32)
    made = ms.Influence.from_factors(
        C, Q, example_looks=lambda i: noise[i % 64], query_looks=lambda q: noise[q % 64]
    )
    path = ms.report(made, tmp_path / "page.html")
    assert 20e6 < path.stat().st_size < 30e6
    assert "by name and score alone" in path.read_text("utf-8")
    page.look_like(1200, 900)
    page.complaints.clear()
    assert min(page.open(path) for _ in range(5)) < 3
    page.type("#search", "query 999")
    assert page.texts("#list .title b") == ["query 999"]
    assert page.complaints == []
