"""LDS and relative Frobenius error against total sweeps: SAGE, the paper's methods, both oracles.

    python -m benchmarks.frontier hard:0,1,2 cifar:0,1,2 language:0,1,2 easy:0,1,2

For each problem and seed the exact Y, the query gradients and the true effects of removals are
made once (a replay for each query, a training for each removal) and kept in a cache. Every method
is then run with its own rule and estimator, as `metasketch.attribute` runs them, on sweeps that are
read off Y: a replay is z^T Y, a forward pass Y q^T; ``--check`` compares with `attribute` itself.
At 2B total sweeps:

    spell, mage, random, first   B replays and B forward passes
    pca, gram                    2B replays ("gram": spherical probes and Gram regression)
    sage                         2B replays less one for its prior
    oracles                      the best rank B

The method was developed on seed 10 of hard, easy and language, on correlations with Y alone: these
are not to be reported. On cifar nothing was chosen.
"""

import argparse
import datetime
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import metasketch as ms
from benchmarks.chart import panels
from benchmarks.problems import PROBLEMS
from benchmarks.registry_data import cache
from metasketch import estimate, prior, probes
from metasketch.calibrate import calibrated
from metasketch.measured import Measured, Paired, Replayed
from metasketch.methods import Method, make
from metasketch.progress import exhaust
from metasketch.query_gradients import QueryGradients
from metasketch.sketch import rounds
from metasketch.surrogate import Stack

SHARES = (0.05, 0.1, 0.15, 0.2)
PAPER = ("spell", "mage", "random", "first", "pca")
RECONSTRUCTION = "sage, reconstruction"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Truth:
    """What the methods are judged by, and what they may look at.

    Attributes:
        Y: exact, (K, N).
        G: Gram matrix of the query gradients, (K, K).
        stack: the surrogates, and ``seconds`` of processor time that they took.
        removals: and their true effects.
        replay_seconds: processor time of one replay in a block.
    """

    Y: Tensor
    G: Tensor
    stack: Stack
    seconds: float
    replay_seconds: float
    removals: ms.evaluate.Removals


def truth(name: str, seed: int, num_subsets: int) -> Truth:
    """Made once and kept, but for the surrogates."""
    recipe, queries = PROBLEMS[name](seed)
    run = ms.train(recipe, progress=False)
    kept = cache() / "frontier" / f"{name}-{seed}-{num_subsets}.npz"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        folder = kept.with_suffix("")
        Y = ms.attribute(run, queries, "exact", store=folder / "exact").dense()
        with run.computing():
            V = QueryGradients(queries.of(run)).V[:, : run.num_params].numpy()
        removals = ms.evaluate.removals(
            run, queries, num_subsets=num_subsets, store=folder / "removals"
        )
        np.savez(kept, Y=Y, V=V, S=removals.subsets, delta=removals.delta, params=run.final.params)
    with np.load(kept) as found:
        data = {name: found[name] for name in ("Y", "V", "S", "delta", "params")}
    if not np.array_equal(data["params"], run.final.params.numpy()):
        raise ValueError(f"{kept} is of another machine or version: delete it")
    with run.computing():
        V = QueryGradients(queries.of(run))
        exhaust(V.hold())
        start = time.process_time()
        states = [state for _, state in prior.checkpoints_of(run)]
        made = [exhaust(prior.surrogate(run, V, state, None)) for state in states]
        seconds = time.process_time() - start
    bars = {n: t.repeat(8, *(1 for _ in t.shape)) for n, t in run.state_dict().items()}
    run.replay(bars, progress=False)  # which settles how
    start = time.process_time()
    run.replay(bars, progress=False)
    replay_seconds = (time.process_time() - start) / 8
    held = torch.from_numpy(data["V"])
    stack = prior.stack_of(run, made)
    Y = torch.from_numpy(data["Y"])
    removals = ms.evaluate.Removals(data["S"], data["delta"], queries.values(run).numpy())
    return Truth(Y, held @ held.T, stack, seconds, replay_seconds, removals)


def attributed(method: Method, replays: int, t: Truth) -> Tensor:
    """Ŷ of a method from so many replays, by its own rule and estimator."""
    K, N = t.Y.shape
    known = Measured(K, N, lambda: t.G, surrogates=lambda: t.stack)
    fixed = method.rule.fixed(replays)
    for number, (start, stop) in enumerate(rounds(0, replays, fixed, 16, method.rule.per_round)):
        seen = known if stop > fixed else Measured(K, N, lambda: t.G)
        Z = method.rule.choose(seen, start, stop)
        known.replays[number] = Replayed(Z, Z.T @ t.Y, torch.ones(stop - start).double())
        if method.estimator.pairs:
            Q, rows = method.estimator.directions(known.Q, known.replays[number].U)
            known.pairs[number] = Paired(Q, t.Y @ Q.T, tuple(start + r for r in rows))
    C, Q = method.estimator.factors(known)
    return C @ Q


