"""Methods on digits against exact Y and retraining: records for `make figures` and the tables.

    python -m benchmarks.digits --seeds 5 --store build/digits

Claims, on the interpolating problem: SPELL has the highest LDS of the paper's computable methods
wherever B ≥ 0.2 k and k ≥ 200, and the LDS of the exact Y is above 0.9.

Y is made by real sweeps, one for each query, and removals by real retraining. The budgeted methods
then run through the package's own loop over a stand-in whose replay of z is zᵀY and whose forward
pass is Y uᵀ: the same numbers as real sweeps to their rounding (`--check` compares them), in
seconds for every budget, query set and seed.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import metasketch as ms
from benchmarks.problems import PROBLEMS
from metasketch.attribution_store import Memory
from metasketch.methods import make
from metasketch.progress import exhaust
from metasketch.removals import Removals
from metasketch.scores import RowNorms, Score, score, write_scores
from metasketch.sketch import Sketch, rounds

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
SIZES = (50, 100, 200, 400)
FRACTIONS = (0.01, 0.05)
COMPUTABLE = ("mage", "spell", "random", "first", "pca")
RESULTS = Path(__file__).parent / "results" / "digits.scores.json"


@dataclasses.dataclass(frozen=True)
class ExactRun:
    """What the loop of an attribution asks of a run and its query gradients, answered from Y."""

    Y: Tensor

    @property
    def num_queries(self) -> int:
        return len(self.Y)

    @property
    def num_examples(self) -> int:
        return self.Y.shape[1]

    @property
    def final(self) -> Any:
        return SimpleNamespace(params=self.Y)

    def combine(self, Z: Tensor) -> Tensor:
        return Z.T

    def named(self, bars: Tensor) -> Tensor:
        return bars

    def replay(self, bars: Tensor, *_: Any) -> Tensor:
        return bars @ self.Y

    def forward(self, w_dot: Tensor, *_: Any) -> Tensor:
        return w_dot

    def flat(self, tangents: Tensor) -> Tensor:
        return tangents

    def pair(self, tangents: Tensor) -> Tensor:
        return self.Y @ tangents.T


def simulated(Y: Tensor, G: Tensor, name: str, budget: int, **options: Any) -> ms.Influence:
    """What a method estimates from exact sweeps."""
    method, exact = make(name, **options), ExactRun(Y)
    fixed = method.rule.fixed(budget)
    cut = rounds(0, budget, min(fixed, budget), 64, method.rule.per_round)
    run: Any = exact
    sketch = Sketch(run, run, method, cut, fixed, Memory(), lambda *_: None, lambda: G)
    known = exhaust(sketch.measure())  # type: ignore[arg-type]
    C, Q = method.estimator.factors(known)
    return ms.Influence(C, Q, method=name, budget=budget, sweeps=known.sweeps)


@dataclasses.dataclass(frozen=True)
class Exact:
    """One problem with everything that is known of it."""

    name: str
    seed: int
    run: ms.Run
    queries: ms.Queries
    Y: Tensor
    G: Tensor
    removals: dict[float, Removals]

    @property
    def labels(self) -> list[int]:
        return self.queries.examples.data[1].tolist()


def collected(name: str, seed: int, store: Path | None, num_subsets: int) -> Exact:
    """Train, attribute exactly, and retrain; all of it resumable."""
    recipe, queries = PROBLEMS[name](seed)
    run = ms.train(recipe)

    def place(what: str) -> Path | None:
        return None if store is None else store / f"{name}-{seed}" / what

    exact = ms.attribute(run, queries, "exact", store=place("exact"))
    removals = {
        p: ms.evaluate.removals(run, queries, p, num_subsets, store=place(f"removals-{p}"))
        for p in FRACTIONS
    }
    Y = torch.from_numpy(exact.dense())
    return Exact(name, seed, run, queries, Y, queries.gram(run), removals)


def first_queries(removals: Removals, k: int) -> Removals:
    """The same retrainings, asked the first k queries."""
    return dataclasses.replace(
        removals, delta=removals.delta[:, :k], full=removals.full[:k], facts={}
    )


def judged(exact: Exact) -> Iterator[Score]:
    """Every method and oracle at every budget, number of queries and fraction."""
    for k in SIZES:
        Y, G = exact.Y[:k], exact.G[:k, :k]
        whole = ms.Influence.from_dense(Y, method="exact", budget=k, sweeps={"replay": k})
        estimates = [whole]
        for budget in (round(share * k) for share in SHARES):
            for name in COMPUTABLE:
                options: dict[str, Any] = {}
                if name == "random":
                    options = {"seed": exact.seed}
                elif name == "first":
                    options = {"labels": tuple(exact.labels[:k])}
                estimates.append(simulated(Y, G, name, budget, **options))
            estimates += [ms.evaluate.oracle(whole, budget, kind) for kind in ("svd", "spherical")]
        for p, removals in exact.removals.items():
            asked = first_queries(removals, k)
            for estimate in estimates:
                yield score(estimate, whole, asked, problem=exact.name, seed=exact.seed, fraction=p)


def row_norms(exact: Exact) -> RowNorms:
    gradients = exact.queries.gradient_norms(exact.run)
    found = ms.evaluate.geometry(exact.Y, gradients)
    return RowNorms(
        exact.name, exact.seed, tuple(found.row_norms.tolist()), found.gradient_correlation
    )


def check(exact: Exact, budget: int) -> None:
    """Real sweeps beside the stand-in."""
    for name in ("mage", "spell"):
        real = ms.attribute(exact.run, exact.queries, name, budget)
        stand_in = simulated(exact.Y, exact.G, name, budget)
        gap = np.linalg.norm(real.dense() - stand_in.dense()) / np.linalg.norm(stand_in.dense())
        asked = dataclasses.replace(exact.removals[0.01], facts={})
        a, b = (ms.evaluate.lds(i, asked).mean() for i in (real, stand_in))
        print(f"{name} B={budget}: differ by {gap:.1e}; LDS {a:.4f} by sweeps, {b:.4f} from Y")


def claims(scores: list[Score]) -> list[str]:
    """What the header says, as it came out: one line a claim."""
    hard = [s for s in scores if s.problem == "hard" and s.num_queries >= 200]
    if not hard:
        return []
    ceiling = min(s.lds for s in hard if s.method == "exact" and s.fraction == 0.01)
    wins = total = 0
    for s in hard:
        if s.method != "spell" or s.share < 0.2 or s.fraction != 0.01:
            continue
        rivals = [
            r.lds
            for r in hard
            if r.method in COMPUTABLE[:1] + COMPUTABLE[2:]
            and (r.seed, r.num_queries, r.budget, r.fraction)
            == (s.seed, s.num_queries, s.budget, s.fraction)
        ]
        total, wins = total + 1, wins + (s.lds > max(rivals))
    return [
        f"exact Y: LDS at least {ceiling:.3f} over seeds at 1 % removed",
        f"SPELL highest in {wins} of {total} settings (seed, k ≥ 200, B ≥ 0.2 k) at 1 % removed",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--problems", nargs="+", default=["hard", "easy"], choices=PROBLEMS)
    parser.add_argument("--num-subsets", type=int, default=300)
    parser.add_argument("--store", type=Path, help="a folder for what takes long; resumable")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", type=int, metavar="B", help="compare with real sweeps, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scores: list[Score] = []
    geometries: list[RowNorms] = []
    for name in arguments.problems:
        for seed in range(arguments.seeds):
            exact = collected(name, seed, arguments.store, arguments.num_subsets)
            scores += judged(exact)
            geometries.append(row_norms(exact))
            if arguments.check and seed == 0:
                check(exact, arguments.check)
            names = " ".join(arguments.problems)
            said = (
                f"{date.today()}: {names}, {arguments.seeds} seeds, {arguments.num_subsets} subsets"
            )
            write_scores(arguments.out, scores, geometries, said)
            print(f"{name}, seed {seed}: done", flush=True)
    print("\n".join(claims(scores)))


if __name__ == "__main__":
    main()
