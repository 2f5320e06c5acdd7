"""What each command does: thin calls of the library, and their results in words and as tables."""

import json
import textwrap
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from metasketch import files, recipe_file
from metasketch.advise import TARGETS, advise
from metasketch.attribute import attribute
from metasketch.check import check
from metasketch.diagnose import diagnose
from metasketch.errors import ArgumentError
from metasketch.influence import Influence
from metasketch.looks import look
from metasketch.methods import methods
from metasketch.metrics import lds_interval
from metasketch.queries import Queries
from metasketch.recipe import Recipe
from metasketch.removals import Removals, removals
from metasketch.report import report
from metasketch.run import Run
from metasketch.sizes import format_bytes
from metasketch.store import RunStore
from metasketch.train import train
from metasketch.webpage import noun_of


@dataclass(frozen=True)
class Outcome:
    """What a command ends with.

    Attributes:
        words: for a person.
        facts: for a machine, as JSON has them.
        fine: False where the answer is that something should not be trusted.
    """

    words: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    fine: bool = True


@dataclass(frozen=True)
class Results:
    """The folder that keeps everything made of one recipe."""

    folder: Path

    @classmethod
    def of(cls, args: Namespace) -> "Results":
        given = args.store or f"{recipe_file.short_name(args.recipe)}.metasketch"
        return cls(Path(given).expanduser())

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def page(self) -> Path:
        return self.folder / "report.html"

    def sweeps(self, method: str) -> Path:
        """The store of an attribution, which a later call takes up."""
        return self.folder / "sweeps" / method

    @property
    def evaluation(self) -> Path:
        """Which retrained models were used last: a report shows what they say."""
        return self.folder / "evaluation.json"

    def removals(self, fraction: float, seed: int) -> Path:
        """The store of retrained models, of one size and draw of subsets."""
        return self.folder / "removals" / f"{fraction:g}-{seed}"

    def influence(self, method: str) -> Path:
        return self.folder / f"{method}.influence"

    def influences(self, method: str | None) -> list[Path]:
        """The finished attributions, or the one by a method; refused where there are none."""
        if method is not None:
            found = [self.influence(method)]
            missing = not found[0].exists()
        else:
            found = sorted(self.folder.glob("*.influence"), key=lambda path: path.stat().st_mtime)
            missing = not found
        if missing:
            what = f"by {method!r} " if method else ""
            raise ArgumentError(
                f"{self.folder} holds no attribution {what}yet: make one with metasketch attribute"
            )
        return found


def run_check(args: Namespace) -> Outcome:
    recipe, queries = recipe_file.load(args.recipe)
    found = check(recipe, queries, memory=args.memory)
    for owner in (recipe, queries):  # what a report would ask for
        looks = owner.examples.looks(owner.show)
        if looks is not None:
            look(looks(0))
    facts = {k: v for k, v in asdict(found).items() if k not in ("plan", "unused")}
    facts |= {"recomputation": found.plan.factor, "unused": list(found.unused)}
    following = f"Next: metasketch doctor {args.recipe}"
    return Outcome(f"{found}\n{following}", facts)


def run_train(args: Namespace) -> Outcome:
    recipe, queries = recipe_file.load(args.recipe)
    results, start = Results.of(args), time.perf_counter()
    run = _trained(args, recipe, results)
    seconds = time.perf_counter() - start
    values = queries.values(run)
    noun = noun_of(Influence.from_dense([[0.0]], facts=queries.facts()))
    facts = {
        "store": str(results.run),
        "steps": run.num_steps,
        "examples": run.num_examples,
        "params": run.num_params,
        "queries": queries.num_queries,
        "mean_measurement": float(values.mean()),
        "seconds": seconds,
    }
    words = (
        f"Trained {run.num_params:,} parameters for {run.num_steps:,} steps on "
        f"{run.num_examples:,} examples, in {seconds:.1f} s.\n"
        f"  mean {noun} of {queries.num_queries:,} queries  {values.mean():.4g}\n"
        f"  the run is in  {results.run}\n"
        f"Next: metasketch doctor {args.recipe}"
    )
    return Outcome(words, facts)