def check(name: str, seed: int, t: Truth, share: float = SHARES[0]) -> None:
    """Print how far the estimates here are from those of real sweeps."""
    recipe, queries = PROBLEMS[name](seed)
    run = ms.train(recipe, progress=False)
    K = len(t.Y)
    B = round(share * K)
    for method in ("spell", "sage"):
        real = ms.attribute(run, queries, method, B, progress=False)
        how = make(method)
        gap = ms.evaluate.relative_error(real, attributed(how, how.num_replays(B, K), t))
        print(f"{name} {seed}, {method}, B = {B}: {gap:.1e} from real sweeps {real.sweeps}")


def candidates(K: int) -> dict[str, tuple[Method, Callable[[int], int]]]:
    """Methods by name, and the replays that they take at 2B sweeps."""
    half: Callable[[int], int] = lambda B: B  # noqa: E731
    found = {name: (make(name), half) for name in PAPER if name != "pca"}
    found["pca"] = (make("pca"), lambda B: min(2 * B, K))
    found["gram"] = (make("sage").without_prior(), lambda B: min(2 * B, K))
    for name, objective in (("sage", "attribution"), (RECONSTRUCTION, "reconstruction")):
        method = make("sage", objective=objective)
        found[name] = (method, lambda B, m=method: m.num_replays(B, K))  # type: ignore[misc]
    return found


def scores(Y_hat: Tensor, t: Truth) -> dict[str, float]:
    """LDS against true removals, and relative Frobenius error."""
    influence = ms.Influence.from_dense(Y_hat)
    found = ms.evaluate.lds(influence, t.removals)
    error = ms.evaluate.relative_error(influence, t.Y)
    return {"lds": float(np.nanmean(found)), "error": float(error)}


def rows_of(name: str, seed: int, t: Truth) -> Iterator[dict[str, Any]]:
    """Every score of one problem and seed."""
    K = len(t.Y)
    about = {"problem": name, "seed": seed, "k": K}
    yield {**about, "method": "exact", "share": 1.0, **scores(t.Y, t)}
    yield {**about, "method": "prior", "share": 0.0, **scores(t.stack.checkpoints[0].dense(), t)}
    yield {
        **about,
        **{"method": "cost of the prior", "share": 0.0, "seconds": t.seconds},
        **{"replays": t.seconds / t.replay_seconds, "sweeps": t.stack.cost},
    }
    for share in SHARES:
        B = round(share * K)
        for method, (how, replays) in candidates(K).items():
            found = scores(attributed(how, replays(B), t), t)
            yield {**about, "method": method, "share": share, "B": B, **found}
        for kind in ("svd", "spherical"):
            oracle = torch.from_numpy(ms.evaluate.oracle(t.Y.numpy(), B, kind=kind).dense())
            yield {**about, "method": f"{kind} oracle", "share": share, "B": B, **scores(oracle, t)}


def ablated(name: str, seed: int, t: Truth, share: float = 0.1) -> Iterator[dict[str, Any]]:
    """Each of the pieces alone and together, at one budget."""
    K = len(t.Y)
    B = round(share * K)
    about = {"problem": name, "seed": seed, "share": share, "B": B, "ablation": True}
    gram, leading = estimate.Regression(), probes.Leading()
    mage = probes.Mage()
    stacks = {
        "final checkpoint, one damping": Stack(
            t.stack.checkpoints[:1], t.stack.shapes[:1], 0.0, (1e-3,)
        ),
        "final checkpoint, dampings": Stack(t.stack.checkpoints[:1], t.stack.shapes[:1], 0.0),
        "all checkpoints, dampings": Stack(t.stack.checkpoints, t.stack.shapes[:1], 0.0),
        "with shapes over examples": t.stack,
    }
    spell = make("spell")
    pieces: dict[str, Tensor] = {
        "SPELL (B pairs)": attributed(spell, B, t),
        "spherical probes, projection (B pairs)": attributed(
            Method("", "", leading, estimate.Projection()), B, t
        ),
        "MAGE's probes, Gram regression": attributed(Method("", "", mage, gram), 2 * B, t),
        "spherical probes, Gram regression": attributed(Method("", "", leading, gram), 2 * B, t),
    }
    G, Z = t.G, probes.spherical(t.G, 0, 2 * B - 1)
    U = Z.T @ t.Y
    for label, stack in stacks.items():
        found = calibrated(stack, G, Z, U)
        for scales in (False, True) if label.startswith("with") else (False,):
            S = stack.combined(found.beta) * (found.scales if scales else 1.0)
            text = f"+ prior: {label}" + (", scales (SAGE)" if scales else "")
            pieces[text] = S + probes.deflation(G, Z).T @ (U - Z.T @ S)
        if label.startswith("with"):
            pieces["the same prior, nothing regressed"] = stack.combined(found.beta) * found.scales
    for label, Y_hat in pieces.items():
        yield {**about, "method": label, **scores(Y_hat, t)}


