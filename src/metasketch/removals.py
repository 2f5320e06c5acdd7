"""Removals: what really happens to every query when training goes without some examples.

    Δ_q(S_j) = f_q(w - w 1_{S_j}) - f_q(w),    j = 1, ..., M

Subset j depends on (seed, size, j, N) alone, so that a larger M extends a smaller one.
"""

import os
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metasketch import retrain
from metasketch.errors import ArgumentError, MetasketchWarning, NumericalError, StoreError
from metasketch.influence import QUERY_FACTS, Array, Influence
from metasketch.progress import follow
from metasketch.queries import Queries, check_outputs
from metasketch.randomness import derive_seed, generator
from metasketch.removal_store import Folder, Ledger, Memory
from metasketch.run import Run
from metasketch.sizes import parse_bytes
from metasketch.state import checksum
from metasketch.store import differences

FRACTION, NUM_SUBSETS = 0.01, 300
"""The paper's protocol."""


@dataclass(frozen=True, eq=False)
class Removals:
    """True effects of removals on K queries.

    Attributes:
        subsets: the removed examples: (M, size) numbers, or a tuple of M arrays for groups.
        delta: Δ, (M, K), float64: positive where the measurement rises without the subset.
        full: the measurements at the run's own weights, (K,).
        diverged: numbers of the subsets whose retraining diverged: they are left out of the above.
        labels: the removed groups, in order, where groups were removed.
        facts: what was trained and asked, as an `Influence` has it.
    """

    subsets: Any = field(repr=False)
    delta: Array = field(repr=False)
    full: Array = field(repr=False)
    diverged: tuple[int, ...] = ()
    labels: tuple[Any, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def num_subsets(self) -> int:
        """M, of the subsets that did not diverge."""
        return len(self.delta)

    def predicted(self, influence: Influence) -> Array:
        """Δ̂ of an influence for the same subsets, (M, K); refused where it is of another run or
        of other queries."""
        self.check(influence)
        return influence.predict_removal(self.subsets)

    def check(self, influence: Influence) -> None:
        """Refuse an influence that is not of this run and these queries."""
        K = self.delta.shape[1]
        if influence.num_queries != K:
            raise ArgumentError(
                f"the influence is of {influence.num_queries} queries, the removals measured {K}: "
                "give both the same queries"
            )
        known = set(influence.facts) & set(self.facts)
        differing = sorted(n for n in known if influence.facts[n] != self.facts[n])
        if differing:
            what = "queries" if set(differing) <= set(QUERY_FACTS) else "runs"
            raise ArgumentError(
                f"the influence and the removals are of different {what} (they differ in "
                f"{', '.join(differing)}): make both from one run and the same queries"
            )
        last = max((int(S.max()) for S in self.subsets if len(S)), default=-1)
        if last >= influence.num_examples:
            raise ArgumentError(
                f"the removals name example {last}; the influence is of {influence.num_examples} "
                "examples: it is of another run"
            )


def removals(
    run: Run,
    queries: Queries,
    fraction: float | None = None,
    num_subsets: int | None = None,
    seed: int = 0,
    *,
    groups: Any = None,
    store: str | os.PathLike[str] | None = None,
    disk: int | float | str = "1GiB",
    together: int | None = None,
    progress: bool | None = None,
) -> Removals:
    """Retrain without random subsets of the examples (or without each group), and measure.

    Weights of removed examples are zero; everything else is as in the run.

    Args:
        run: the training run.
        queries: what is measured.
        fraction: p, the share of examples in a subset; 0.01 by default.
        num_subsets: M; 300 by default.
        seed: of the subsets.
        groups: labels (N,) instead: each group is removed once, in the order of ``numpy.unique``.
        store: a folder that keeps finished retrainings: the same call goes on after a kill, or
            beside another process; a larger M extends it; other queries are measured on the stored
            final states where they are kept.
        disk: what final states may take there; where they do not fit, only outputs are kept, and
            other queries need retraining.
        together: retrainings at a time: see `metasketch.retrain.retrained`. A store keeps to what
            it began with, since it changes rounding.
        progress: show a bar with the time left; by default on a terminal.

    Returns:
        The removals. Cost: M trainings, less what going together saves.
    """
    subsets, labels, drawn = _subsets(run, fraction, num_subsets, seed, groups)
    room = parse_bytes(disk, "disk")
    ledger: Ledger = Memory() if store is None else Folder(store)
    facts = {**run.facts(), **queries.facts()}
    if together is not None and together < 1:
        raise ArgumentError(f"together={together!r}: at least one retraining at a time")
    check_outputs(queries, queries.values(run))
    job = _Job(run, queries, subsets, ledger, _key(facts))
    with run.computing():
        with ledger.alone():
            job.open({**run.facts(), **drawn}, room, together)
        total = len(subsets) + 1
        outputs, diverged = follow(job.work(), total, "retraining", progress, "model")
    kept = np.flatnonzero(~diverged)
    lost = tuple(np.flatnonzero(diverged).tolist())
    if lost:
        _report(lost, len(kept), len(subsets))
    chosen = [subsets[j].numpy() for j in kept]
    return Removals(
        subsets=tuple(chosen) if labels is not None else np.stack(chosen),
        delta=outputs[1:][kept] - outputs[0],
        full=outputs[0],
        diverged=lost,
        labels=None if labels is None else tuple(labels[j] for j in kept),
        facts=facts,
    )


def _report(lost: Sequence[int], left: int, M: int) -> None:
    few = ", ".join(map(str, lost[:5])) + (", ..." if len(lost) > 5 else "")
    said = f"{len(lost)} of {M} retrainings diverged (subsets {few}) and are left out"
    if left < 2:
        raise NumericalError(
            f"{said}: fewer than two remain. The run is at the edge of divergence: lower its "
            "learning rate, clip gradients (clip_norm), or remove less"
        )
    warnings.warn(said, MetasketchWarning, stacklevel=3)


def draw(N: int, size: int, count: int, seed: int, start: int = 0) -> list[Tensor]:
    """Subsets ``start`` to ``start + count`` of ``size`` of N examples, sorted: uniform, without
    replacement."""
    return [
        torch.randperm(N, generator=generator(seed, "removal", size, j))[:size].sort().values
        for j in range(start, start + count)
    ]


def _subsets(
    run: Run, fraction: float | None, num_subsets: int | None, seed: int, groups: Any
) -> tuple[list[Tensor], list[Any] | None, dict[str, Any]]:
    """The subsets, the labels of groups, and what identifies the draw but for M."""
    N = run.num_examples
    if groups is not None:
        if fraction is not None or num_subsets is not None:
            raise ArgumentError(
                f"fraction={fraction!r} and num_subsets={num_subsets!r} say how subsets are "
                "drawn, and groups says which they are: give one or the other"
            )
        return _groups(groups, N)
    p = FRACTION if fraction is None else fraction
    M = NUM_SUBSETS if num_subsets is None else num_subsets
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p < 1:
        raise ArgumentError(
            f"fraction={p!r}: the share of examples to remove lies between 0 and 1, both excluded"
        )
    if p * N < 1:
        raise ArgumentError(
            f"fraction={p!r} of {N} examples is less than one example: give at least {1 / N:.3g}"
        )
    if isinstance(M, bool) or not isinstance(M, int) or M < 2:
        raise ArgumentError(
            f"num_subsets={M!r}: a correlation over subsets needs at least 2 of them; the paper "
            f"takes {NUM_SUBSETS}"
        )
    size = min(round(p * N), N - 1)
    return draw(N, size, M, seed), None, {"removed at a time": size, "seed of subsets": seed}


def _groups(groups: Any, N: int) -> tuple[list[Tensor], list[Any], dict[str, Any]]:
    found = np.asarray(groups)
    if found.shape != (N,):
        raise ArgumentError(
            f"groups has shape {found.shape}; give the group of each of the {N} examples"
        )
    labels, member = np.unique(found, return_inverse=True)
    if len(labels) < 2:
        raise ArgumentError(
            f"groups puts every example into one group ({labels[0]!r}): without it nothing is "
            "left to train on. Give at least two"
        )
    sets = [torch.from_numpy(np.flatnonzero(member == g)) for g in range(len(labels))]
    return sets, labels.tolist(), {"groups": checksum(torch.from_numpy(member))}


def _key(facts: dict[str, Any]) -> str:
    """A short name for a set of queries."""
    return f"{derive_seed(*(str(facts[name]) for name in QUERY_FACTS)):016x}"


@dataclass
class _Job:
    """One call: positions 0 to M are the run's own weights, then the subsets."""

    run: Run
    queries: Queries
    subsets: list[Tensor]
    ledger: Ledger
    key: str
    together: int = 1
    states: bool = False

    def open(self, identity: dict[str, Any], room: int, together: int | None) -> None:
        """Take up the record, or make it: what changes rounding is decided once."""
        identity = {**identity, "final state": self.run.final_digest}
        record = self.ledger.record()
        if record is None:
            rows = len(self.subsets) + 1
            each = self.run.final.params.nbytes + self.run.final.stats.nbytes
            record = {
                "facts": identity,
                "together": retrain.fastest(self.run, rows) if together is None else together,
                "states": each * rows <= room and self.ledger.lasting,
            }
            self.ledger.write_record(record)
        elif differing := differences(record["facts"], identity):
            raise StoreError(
                "the store holds removals of another run, or other subsets; it differs in: "
                f"{'; '.join(differing)}. Give another folder, or the run and the subsets that "
                "were stored"
            )
        self.together, self.states = record["together"], record["states"]

    def work(self) -> Generator[tuple[int, str], None, tuple[Array, Array]]:
        """Do what is missing, chunk by chunk; yields how many retrainings are done, and a remark.

        Chunks that other processes work on are waited for at the end.
        """
        positions = range(len(self.subsets) + 1)
        chunks = [positions[i : i + self.together] for i in positions[:: self.together]]
        found: dict[int, Tensor] = {}
        for wait in (False, True):
            for number, chunk in enumerate(chunks):
                if number not in found:
                    done = sum(map(len, found.values()))
                    outputs = yield from self._chunk(number, chunk, wait, done)
                    found |= {} if outputs is None else {number: outputs}
        outputs = torch.cat([found[number] for number in range(len(chunks))])
        own = torch.tensor([True, *(len(S) == 0 for S in self.subsets)])
        outputs[own] = outputs[0].clone()
        return outputs.numpy(), (~torch.isfinite(outputs[1:]).all(1)).numpy()

    def _chunk(
        self, number: int, chunk: range, wait: bool, done: int
    ) -> Generator[tuple[int, str], None, Tensor | None]:
        """Outputs of one chunk, (rows, K); None where another process is at it."""
        known = self.ledger.outputs(self.key, number)
        if known is not None and len(known) >= len(chunk):
            return known[: len(chunk)]
        with self.ledger.claim(number, wait) as mine:
            if not mine:
                return None
            known = self.ledger.outputs(self.key, number)  # which they may have made meanwhile
            if known is not None and len(known) >= len(chunk):
                return known[: len(chunk)]
            before = 0 if known is None else len(known)
            ends = yield from self._ends(number, chunk, before, done)
            outputs = retrain.measured(self.run, self.queries, ends)
            if known is not None:
                outputs = torch.cat([known, outputs])
            self.ledger.write_outputs(self.key, number, outputs)
        return outputs

    def _ends(
        self, number: int, chunk: range, start: int, done: int
    ) -> Generator[tuple[int, str], None, retrain.Finals]:
        """Final states of a chunk from row ``start`` on: read where they are kept, else trained."""
        kept = self.ledger.states(number) if self.states else None
        have = start
        if kept is not None:
            kept, have = kept.to(self.run.recipe.device), len(kept.params)
            if have >= len(chunk):
                return kept[start : len(chunk)]
        W = torch.stack([self._weights(position) for position in chunk[have:]])
        training = retrain.final_states(self.run, W, self.together)
        for step in count():
            try:
                next(training)
            except StopIteration as stop:
                ends: retrain.Finals = stop.value
                break
            yield done + have + len(W) * (step + 1) // self.run.num_steps, ""
        if not self.states:
            return ends
        every = ends if kept is None else retrain.Finals.concatenate([kept, ends])
        self.ledger.write_states(number, every)
        return every[start:]

    def _weights(self, position: int) -> Tensor:
        """Data weights at a position, (N,)."""
        w = self.run.weights.clone()
        if position:
            w[self.subsets[position - 1].to(w.device)] = 0.0
        return w