def run_attribute(args: Namespace) -> Outcome:
    recipe, queries = recipe_file.load(args.recipe)
    results, start = Results.of(args), time.perf_counter()
    influence = attribute(
        _trained(args, recipe, results),
        queries,
        args.method,
        args.budget,
        results.sweeps(args.method),
        audit=args.audit,
        memory=args.memory,
        on_mismatch="tolerate" if args.tolerate else "refuse",
        progress=args.progress,
        **_options(args.option),
    )
    path = influence.save(results.influence(args.method))
    seconds = time.perf_counter() - start
    facts = {
        "influence": str(path),
        "method": influence.method,
        "budget": influence.budget,
        "sweeps": dict(influence.sweeps),
        "queries": influence.num_queries,
        "examples": influence.num_examples,
        "quality": None if influence.quality is None else influence.quality.facts(),
        "notes": list(influence.notes),
        "seconds": seconds,
    }
    words = (
        f"Attributed {influence.num_queries:,} queries to {influence.num_examples:,} examples by "
        f"{influence.method}, in {seconds:.1f} s.\n"
        f"  sweeps     {sweeps_in_words(influence)}\n"
        f"  result     {path}\n"
        f"{_quality_in_words(influence, args)}\n"
        f"Next: metasketch report {args.recipe}"
    )
    return Outcome(words, facts)


def _quality_in_words(influence: Influence, args: Namespace) -> str:
    if influence.quality is not None:
        return str(influence.quality)
    if influence.method == "exact":
        return "  quality    exact, up to rounding"
    return (
        "  quality    not estimated: add --audit 8, or measure it with metasketch evaluate "
        f"{args.recipe}"
    )


def run_doctor(args: Namespace) -> Outcome:
    recipe, queries = recipe_file.load(args.recipe)
    run = _trained(args, recipe, Results.of(args))
    found = diagnose(
        run,
        queries,
        args.retrainings,
        precision=not args.single,
        memory=args.memory,
        progress=args.progress,
    )
    facts = {
        "passed": found.passed,
        "verdict": found.verdict.facts(),
        "ceilings": {f"{p:g}": asdict(ceiling) for p, ceiling in found.ceilings.items()},
        "along": found.along,
        "findings": [asdict(finding) for finding in found.findings],
        "advice": list(found.advice),
        "diverged": found.diverged,
    }
    following = (
        f"Next: metasketch advise {args.recipe}"
        if found.passed
        else f"Next: change the recipe as said above, then metasketch doctor {args.recipe}"
    )
    return Outcome(f"{found}\n\n{following}", facts, fine=found.passed)


def run_advise(args: Namespace) -> Outcome:
    recipe, queries = recipe_file.load(args.recipe)
    run = _trained(args, recipe, Results.of(args))
    advice = advise(
        run, queries, args.sweeps, args.budget, memory=args.memory, progress=args.progress
    )
    options = [
        {
            "method": option.method,
            "budget": option.budget,
            **option.outcome._asdict(),
            "seconds": option.plan.seconds,
            "memory": option.plan.memory,
            "disk": option.plan.disk,
        }
        for option in advice.options
    ]
    best = {objective: advice.best(objective) for objective in TARGETS}
    chosen = {key: {"method": o.method, "budget": o.budget} for key, o in best.items()}
    first = best["attribution"]
    following = (
        f"Next: metasketch attribute {args.recipe} --method {first.method} --budget {first.budget}"
    )
    return Outcome(f"{advice}\n{following}", {"best": chosen, "options": options})