def summary(rows: list[dict[str, Any]]) -> str:
    """The tables: means over seeds and standard errors."""
    lines: list[str] = []
    for name in dict.fromkeys(r["problem"] for r in rows):
        ours = [r for r in rows if r["problem"] == name]
        seeds = sorted({r["seed"] for r in ours})
        lines += ["", f"## {name}", "", f"k = {ours[0]['k']}, seeds {seeds}."]

        def cell(method: str, share: float, key: str, ours: Any = ours) -> tuple[float, float]:
            values = [
                r[key]
                for r in ours
                if r["method"] == method and r["share"] == share and not r.get("ablation")
            ]
            spread = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
            return float(np.mean(values)), float(spread)

        ceiling, alone = cell("exact", 1.0, "lds")[0], cell("prior", 0.0, "lds")[0]
        took = cell("cost of the prior", 0.0, "replays")[0]
        counted = cell("cost of the prior", 0.0, "sweeps")[0]
        lines += [
            f"Exact Y: LDS {ceiling:.3f}. The prior alone, uncalibrated: {alone:.3f}. "
            f"It cost {took:.2f} replays by processor time; {counted:.2f} sweeps are counted."
        ]
        methods = [*candidates(1), "svd oracle", "spherical oracle"]
        for key, title in (("lds", "LDS"), ("error", "relative Frobenius error")):
            heads = " | ".join(f"B = {s:g} k" for s in SHARES)
            lines += ["", f"| {title} | {heads} |", "|---" * (len(SHARES) + 1) + "|"]
            for method in methods:
                cells = [cell(method, s, key) for s in SHARES]
                lines.append(f"| {method} | " + " | ".join(map(written, cells)) + " |")
        gaps = []
        for s in SHARES:
            spell, sage = cell("spell", s, "lds")[0], cell("sage", s, "lds")[0]
            gaps.append(f"{(sage - spell) / (ceiling - spell):.2f}")
        lines.append("| share of SPELL's gap that SAGE closes | " + " | ".join(gaps) + " |")
        less = [
            f"{1 - cell(RECONSTRUCTION, s, 'error')[0] / cell('mage', s, 'error')[0]:.2f}"
            for s in SHARES
        ]
        lines.append("| error below MAGE's, reconstruction | " + " | ".join(less) + " |")
        steps = [r for r in ours if r.get("ablation")]
        if steps:
            lines += ["", "| ablation at B = 0.1 k | LDS | relative error |", "|---|---|---|"]
            for label in dict.fromkeys(r["method"] for r in steps):
                mean = {
                    k: np.mean([r[k] for r in steps if r["method"] == label])
                    for k in ("lds", "error")
                }
                lines.append(f"| {label} | {mean['lds']:.3f} | {mean['error']:.3f} |")
    return "\n".join(lines)


def written(cell: tuple[float, float]) -> str:
    """A mean, with its standard error where there is more than one seed."""
    mean, error = cell
    return f"{mean:.3f} ± {error:.3f}" if error else f"{mean:.3f}"


def figure(rows: list[dict[str, Any]]) -> str:
    """LDS above, error below; a column for each problem."""
    shown = {
        "lds": ["sage", "gram", "spherical oracle", "spell", "mage", "random", "first", "pca"],
        "error": [RECONSTRUCTION, "sage", "svd oracle", "mage", "spell", "random", "first", "pca"],
    }
    names = list(dict.fromkeys(r["problem"] for r in rows))
    grid = []
    for key, methods in shown.items():
        line = []
        for name in names:
            curves: dict[str, list[list[float]]] = {}
            for method in methods:
                curves[method] = [
                    [
                        r[key]
                        for r in rows
                        if (r["problem"], r["method"], r["share"]) == (name, method, s)
                        and not r.get("ablation")
                    ]
                    for s in SHARES
                ]
            line.append((f"{name}: {'LDS' if key == 'lds' else 'relative error'}", curves))
        grid.append(line)
    return panels(grid, [2 * s for s in SHARES], "total sweeps / k")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="+", help="such as hard:0,1,2: a problem and its seeds")
    parser.add_argument("--subsets", type=int, default=100, help="removals, of 1 %% each")
    parser.add_argument("--write", action="store_true", help="commit-ready files in results/")
    parser.add_argument("--check", action="store_true", help="compare with real sweeps")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, _, seeds in (text.partition(":") for text in given.problems):
        for seed in map(int, seeds.split(",")):
            t = truth(name, seed, given.subsets)
            if given.check:
                check(name, seed, t)
            rows += rows_of(name, seed, t)
            rows += ablated(name, seed, t)
            print(f"{name} {seed} done", flush=True)
    text = summary(rows)
    print(text)
    if given.write:
        RESULTS.mkdir(exist_ok=True)
        today = datetime.date.today().isoformat()
        head = (
            f"# Attribution and reconstruction against total sweeps\n\n{today}, torch "
            f"{torch.__version__}, {platform.machine()}, one thread. Made by `python -m "
            f"benchmarks.frontier {' '.join(given.problems)} --subsets {given.subsets} "
            "--write`. 1 % of the examples "
            "removed at a time; means over seeds ± standard errors. At 2B total sweeps for every "
            "method.\n"
        )
        (RESULTS / "frontier.md").write_text(head + text + "\n")
        (RESULTS / "frontier.json").write_text(json.dumps({"date": today, "rows": rows}) + "\n")
        (RESULTS / "frontier.svg").write_text(figure(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
