"""The methods by name: each a rule that chooses probes, and an estimator. See docs/methods.md."""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from metasketch import estimate, probes
from metasketch.errors import ArgumentError


@dataclass(frozen=True)
class Method:
    """How a budget is spent.

    Attributes:
        name: what `attribute` is given.
        summary: one line for a person.
        rule: chooses the probes.
        estimator: makes rows of what was measured.
        all_queries: it takes one replay for each query, whatever the budget.
        prior: it makes surrogates of Y from gradients of training examples.
        replays_only: it spends the price of B replays and B forward passes on replays alone.
        sweeps: it takes sweeps at all.
    """

    name: str
    summary: str
    rule: probes.Rule
    estimator: estimate.Estimator
    all_queries: bool = False
    prior: bool = False
    replays_only: bool = False
    sweeps: bool = True

    def num_replays(self, budget: int, K: int) -> int:
        """Replays that a budget pays for: B, or, without forward passes, 2B less one for the prior
        (which costs at most that: see `metasketch.prior.cost`)."""
        if not self.replays_only:
            return budget
        return min(2 * budget - (1 if self.prior else 0), K)

    def without_prior(self) -> "Method":
        """The same from replays alone."""
        return dataclasses.replace(self, estimator=estimate.Regression(), prior=False)

    @property
    def options(self) -> dict[str, Any]:
        """What can be set, and its value."""
        return dataclasses.asdict(self.rule)  # type: ignore[call-overload, no-any-return]


_METHODS = {
    method.name: method
    for method in (
        Method(
            "mage",
            "leading eigenvectors of the query gradients' Gram matrix, projection: reconstructs "
            "Y best; rows with large norms first",
            probes.Mage(),
            estimate.Projection(),
        ),
        Method(
            "spell",
            "MAGE, then the leading direction of the row-normalised residual, projection: serves "
            "every query alike, so it predicts removals best of the paper's methods",
            probes.Spell(),
            estimate.Projection(),
        ),
        Method(
            "random",
            "random Gaussian combinations of the queries, projection: a baseline",
            probes.Gaussian(),
            estimate.Projection(),
        ),
        Method(
            "first",
            "single queries, class-balanced or in random order, projection: a baseline",
            probes.First(),
            estimate.Projection(),
        ),
        Method(
            "pca",
            "MAGE's probes without forward passes: half the sweeps, rows with small norms suffer",
            probes.Mage(),
            estimate.Expansion(),
        ),
        Method(
            "sage",
            "beyond the paper: spherical probes, replays alone, and surrogates of Y from gradients "
            "of training examples, which the replays calibrate: most attribution for each sweep",
            probes.Leading(),
            estimate.Augmented(),
            prior=True,
            replays_only=True,
        ),
        Method(
            "prior",
            "beyond the paper: the surrogate alone, from checkpoints, with no sweep; nothing "
            "calibrates it",
            probes.Nothing(),
            estimate.Uncalibrated(),
            prior=True,
            sweeps=False,
        ),
        Method(
            "exact",
            "MAGIC: one replay for each query; exact, and the dearest",
            probes.Every(),
            estimate.Expansion(),
            all_queries=True,
        ),
    )
}


def methods() -> dict[str, str]:
    """The names of all methods, each with one line that says what it does.

    >>> sorted(methods())
    ['exact', 'first', 'mage', 'pca', 'prior', 'random', 'sage', 'spell']
    """
    return {name: method.summary for name, method in _METHODS.items()}


def make(name: str, **options: Any) -> Method:
    """A method with its options set; unknown names and options are refused with what there is."""
    if name not in _METHODS:
        near = difflib.get_close_matches(str(name).lower(), _METHODS, n=1)
        meant = f": did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"there is no method {name!r}{meant}; there are {sorted(_METHODS)}")
    method = _METHODS[name]
    if unknown := set(options) - set(method.options):
        can = f"it has {sorted(method.options)}" if method.options else "it has none"
        raise ArgumentError(f"method {name!r} has no option {sorted(unknown)[0]!r}; {can}")
    rule = dataclasses.replace(method.rule, **options)  # type: ignore[type-var]
    return dataclasses.replace(method, rule=rule)


def projects(name: str) -> bool:
    """Whether rows of an influence are projections: ⟨Y_q, Ŷ_q⟩ = ‖Ŷ_q‖².

    Args:
        name: ``influence.method``: a method, or several joined by "+", each of which made some of
            the rows.

    >>> projects("mage+spell"), projects("pca"), projects("unknown")
    (True, False, False)
    """
    known = (_METHODS.get(part) for part in name.split("+"))
    return all(m is not None and isinstance(m.estimator, estimate.Projection) for m in known)
