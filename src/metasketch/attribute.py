"""Attribute k queries from a budget of sweeps: the call, its checks, and its record."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from metasketch import estimate
from metasketch.attribution_store import Block, Folder, Ledger, Memory, Record
from metasketch.audit import assessed, check_sweeps, sample
from metasketch.errors import (
    ArgumentError,
    MetasketchWarning,
    MismatchError,
    StoreError,
)
from metasketch.example_gradients import check_separable
from metasketch.influence import Influence
from metasketch.measured import Measured, Paired
from metasketch.methods import Method, make
from metasketch.prior import checkpoints_of, stack_of, surrogate
from metasketch.progress import drive, follow
from metasketch.queries import Queries, check_outputs
from metasketch.query_gradients import QueryGradients
from metasketch.run import Run
from metasketch.sizes import parse_bytes
from metasketch.sketch import Sketch, blocks_needed, num_sweeps, remarks, rounds
from metasketch.state import State
from metasketch.store import differences
from metasketch.surrogate import Stack, Surrogate
from metasketch.verdict import warn
from metasketch.version import __version__

OnMismatch = Literal["refuse", "tolerate"]


def attribute(
    run: Run,
    queries: Queries,
    method: str = "spell",
    budget: int | None = None,
    store: str | os.PathLike[str] | None = None,
    *,
    audit: int = 0,
    memory: int | float | str = "4GiB",
    block: int | None = None,
    on_mismatch: OnMismatch = "refuse",
    progress: bool | None = None,
    **options: Any,
) -> Influence:
    """Estimate the influence of every training example on every query, from few sweeps.

        Ŷ ≈ Y,    Y[q, i] = ∂f_q / ∂w_i

    Warns where the run was never checked by `metasketch.diagnose`, or failed there.

    Args:
        run: the training run.
        queries: what is asked of its final state.
        method: one of `metasketch.methods`.
        budget: B. B replays, each with its forward pass; "sage" spends as much, 2B sweeps, on
            replays and its prior; "pca" takes B replays alone; "exact" takes one for each query
            and "prior" none, without a budget.
        store: a folder that keeps all finished work. The same call goes on after a kill, or beside
            another process that works on the same store; a larger budget extends it, a smaller
            one reads what is there.
        audit: forward sweeps in random directions to spend besides on an estimate of the result's
            quality, which comes with it: see `metasketch.audit`; 8 are usual.
        memory: budget for the queries' gradients: see `Queries.gram`.
        block: rows that share a sweep; by default as many as the run's memory budget holds.
        on_mismatch: what to do where the store was made by a machine that rounds differently
            and is not finished: "refuse", or "tolerate", which goes on and records how far a
            row that is measured again here is from the one in the store.
        progress: show bars; by default on a terminal.
        **options: of the method: see docs/methods.md.

    Returns:
        The estimate, as two factors. Cost in sweeps: 2B, or as said above; see
        ``influence.sweeps`` for what was taken.
    """
    chosen = make(method, **options)
    if on_mismatch not in get_args(OnMismatch):
        raise ArgumentError(
            f"on_mismatch={on_mismatch!r}: give one of {list(get_args(OnMismatch))}"
        )
    if block is not None and block < 1:
        raise ArgumentError(f"block={block}: a block has at least one row")
    if audit:
        check_sweeps(audit)
    chosen.rule.check(queries.num_queries)
    ledger = Memory() if store is None else Folder(store)
    chosen, B, notes = spend(chosen, budget, queries.num_queries, ledger.record() is None)
    chosen, replays, more = settled(run, chosen, B, queries.num_queries)
    notes += more
    outputs = queries.values(run)
    check_outputs(queries, outputs)
    remark = warn(run.verdict)
    job = _Job(run, queries, chosen, ledger, progress)
    with ledger.alone():
        record = job.opened(replays, block or run.most_rows)
    notes += record["remarks"]
    with run.computing():
        V = QueryGradients(queries.of(run), parse_bytes(memory, "memory"))
        gram = job.gram_of(V)
        cut = blocks_needed(record["rounds"], replays)
        surrogates = job.surrogates_of(V) if chosen.prior else None
        sketch = Sketch(
            run, V, chosen, cut, record["fixed"], ledger, job.settle, gram, surrogates, progress
        )
        known = next(sketch.measure())
        if _unfinished(known, cut, chosen.estimator.pairs):
            notes += job.permitted(record, known, V, on_mismatch)
            sweeps = num_sweeps(cut, chosen.estimator.pairs)
            known = follow(remarks(sketch.measure()), sweeps, chosen.name, progress, "sweep")
        elif record["final"] != run.final_digest:
            notes.append("made on a machine that rounds differently from this one")
        judged = job.audited(V, audit) if audit else None
        known = known.first(replays, [start for start, _ in cut])
        C, Q = chosen.estimator.factors(known)
        notes += _remarks_on_queries(known, chosen)
    for note in notes:
        warnings.warn(note, MetasketchWarning, stacklevel=2)
    influence = Influence(
        C.numpy(),
        Q.numpy(),
        method=chosen.name,
        better=queries.better,
        outputs=outputs.numpy(),
        weights=run.weights.double().cpu().numpy(),
        budget=B or None,
        sweeps={**known.sweeps, "prior": 0 if surrogates is None else surrogates().cost},
        facts=record["facts"],
        notes=(*remark, *notes),
        query_ids=None if queries.ids is None else tuple(queries.ids),
        example_ids=None if run.recipe.ids is None else tuple(run.recipe.ids),
        query_looks=queries.examples.looks(queries.show),
        example_looks=run.recipe.examples.looks(run.recipe.show),
    )
    return influence if judged is None else assessed(influence, judged)


def spend(
    method: Method, budget: int | None, K: int, fresh: bool = True
) -> tuple[Method, int, list[str]]:
    """The method and budget to work with, and what to say where they are not those asked for.

    Args:
        fresh: nothing was begun yet in the store.
    """
    if method.all_queries:
        if budget is not None and budget < K:
            raise ArgumentError(
                f"budget={budget}: method {method.name!r} takes one replay for each of the {K} "
                'queries; leave the budget out, or take another method ("first" replays some)'
            )
        return method, K, []
    if not method.sweeps:
        if budget is not None:
            raise ArgumentError(
                f"budget={budget}: method {method.name!r} takes no sweep; leave the budget out"
            )
        return method, 0, []
    if budget is None:
        raise ArgumentError(
            f"method {method.name!r} needs a budget: budget=B takes B replays, B at most the "
            f'number of queries, {K}; only "exact" and "prior" go without'
        )
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < 1:
        raise ArgumentError(
            f"budget={budget!r}: a whole number of replays, at least 1, for {method.name!r}"
        )
    if budget <= K:
        return method, int(budget), []
    if not fresh:
        return method, K, [f"budget={budget} exceeds the {K} queries: {K} are used"]
    exact = make("exact")
    why = f"budget={budget} exceeds the {K} queries: the result is exact, from {K} replays alone"
    return exact, K, [why]


def settled(run: Run, method: Method, budget: int, K: int) -> tuple[Method, int, list[str]]:
    """The method with its prior, or without where there can be none or every row is measured, the
    replays that the budget pays for, and what to say."""
    if method.sweeps and run.attached:
        raise ArgumentError(
            f"method {method.name!r} sends sweeps through training, and this run was attached: "
            'only its checkpoints are known. Take method="prior", or train here with ms.train'
        )
    notes = []
    if method.prior and not method.sweeps:
        check_separable(run)
        notes.append(
            "nothing calibrated this result: it is a surrogate from gradients of training examples "
            'at a guessed damping; compare it with a few replays (method="sage") or removals '
            "before you rely on its size"
        )
    elif method.prior and run.recipe.loss_form == "scalar":
        method = method.without_prior()
        notes.append(
            "the loss is no sum over examples, so there is no prior: replays alone are used"
        )
    replays = method.num_replays(budget, K)
    if method.prior and method.sweeps and replays == K:
        method = method.without_prior()  # every row is measured: nothing is left to a prior
    return method, replays, notes


@dataclass(frozen=True)
class _Job:
    """What one call works on, and the record that it shares with others."""

    run: Run
    queries: Queries
    method: Method
    ledger: Ledger
    progress: bool | None

    def opened(self, budget: int, most: int) -> dict[str, Any]:
        """The record, with blocks for the budget; refused where it is of something else."""
        record = self.ledger.record()
        facts = {**self.run.facts(), **self.queries.facts()}
        before = dict(record or {})
        remarks: list[str] = []
        if record is None:
            record = {
                "metasketch": __version__,
                "torch": torch.__version__,
                "facts": facts,
                "final": self.run.final_digest,
                "method": self.method.name,
                "options": _plain(self.method.options),
                "fixed": 0,
                "rounds": [],
                "implementations": dict(self.run.implementations),
                "elsewhere": {},
            }
        else:
            self._check_same(record, facts)
        rounds_so_far = [tuple(pair) for pair in record["rounds"]]
        done = rounds_so_far[-1][1] if rounds_so_far else 0
        fixed = self.method.rule.fixed(budget)
        if self.method.rule.adaptive and done:
            if budget > done and fixed != record["fixed"]:
                remarks.append(
                    f"the store keeps its warm-up of {record['fixed']} probes; a new attribution "
                    f"of budget {budget} would have one of {fixed}"
                )
            fixed = record["fixed"]
        if budget > done:
            per_round = self.method.rule.per_round
            rounds_so_far += rounds(done, budget, fixed, most, per_round)
        record |= {"rounds": [list(pair) for pair in rounds_so_far]}
        record["fixed"] = max(fixed, record["fixed"])
        if record != before:
            self.ledger.write_record(record)
        return {**record, "rounds": rounds_so_far, "remarks": remarks}

    def _check_same(self, record: Record, facts: Mapping[str, Any]) -> None:
        ours = {**facts, "method": self.method.name}
        ours |= {f"option {k}": v for k, v in _plain(self.method.options).items()}
        stored = {**record["facts"], "method": record["method"]}
        stored |= {f"option {k}": v for k, v in record["options"].items()}
        if differing := differences(stored, ours):
            raise StoreError(
                f"the store holds another attribution; it differs in: {'; '.join(differing)}. Give "
                "another folder, or the run, queries and method that were stored"
            )

    def settle(self, mode: str, rows: int) -> None:
        """Differentiate as the record says, which every process that shares it obeys; where it
        says nothing, measure, and record it."""
        with self.ledger.alone():
            record = self.ledger.record()
            assert record is not None
            self.run.implementations |= record["implementations"]
            self.run.settle(mode, rows)
            if self.run.implementations != record["implementations"]:
                record["implementations"] = dict(self.run.implementations)
                self.ledger.write_record(record)

    def gram_of(self, V: QueryGradients) -> Callable[[], Tensor]:
        """A function that gives G, which is made once by one of the processes."""
        kept: list[Tensor] = []

        def gram() -> Tensor:
            if not kept:
                with self.ledger.claim("gram", wait=True):
                    G = self.ledger.gram()
                    if G is None:
                        count = V.num_gradients()
                        G = drive(V.gram(), count, "Gram matrix", self.progress, "gradient").cpu()
                        self.ledger.write_gram(G)
                kept.append(G)
            return kept[0]

        return gram

    def audited(self, V: QueryGradients, sweeps: int) -> Paired:
        """Y u for the directions of an audit, measured once."""
        block = Block("audit", sweeps)
        with self.ledger.claim(block, wait=True):
            found = self.ledger.read(block)
            if not isinstance(found, Paired):
                self.settle("forward", sweeps)
                found = sample(self.run, V, sweeps, 0, self.progress)
                self.ledger.write(block, found)
        return found

    def surrogates_of(self, V: QueryGradients) -> Callable[[], Stack]:
        """A function that gives the surrogates of Y, which are made once by one process."""
        kept: list[Stack] = []

        def made(number: int, state: State) -> Surrogate:
            block = Block("prior", number)
            with self.ledger.claim(block, wait=True):
                found = self.ledger.read(block)
                if not isinstance(found, Surrogate):
                    work = surrogate(self.run, V, state, V.memory)
                    title = f"prior at step {number}"
                    N = self.run.num_examples
                    found = drive(work, N, title, self.progress, "example")
                    self.ledger.write(block, found)
            return found

        def stack() -> Stack:
            if not kept:
                states = checkpoints_of(self.run)
                kept.append(stack_of(self.run, [made(t, state) for t, state in states]))
            return kept[0]

        return stack

    def permitted(
        self, record: Record, known: Measured, V: QueryGradients, on_mismatch: OnMismatch
    ) -> list[str]:
        """Refuse to go on, unless asked to, where this machine does not round as the store's.

        Returns how far the two are apart, in words.
        """
        if record["final"] == self.run.final_digest:
            return []
        if not known.replays:
            with self.ledger.alone():
                self.ledger.write_record(
                    {**(self.ledger.record() or {}), "final": self.run.final_digest}
                )
            return []
        if on_mismatch == "refuse":
            raise MismatchError(
                "the store was made by a run that ended in other bits than this one (another "
                "machine, number of threads or version): its finished rows stay valid, but rows "
                "made here would differ in rounding. Go on where it began, or pass "
                'on_mismatch="tolerate", which records the relative difference'
            )
        if self.run.final_digest not in record["elsewhere"]:
            difference = self._difference(known, V)
            with self.ledger.alone():
                record["elsewhere"] = {**record["elsewhere"], self.run.final_digest: difference}
                stored = self.ledger.record()
                assert stored is not None
                self.ledger.write_record({**stored, "elsewhere": record["elsewhere"]})
        worst = max(record["elsewhere"].values())
        return [
            "some sweeps were made by machines that round differently; a row measured again "
            f"differed by {worst:.1e} of its size"
        ]

    def _difference(self, known: Measured, V: QueryGradients) -> float:
        """‖u' - u‖ / ‖u‖ for the first row in the store, measured again here. Cost: one replay."""
        number = min(known.replays)
        stored = known.replays[number]
        live = (stored.scales > 0).nonzero()[:, 0]
        if len(live) == 0:
            return 0.0
        i = int(live[0])
        bar = V.combine(stored.Z[:, [i]]) / stored.scales[i]
        again = self.run.replay(self.run.named(bar), 1, self.progress)[0].cpu().double()
        u = stored.U[i].double()
        return float(torch.linalg.vector_norm(again - u) / torch.linalg.vector_norm(u))


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON has them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}