def run_evaluate(args: Namespace) -> Outcome:
    recipe, queries = recipe_file.load(args.recipe)
    results = Results.of(args)
    sources = results.influences(args.method)
    run = _trained(args, recipe, results)
    true = retrained(results, run, queries, args.fraction, args.subsets, args.seed, args.progress)
    rows, facts = [], []
    for source in sources:
        influence = Influence.load(source)
        score = lds_interval(influence, true)
        rows.append((influence.method, sweeps_in_words(influence), f"{score.mean:.3f}",
                     f"{score.low:.3f} to {score.high:.3f}"))  # fmt: skip
        facts.append(
            {
                "method": influence.method,
                "budget": influence.budget,
                "sweeps": dict(influence.sweeps),
                "lds": asdict(score),
                "influence": str(source),
            }
        )
    words = (
        f"Against {true.num_subsets:,} models trained again without {true.subsets.shape[1]:,} of "
        f"{run.num_examples:,} examples:\n"
        + table(("method", "sweeps", "LDS", f"{score.level:.0%} interval"), rows)
        + "\nThe LDS is the rank correlation of predicted and true changes, mean over queries."
        + f"\nNext: metasketch report {args.recipe}"
    )
    size = int(true.subsets.shape[1])
    about = {"num_subsets": true.num_subsets, "removed": size, "diverged": len(true.diverged)}
    return Outcome(words, {**about, "attributions": facts})


def run_report(args: Namespace) -> Outcome:
    results = Results.of(args)
    source = Path(args.influence) if args.influence else results.influences(args.method)[-1]
    influence = Influence.load(source)
    recipe, queries = recipe_file.load(args.recipe)
    verdict, true = None, None
    if RunStore(results.run).final.exists():
        run = _trained(args, recipe, results)
        verdict = run.verdict
        if results.evaluation.exists():
            last = files.read_json(results.evaluation, "call metasketch evaluate again")
            true = retrained(results, run, queries, **last, progress=args.progress)
    path = report(
        influence,
        args.out or results.page,
        recipe=recipe,
        queries=queries,
        diagnosis=verdict,
        removals=true,
        title=args.title,
        n=args.examples,
        size=args.size,
        progress=args.progress,
    )
    size = path.stat().st_size
    facts = {"report": str(path), "bytes": size, "influence": str(source)}
    words = (
        f"Wrote {path} ({format_bytes(size)}): open it in a browser.\n"
        "  It holds training data: share it as you would share them."
    )
    return Outcome(words, facts)


def run_methods(args: Namespace) -> Outcome:
    known = methods()
    margin = max(map(len, known)) + 2
    lines = (
        textwrap.fill(f"{name:<{margin}}{line}", 100, subsequent_indent=" " * margin)
        for name, line in known.items()
    )
    return Outcome("\n".join(lines), known)


def retrained(
    results: Results,
    run: Run,
    queries: Queries,
    fraction: float,
    subsets: int,
    seed: int,
    progress: bool | None,
) -> Removals:
    """Models trained again, kept in the folder, and noted as the last that were used."""
    store = results.removals(fraction, seed)
    true = removals(run, queries, fraction, subsets, seed, store=store, progress=progress)
    last = {"fraction": fraction, "subsets": subsets, "seed": seed}
    files.write_json(results.evaluation, last)
    return true


def sweeps_in_words(influence: Influence) -> str:
    """What an attribution cost, beside what exact rows would have."""
    kinds = ", ".join(f"{v:g} {k}" for k, v in influence.sweeps.items() if v)
    return f"{kinds or 'none'} (exact rows: {influence.num_queries:,} replays)"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns for a terminal, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _trained(args: Namespace, recipe: Recipe, results: Results) -> Run:
    """The run of a recipe: read from the folder, or trained there."""
    return train(
        recipe, memory=args.memory, store=results.run, disk=args.disk, progress=args.progress
    )


def _options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a method, from texts such as ``floor=0.05``; values as JSON has them."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ArgumentError(f"--option {text}: write it as NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
