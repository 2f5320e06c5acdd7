"""The demonstration: digits of which some labels were deliberately spoiled, from end to end.

The claim: from few sweeps through training one can tell which examples do harm, and what training
without them would give; every number is checked against models that were trained again.
"""

import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metasketch import losses, measures
from metasketch.attribute import attribute
from metasketch.commands import Outcome, Results, retrained, table
from metasketch.diagnose import diagnose
from metasketch.errors import ArgumentError
from metasketch.influence import Influence
from metasketch.metrics import Interval, lds_interval, relative_error
from metasketch.optim import SGD
from metasketch.queries import Queries
from metasketch.recipe import Recipe
from metasketch.report import report
from metasketch.run import Run
from metasketch.schedules import one_cycle
from metasketch.train import train

NAME = "metasketch.demo:recipe"
"""What to call the recipe in other commands."""

NUM_EXAMPLES, NUM_SPOILED, NUM_QUERIES = 1000, 100, 300
METHODS, BUDGET = ("random", "mage", "spell", "sage"), 20
FRACTION, NUM_SUBSETS, SEED = 0.02, 100, 0


@dataclass(frozen=True)
class Digits:
    """Images 8 × 8, of which some carry a wrong label in training.

    Attributes:
        x: all images, training first, (n + k, 64), from 0 to 1.
        y: the labels to train on and, after them, the true ones of the queries.
        truth: the true labels of all.
        spoiled: numbers of the training images whose label is wrong.
    """

    x: Tensor
    y: Tensor
    truth: Tensor
    spoiled: Tensor