def _unfinished(known: Measured, cut: Any, pairs: bool) -> bool:
    return len(known.replays) < len(cut) or (pairs and len(known.pairs) < len(cut))


def _remarks_on_queries(known: Measured, method: Method) -> list[str]:
    """Queries whose rows are zero, or the same up to a factor: legitimate, and worth a word."""
    notes = []
    if method.rule.uses_gram:
        norms = known.G.diagonal().clamp(min=0).sqrt()
        zero = (norms == 0).nonzero()[:, 0].tolist()
        scale = torch.where(norms > 0, 1 / norms, 0.0)
        unit = scale[:, None] * known.G * scale
        same = torch.triu(unit.abs() > 1 - _SAME, 1).nonzero().tolist()
        if same:
            q, r = same[0]
            notes.append(
                f"{len(same)} pairs of queries have the same gradient up to a factor, such as "
                f"{q} and {r}: their rows are dependent"
            )
    elif isinstance(method.estimator, estimate.Expansion):
        zero = [q for q, scale in enumerate(known.scales.tolist()) if scale == 0]
    else:
        zero = []
    if zero:
        listed = ", ".join(map(str, zero[:5])) + (", ..." if len(zero) > 5 else "")
        notes.append(f"the gradients of queries {listed} vanish: so do their scores")
    return notes


_SAME = 1e-12
"""How near to 1 the cosine of two gradients is that are the same up to rounding."""
