"""The page around the data: what it says without a script, its policy, and its parts as one file.

A strict content security policy allows the page's own script and style by their checksums and
nothing else, so text that slipped through as markup could neither run nor load anything.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template

import numpy as np

from metasketch import charts
from metasketch.diagnose import Diagnosis
from metasketch.geometry import Geometry
from metasketch.influence import Influence
from metasketch.methods import methods
from metasketch.metrics import Interval
from metasketch.verdict import Verdict
from metasketch.version import __version__

_PARTS = {
    name: resources.files("metasketch").joinpath("page", f"report.{name}").read_text("utf-8")
    for name in ("html", "css", "js")
}

_NOUNS = {"cross_entropy": "loss", "nll": "loss", "loss": "loss", "margin": "margin"}
"""What measures with such names are called in a sentence."""


def page(head: Mapping[str, str], left_out: Sequence[str], data: str) -> bytes:
    """The whole file.

    Args:
        head: what `head` made.
        left_out: in words, what the page does not hold.
        data: a JSON table that is safe inside of a script element.
    """
    style, script = _PARTS["css"].strip(), _PARTS["js"].strip()
    policy = "; ".join(
        (
            "default-src 'none'",
            "img-src data:",
            f"style-src '{_sha256(style)}'",
            f"script-src '{_sha256(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    own = {"policy": policy, "style": style, "script": script, "data": data}
    filled = Template(_PARTS["html"]).substitute(
        head, **own, left_out=_items(left_out), version=__version__
    )
    return _bytes(filled)


def size_of(text: str) -> int:
    """Bytes that a text takes in the file."""
    return len(_bytes(text))


def _bytes(text: str) -> bytes:
    # Half a character pair, which no encoding has, becomes a question mark.
    return text.encode("utf-8", errors="replace")


def _sha256(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def noun_of(influence: Influence) -> str:
    """What the measurement is called in a sentence."""
    name = str(influence.facts.get("measure", "measurement"))
    if known := next((noun for part, noun in _NOUNS.items() if part in name), None):
        return known
    last = name.rsplit(".", 1)[-1]
    return "measurement" if "<" in last else last.replace("_", " ")


def head(
    influence: Influence,
    geometry: Geometry,
    title: str | None,
    noun: str,
    diagnosis: Diagnosis | Verdict | None,
    measured: tuple[Interval, int] | None,
) -> dict[str, str]:
    """The parts of the page that need no script, as markup.

    Args:
        diagnosis: what the doctor said, or None.
        measured: the mean LDS, and from how many retrained models, where there were any.
    """
    K, N = influence.num_queries, influence.num_examples
    return {
        "title": escape(title or f"What {N:,} training examples did to {K:,} queries"),
        "noun": escape(noun),
        "quality": _paragraphs(_quality(influence, measured)),
        "doctor": _paragraphs(_doctor(diagnosis)),
        "cost": _paragraphs(_cost(influence)),
        "facts": "".join(_fact(*pair) for pair in _facts(influence, noun)),
        "remarks": _items(influence.notes or ("None.",)),
        "plots": _plots(geometry),
    }


def _plots(geometry: Geometry) -> str:
    if not geometry.row_norms.any():
        return "<p>No example influences any query: every row is zero.</p>"
    figures = (
        (
            charts.row_norms(geometry),
            f"{charts.norms_in_words(geometry)}. A query with a small row is moved little by any "
            "one example.",
        ),
        (
            charts.energy(geometry),
            f"{charts.energy_in_words(geometry)}. An error of reconstruction is about these rows; "
            "rank correlations count every query alike.",
        ),
    )
    return "".join(
        f"<figure>{svg}<figcaption>{escape(words)}</figcaption></figure>" for svg, words in figures
    )


def _fact(name: str, value: str) -> str:
    wide = ' class="wide"' if len(value) > _LONG else ""
    return f"<div{wide}><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


_LONG = 60
"""Characters of a fact that has a line of its own."""


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _paragraphs(texts: Sequence[str]) -> str:
    first, *rest = texts
    return f'<p class="verdict">{escape(first)}</p>' + "".join(
        f"<p>{escape(text)}</p>" for text in rest
    )


def _quality(influence: Influence, measured: tuple[Interval, int] | None) -> list[str]:
    said = []
    if measured is not None:
        score, models = measured
        said += [
            f"LDS {score.mean:.2f}",
            f"{score.level:.0%} interval {score.low:.2f} to {score.high:.2f}, measured on "
            f"{models:,} retrained models: the rank correlation of predicted and true changes, "
            "mean over queries. 1 is perfect, 0 is worth nothing.",
        ]
    if influence.method == "exact":
        exact = (
            "Every row is the derivative itself, up to rounding. How well derivatives predict a "
            "removal depends on the run: ask the doctor."
        )
        return [*said, exact] if said else ["Exact", exact]
    if influence.quality is not None:
        found, ratio = influence.quality, influence.quality.mean_lds
        estimated = (
            f"{found.level:.0%} interval {ratio.low:.2f} to {ratio.high:.2f}, estimated from "
            f"{found.sweeps} sweeps in random directions, mean over queries. Of the energy of "
            f"exact scores {found.total_captured.estimate:.0%} is captured."
        )
        words = f"LDS {ratio.estimate:.2f} of that of exact scores"
        return [*said, f"{words}: {estimated}"] if said else [words, estimated]
    return said or [
        "Not estimated",
        "How near these scores are to the exact ones is not known. To estimate it, spend a few "
        "sweeps: --audit 8, or ms.audit(run, queries, influence). To measure it, compare with "
        "retrained models: metasketch evaluate, or ms.evaluate.removals.",
    ]


def _doctor(diagnosis: Diagnosis | Verdict | None) -> list[str]:
    if diagnosis is None:
        return [
            "Not asked",
            "Whether this run responds smoothly to its data decides how far any of this can be "
            "trusted: metasketch doctor, or ms.diagnose(run, queries), which diagnosis=... takes.",
        ]
    verdict = diagnosis.verdict if isinstance(diagnosis, Diagnosis) else diagnosis
    said = [verdict.word.capitalize() + ("" if verdict.sound else ", and a check failed")]
    said.append(
        f"Exact scores would reach an LDS of about {verdict.score:.2f} [{verdict.low:.2f}, "
        f"{verdict.high:.2f}] when {verdict.fraction:.0%} of the examples are removed: the "
        f"ceiling for any estimate, from {verdict.retrainings} retrainings."
    )
    if isinstance(diagnosis, Diagnosis):
        failed = (finding for finding in diagnosis.findings if finding.passed is False)
        said += [f"Failed: {finding.name}: {finding.words}" for finding in failed]
        said += [f"To change: {knob}" for knob in diagnosis.advice]
    return said


def _cost(influence: Influence) -> list[str]:
    names = {
        "replay": "replays",
        "forward": "forward passes",
        "prior": "for the prior",
        "audit": "to judge the result",
    }
    taken = [f"{_count(v)} {names.get(k, k)}" for k, v in influence.sweeps.items() if v]
    if not taken:
        return ["Not recorded"]
    whole = sum(influence.sweeps.values())
    exact = influence.num_queries
    said = [f"{_count(whole)} sweeps", f"Through the whole training run: {', '.join(taken)}."]
    if whole < exact:
        said.append(f"Exact scores would have taken {exact:,} replays.")
    return said


def _facts(influence: Influence, noun: str) -> list[tuple[str, str]]:
    """What was trained and measured, in words."""
    facts = influence.facts
    made = [("Method", f"{influence.method}: {methods().get(influence.method, 'not one of ours')}")]
    if influence.budget is not None:
        made.append(("Budget", f"{influence.budget:,} replays"))
    made.append(("Rank", f"{influence.rank:,}"))
    trained = [("Training examples", f"{influence.num_examples:,}")]
    if influence.weights is not None and not (influence.weights == 1).all():
        gone = int((influence.weights == 0).sum())
        trained.append(("Data weights", f"not all 1; {gone:,} are 0, which means removed"))
    if "steps" in facts:
        trained.append(("Training steps", f"{facts['steps']:,}"))
    names = {"optimizer": "Optimizer", "seed": "Seed", "clip_norm": "Gradient clipped to"}
    trained += [(names[k], str(facts[k])) for k in names if facts.get(k) is not None]
    asked = [("Queries", f"{influence.num_queries:,}"), ("Measurement", noun)]
    asked.append(("Better is", influence.better))
    if influence.outputs is not None and np.isfinite(influence.outputs).all():
        low, middle, high = np.quantile(influence.outputs, (0, 0.5, 1))
        asked.append(("Its values", f"median {middle:.3g}, from {low:.3g} to {high:.3g}"))
    return [*trained, *asked, *made]


def _count(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