def digits(seed: int = 0) -> Digits:
    """The images of scikit-learn, in an order and with wrong labels that depend on the seed."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ArgumentError(
            "the demonstration needs scikit-learn for its images: pip install 'metasketch[demo]'"
        ) from None
    images, labels = load_digits(return_X_y=True)
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=draws)[: NUM_EXAMPLES + NUM_QUERIES]
    truth = torch.tensor(labels)[order]
    spoiled = torch.randperm(NUM_EXAMPLES, generator=draws)[:NUM_SPOILED]
    y = truth.clone()
    y[spoiled] = (y[spoiled] + torch.randint(1, 10, (NUM_SPOILED,), generator=draws)) % 10
    return Digits(torch.tensor(images, dtype=torch.float32)[order] / 16, y, truth, spoiled)


def recipe() -> tuple[Recipe, Queries]:
    """A small classifier of the spoiled images; the queries are images that it never saw."""
    data, n = digits(), NUM_EXAMPLES
    wrong = set(data.spoiled.tolist())
    torch.manual_seed(0)
    trained = Recipe(
        model=nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)),
        loss=losses.cross_entropy,
        data=(data.x[:n], data.y[:n]),
        optimizer=SGD(lr=0.1, momentum=0.85),
        schedule=one_cycle(peak=0.3, start=0.1, end=0.0),
        batch_size=50,
        epochs=10,
        ids=[f"image {i}, spoiled" if i in wrong else f"image {i}" for i in range(n)],
        show=lambda item: (item[0].view(8, 8), f"labelled {int(item[1])}"),
    )
    asked = Queries(
        (data.x[n:], data.y[n:]),
        measures.cross_entropy,
        ids=[f"test image {q}" for q in range(NUM_QUERIES)],
        show=lambda item: (item[0].view(8, 8), f"a {int(item[1])}"),
    )
    return trained, asked


def run_demo(args: Namespace) -> Outcome:
    """Train, attribute by several methods, judge them, find the spoiled labels, write the page."""
    torch.set_num_threads(args.threads or 1)  # more are slower on matrices as small as these
    start = time.perf_counter()
    made, queries = recipe()
    results = Results.of(args)
    _say(f"training a classifier of {NUM_EXAMPLES:,} digits, {NUM_SPOILED} of them mislabelled")
    run = train(made, store=results.run, progress=args.progress)

    _say("asking the doctor whether this run can be trusted")
    diagnosis = diagnose(run, queries, progress=args.progress)

    found: dict[str, Influence] = {}
    for method, budget in [*((method, BUDGET) for method in METHODS), ("exact", None)]:
        cost = f"{BUDGET} replays" if budget else f"{NUM_QUERIES} replays, to compare with"
        _say(f"attributing {NUM_QUERIES} test images by {method}: {cost}")
        store = results.sweeps(method)
        found[method] = attribute(run, queries, method, budget, store, progress=args.progress)
        found[method].save(results.influence(method))

    _say(f"training {NUM_SUBSETS} times again, each without {FRACTION:.0%} of the images")
    true = retrained(results, run, queries, FRACTION, NUM_SUBSETS, SEED, args.progress)
    scores = {method: lds_interval(made_by, true) for method, made_by in found.items()}
    errors = {method: relative_error(made_by, found["exact"]) for method, made_by in found.items()}

    _say("looking for the spoiled labels, and training again without the images that were found")
    search = find_spoiled(run, queries, args.progress)

    shown = METHODS[-1]
    page = report(
        found[shown],
        results.page,
        diagnosis=diagnosis,
        removals=true,
        title=_TITLE,
        progress=args.progress,
    )
    seconds = time.perf_counter() - start
    facts = {
        "verdict": diagnosis.verdict.facts(),
        "methods": {
            method: {
                "sweeps": dict(found[method].sweeps),
                "lds": asdict(scores[method]),
                "relative_error": errors[method],
            }
            for method in found
        },
        "spoiled": asdict(search),
        "report": str(page),
        "seconds": seconds,
    }
    words = "\n\n".join(
        (
            f"The run is {diagnosis.verdict}.",
            _methods_in_words(found, scores, errors),
            search.in_words(),
            _next_in_words(shown, page, results, seconds),
        )
    )
    return Outcome(words, facts)


@dataclass(frozen=True)
class Search:
    """How the search for spoiled labels went.

    Attributes:
        planted: spoiled labels.
        found: of the as many images that rank as most harmful, those that are spoiled.
        predicted, true: change of the mean test loss without these images.
        loss, accuracy: of the run, on the test images.
        accuracy_after: without these images.
    """

    planted: int
    found: int
    predicted: float
    true: float
    loss: float
    accuracy: float
    accuracy_after: float

    def in_words(self) -> str:
        return (
            f"Spoiled labels: one replay, of the mean test loss, ranks all images by harm. Of the "
            f"{self.planted} most\nharmful {self.found} are among the {self.planted} spoiled "
            f"(precision {self.found / self.planted:.0%}; by chance "
            f"{self.planted / NUM_EXAMPLES:.0%}).\n"
            f"Training without these {self.planted} images changes the mean test loss of "
            f"{self.loss:.3f}\n"
            f"  predicted  {self.predicted:+.3f}\n"
            f"  true       {self.true:+.3f}, accuracy {self.accuracy:.1%} -> "
            f"{self.accuracy_after:.1%}"
        )


def find_spoiled(run: Run, queries: Queries, progress: bool | None = None) -> Search:
    """Rank images by harm to the mean test loss, remove the worst, train again, and compare.

    The mean loss is one combination of the queries, so a single replay gives its row exactly.
    """
    mean = {name: v.mean(0, keepdim=True) for name, v in queries.gradients(run).items()}
    harm = Influence.from_dense(run.replay(mean, progress=progress), better=queries.better)
    worst = np.argsort(-harm.harmfulness(), kind="stable")[:NUM_SPOILED]
    weights = run.weights.clone()
    weights[worst] = 0.0
    again = train(run.recipe, weights, progress=progress)
    before, after = (queries.values(r).mean() for r in (run, again))
    spoiled = digits().spoiled.numpy()
    return Search(
        planted=NUM_SPOILED,
        found=int(np.isin(worst, spoiled).sum()),
        predicted=float(harm.predict_removal(worst)[0]),
        true=float(after - before),
        loss=float(before),
        accuracy=_accuracy(run, queries),
        accuracy_after=_accuracy(again, queries),
    )


_TITLE = "Digits with spoiled labels: which images helped, and which did harm"


def _accuracy(run: Run, queries: Queries) -> float:
    x, y = queries.examples.data
    with torch.no_grad():
        return float((run.model()(x).argmax(1) == y).double().mean())


def _say(step: str) -> None:
    print(f"... {step}", file=sys.stderr, flush=True)


def _methods_in_words(
    found: dict[str, Influence], scores: dict[str, Interval], errors: dict[str, float]
) -> str:
    rows = [
        (
            method,
            f"{sum(influence.sweeps.values()):g}",
            f"{scores[method].mean:.2f}",
            f"{scores[method].low:.2f} to {scores[method].high:.2f}",
            f"{errors[method]:.2f}",
        )
        for method, influence in found.items()
    ]
    level = next(iter(scores.values())).level
    return (
        f"{NUM_QUERIES} test images attributed to {NUM_EXAMPLES:,} training images, and judged by "
        f"{NUM_SUBSETS} models trained again:\n\n"
        + table(("method", "sweeps", "LDS", f"{level:.0%} interval", "error"), rows)
        + "\n\nLDS: rank correlation of predicted and true changes, mean over test images; "
        "1 is perfect.\nError: distance from the exact scores, relative to their size. "
        f"Exact takes {NUM_QUERIES} sweeps."
    )


def _next_in_words(shown: str, page: Any, results: Results, seconds: float) -> str:
    return (
        f"The page, with the scores by {shown}: {page}\n"
        f"All of it took {seconds:.0f} s. Results are in {results.folder}; the recipe is {NAME}.\n"
        "Next:\n"
        f"  open {page} in a browser\n"
        f"  metasketch attribute {NAME} --method {shown} --budget {2 * BUDGET}   "
        "extend the sweeps\n"
        f"  metasketch evaluate {NAME} --fraction {FRACTION:g} --subsets {NUM_SUBSETS}   "
        "judge them again\n"
        "  metasketch check your_file.py:recipe   try a recipe of your own"
    )
