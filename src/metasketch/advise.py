"""Which method, and how large a budget: predicted before anything is spent on it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from metasketch.audit import LEAST, sample
from metasketch.errors import ArgumentError
from metasketch.geometry import Geometry
from metasketch.influence import Array
from metasketch.methods import make, methods
from metasketch.metrics import spearman
from metasketch.plan import JobPlan, planned
from metasketch.progress import drive
from metasketch.queries import Queries
from metasketch.query_gradients import QueryGradients
from metasketch.rehearse import Outcome, rehearse, stand_ins
from metasketch.run import Run
from metasketch.sizes import format_duration, parse_bytes
from metasketch.speeds import Clock, Speeds

Objective = Literal["reconstruction", "attribution"]

TARGETS: dict[Objective, float] = {"reconstruction": 0.9, "attribution": 0.8}
"""What is recommended reaches this: captured energy of the whole matrix, LDS relative to exact."""

_SHARES = (0.025, 0.05, 0.1, 0.2, 0.4)
"""Budgets that are looked at, as shares of the number of queries."""

_UNEQUAL = 0.75
"""Share of the energy in the largest quarter of the rows from which on objectives part ways."""


@dataclass(frozen=True)
class Option:
    """A method with a budget: what it would give, and cost."""

    method: str
    budget: int
    outcome: Outcome
    plan: JobPlan

    def reached(self, objective: Objective) -> float:
        """What the objective wants: captured energy, or LDS relative to exact rows."""
        return self.outcome.total if objective == "reconstruction" else self.outcome.lds

    def __str__(self) -> str:
        return f'method="{self.method}", budget={self.budget}'


@dataclass(frozen=True)
class Advice:
    """What to spend on, and why. Printing it gives the recommendation and the table.

    Attributes:
        options: every method and budget that was looked at.
        gradients: norms of the query gradients, and what follows from them.
        rank_correlation: Spearman's ρ of gradient norms and measured row sizes; None without
            sweeps.
        sweeps: forward sweeps that the advice took.
    """

    options: tuple[Option, ...] = field(repr=False)
    gradients: Geometry
    rank_correlation: float | None
    sweeps: int

    def best(self, objective: Objective, target: float | None = None) -> Option:
        """The quickest option that reaches a target, or the best one where none does."""
        if objective not in TARGETS:
            raise ArgumentError(f"objective={objective!r}: give one of {list(TARGETS)}")
        wanted = TARGETS[objective] if target is None else target
        enough = [o for o in self.options if o.reached(objective) >= wanted]
        if enough:
            return min(enough, key=lambda o: o.plan.seconds)
        return max(self.options, key=lambda o: o.reached(objective))

    def __str__(self) -> str:
        lines = [*self._recommended(), "", *self._reasons(), ""]
        lines.append("method   budget   energy captured   mean of rows   LDS / exact      time")
        for o in self.options:
            lines.append(
                f"{o.method:<7} {o.budget:>7}   {o.outcome.total:>15.2f}   {o.outcome.mean:>12.2f}"
                f"   {o.outcome.lds:>11.2f}   {format_duration(o.plan.seconds):>7}"
            )
        return "\n".join(lines)

    def _recommended(self) -> list[str]:
        said: dict[Objective, str] = {
            "attribution": "To predict what removals do, for every query alike",
            "reconstruction": "To find the examples behind most of the change, large rows first",
        }
        lines = []
        for objective, words in said.items():
            best = self.best(objective)
            found = best.reached(objective)
            lines.append(
                f"{words}: {best} (predicted {found:.2f}, {format_duration(best.plan.seconds)})"
            )
            if found < TARGETS[objective]:
                lines.append(
                    f'  that is below {TARGETS[objective]}: take a larger budget, or method="exact"'
                )
        return lines

    def _reasons(self) -> list[str]:
        g = self.gradients
        share = g.top_quartile_share
        lines = [
            f"Gradient norms span {g.orders_of_magnitude:.1f} orders of magnitude; the largest "
            f"quarter has {100 * share:.0f} % of their energy."
        ]
        if share > _UNEQUAL:
            lines.append(
                "So the two objectives part ways: MAGE spends its budget on that quarter, and "
                "SPELL serves the small rows too."
            )
        else:
            lines.append("So no query dominates, and the two objectives are near to each other.")
        if self.rank_correlation is not None:
            lines.append(
                f"They rank the rows of Y with a correlation of {self.rank_correlation:.2f}, as "
                f"{self.sweeps} forward sweeps in random directions show."
            )
        else:
            lines.append(
                "No sweep was taken: what training does to inner products is not known, and the "
                "predictions are too high where it damps what all examples share."
            )
        return lines


def advise(
    run: Run,
    queries: Queries,
    sweeps: int = 8,
    budgets: Sequence[int] | None = None,
    *,
    workers: int = 1,
    memory: int | float | str = "4GiB",
    seed: int = 0,
    clock: Clock = time.perf_counter,
    progress: bool | None = None,
) -> Advice:
    """Predict what each method would give at several budgets, and what it would cost.

    Each method is rehearsed on a stand-in for Y, made of the queries' Gram matrix and a few
    forward sweeps in random directions; see `metasketch.rehearse`. Methods with surrogates ("sage",
    "prior") are left out: a stand-in has no training examples to take gradients of.

    Args:
        run, queries: what would be attributed.
        sweeps: forward sweeps, at least 4, or 0 for none: then the Gram matrix alone speaks.
        budgets: budgets to look at; by default five, up to 40 % of the number of queries.
        workers: processes that would work on it: see `metasketch.plan`.
        memory: budget for the queries' gradients: see `Queries.gram`.
        seed: of the directions.
        clock: see `metasketch.plan`.
        progress: show bars; by default on a terminal.

    Returns:
        The advice. Cost: the Gram matrix, the sweeps in one block, and some steps that are timed.
    """
    K = queries.num_queries
    wanted = _budgets(budgets, K)
    if sweeps != 0 and (isinstance(sweeps, bool) or sweeps < LEAST):
        raise ArgumentError(f"sweeps={sweeps!r}: give at least {LEAST}, or 0 for none")
    with run.computing():
        V = QueryGradients(queries.of(run), parse_bytes(memory, "memory"))
        G = drive(V.gram(), V.num_gradients(), "Gram matrix", progress, "gradient").cpu()
        Y_U = sample(run, V, sweeps, seed, progress).C[:, 1:] if sweeps else None
    norms = G.diagonal().clamp(min=0).sqrt().numpy()
    if not norms.any():
        raise ArgumentError("the gradients of all queries vanish: there is nothing to attribute")
    like = stand_ins(G, Y_U)
    # Its gradients are new, since the job would make them again.
    speeds = Speeds(run, QueryGradients(queries.of(run), parse_bytes(memory, "memory")), clock)
    options = []
    for name in methods():
        method = make(name)
        if method.all_queries or method.prior:  # a stand-in has no gradients of training examples
            continue
        for B, outcome in zip(wanted, rehearse(like, G, method, wanted), strict=True):
            options.append(Option(name, B, outcome, planned(speeds, method, B, workers)))
    return Advice(
        options=tuple(options),
        gradients=Geometry(norms),
        rank_correlation=None if Y_U is None else spearman(norms, _sizes(Y_U)),
        sweeps=sweeps,
    )


def _sizes(Y_U: torch.Tensor) -> Array:
    """Estimated row norms, (K,)."""
    return Y_U.square().mean(1).sqrt().numpy()


def _budgets(budgets: Sequence[int] | None, K: int) -> list[int]:
    if budgets is None:
        return sorted({max(1, round(share * K)) for share in _SHARES})
    found = sorted(set(budgets))
    wrong = [B for B in found if isinstance(B, bool) or not isinstance(B, int) or not 1 <= B <= K]
    if wrong or not found:
        raise ArgumentError(
            f"budgets={list(budgets)!r}: whole numbers of replays, from 1 to the {K} queries"
        )
    return found
