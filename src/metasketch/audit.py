"""Measure an estimate's quality without ground truth: a few forward sweeps in random directions.

    u  ->  Y u = Vᵀ (J u)        compared with Ŷ u

The directions are drawn by themselves, so they know nothing of how the estimate came about.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from metasketch import methods, quality
from metasketch.errors import ArgumentError
from metasketch.influence import Influence
from metasketch.measured import Paired
from metasketch.queries import Queries
from metasketch.query_gradients import QueryGradients
from metasketch.randomness import generator
from metasketch.run import Run
from metasketch.sizes import parse_bytes
from metasketch.store import differences

LEAST = 4
"""Fewest sweeps of an audit: the direction of equal weights, and three random ones."""


def audit(
    run: Run,
    queries: Queries,
    influence: Influence,
    sweeps: int = 8,
    *,
    level: float = 0.9,
    seed: int = 0,
    memory: int | float | str = "4GiB",
    progress: bool | None = None,
) -> Influence:
    """Estimate the quality of an influence, for each query, from a few forward sweeps.

    One sweep goes along equal weights, the others along random directions beside it. With m of
    these the interval of a residual energy is a factor of about 1 ± 2.3/√m either way for one
    query, and much narrower for the mean over queries.

    Args:
        run, queries: what the influence was made of.
        influence: the estimate, of any method.
        sweeps: forward sweeps, at least 4.
        level: of the intervals.
        seed: of the directions.
        memory: budget for the queries' gradients: see `Queries.gram`.
        progress: show bars; by default on a terminal.

    Returns:
        The influence with its ``quality``: captured energy, and LDS relative to the ceiling. Cost:
        as many forward sweeps, which share their traversals.
    """
    check_sweeps(sweeps)
    _check_same(run, queries, influence)
    with run.computing():
        V = QueryGradients(queries.of(run), parse_bytes(memory, "memory"))
        paired = sample(run, V, sweeps, seed, progress)
    return assessed(influence, paired, level)


def check_sweeps(sweeps: int) -> None:
    """Refuse a number of sweeps that gives no interval."""
    if isinstance(sweeps, bool) or not isinstance(sweeps, int | np.integer) or sweeps < LEAST:
        raise ArgumentError(
            f"an audit of {sweeps!r} sweeps: give a whole number of at least {LEAST}; 8 are usual"
        )


def _check_same(run: Run, queries: Queries, influence: Influence) -> None:
    """Refuse an influence of another run or of other queries."""
    shape = (influence.num_queries, influence.num_examples)
    if shape != (queries.num_queries, run.num_examples):
        raise ArgumentError(
            f"the influence is of {shape[0]} queries and {shape[1]} examples; these are "
            f"{queries.num_queries} queries and a run on {run.num_examples} examples"
        )
    facts = {**run.facts(), **queries.facts()} if influence.facts else {}
    ours = {name: facts[name] for name in facts if name in influence.facts}
    stored = {name: influence.facts[name] for name in ours}
    if differing := differences(stored, ours):
        raise ArgumentError(
            f"the influence is of another run, or of other queries: it differs in "
            f"{'; '.join(differing)}. Audit it with those that it was made of"
        )


def directions(N: int, sweeps: int, seed: int) -> Tensor:
    """1, and then u = H g with g ~ N(0, I), each from a generator of its own: (sweeps, N)."""
    rows = [torch.ones(N, dtype=torch.float64)]
    for j in range(sweeps - 1):
        g = torch.randn(N, generator=generator(seed, "audit", j), dtype=torch.float64)
        rows.append(g - g.mean())
    return torch.stack(rows)


def sample(
    run: Run, V: QueryGradients, sweeps: int, seed: int, progress: bool | None = None
) -> Paired:
    """Y u for the directions of an audit, (K, sweeps). Cost: as many forward sweeps."""
    U = directions(run.num_examples, sweeps, seed).to(run.final.params)
    tangents = run.flat(run.forward(U, progress=progress))
    return Paired(U.cpu().double(), V.pair(tangents), ())


def assessed(influence: Influence, paired: Paired, level: float = 0.9) -> Influence:
    """The influence with its quality, from what the directions measured."""
    U, Y_U = paired.Q.numpy(), paired.C.numpy()
    C, Q = influence.coefficients, influence.basis
    Y_hat_U = C @ (Q @ U.T)
    sampled = quality.Sampled(
        Y_U[:, 1:],
        Y_hat_U[:, 1:],
        Y_U[:, 0],
        Y_hat_U[:, 0],
        np.einsum("qr,qr->q", C @ (Q @ Q.T), C),
        influence.num_examples,
        methods.projects(influence.method),
    )
    found = quality.estimate(sampled, level)
    sweeps = {**influence.sweeps, "audit": len(U)}
    return replace(influence, quality=found, sweeps=sweeps)
