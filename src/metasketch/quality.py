"""How good an estimate Ŷ is, from Y u in a few random directions u: energies and correlations.

For every query q two numbers are asked for, and an interval for each:

    captured_q = 1 - ‖Y_q - Ŷ_q‖² / ‖Y_q‖²        for a projection ‖Ŷ_q‖² / ‖Y_q‖²
    lds_q      = corr(Y_q, Ŷ_q)                    over examples

By appendix A of the paper, lds_q is the correlation, over random removals, of the predicted effect
with Y's own prediction: the LDS relative to that of exact rows (the ceiling), where what Y misses
is independent of it.

Rows are split into their mean and the rest, y = Y_q H and a = Ŷ_q H with H = I - 11ᵀ/N. The
direction 1 is measured by itself, without error. For u = H g with g ~ N(0, I), the pair (⟨y, u⟩,
⟨a, u⟩) is normal with covariance [[‖y‖², ⟨y, a⟩], [⟨y, a⟩, ‖a‖²]], in which ‖a‖² is known; a
projection has ⟨Y_q, Ŷ_q⟩ = ‖Ŷ_q‖² besides. So the intervals for one query are exact:

- for a projection, all is a function of ρ² = ‖y - a‖², and Σ_j ⟨y - a, u_j⟩² / ρ² is χ²_m;
- otherwise lds_q is a function of δ = slope ‖a‖ / spread of the regression of ⟨y, u_j⟩ on ⟨a, u_j⟩,
  of which the t statistic, a noncentral t with noncentrality δ, gives an interval;
- and ‖y - a‖² / ‖y‖², a ratio of variances of a normal pair, has Pitman's and Morgan's.

Means over queries come from the jackknife over directions, which the queries share.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from scipy import stats

from metasketch.errors import ArgumentError
from metasketch.jackknife import jackknife

Array = np.ndarray[Any, Any]

_LATTICE = 2584, 1597
"""Consecutive Fibonacci numbers: points of a lattice in the unit square, and its generator."""

_AT_ONCE = 512
"""Queries whose intervals are computed at once."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, eq=False)
class Quality:
    """Estimated quality of an influence, for each query and over all.

    Attributes:
        captured: estimated share of each row's energy, (K,), with its interval's ends: 1 for an
            exact row, below 0 for one that is worse than nothing, NaN for a row that vanishes.
        lds: estimated LDS relative to that of exact rows, (K,), with its interval's ends.
        mean_captured, mean_lds: means over the queries.
        total_captured: 1 - ‖Y - Ŷ‖² / ‖Y‖², which large rows decide.
        level: of the intervals.
        sweeps: forward sweeps that the estimate took.
    """

    captured: Array = field(repr=False)
    captured_low: Array = field(repr=False)
    captured_high: Array = field(repr=False)
    lds: Array = field(repr=False)
    lds_low: Array = field(repr=False)
    lds_high: Array = field(repr=False)
    mean_captured: Interval
    mean_lds: Interval
    total_captured: Interval
    level: float
    sweeps: int

    def __str__(self) -> str:
        return "\n".join(
            (
                f"Quality from {self.sweeps} random directions, {100 * self.level:.0f} % intervals",
                f"  LDS relative to exact rows, mean over queries   {self.mean_lds}",
                f"  captured energy, mean over queries              {self.mean_captured}",
                f"  captured energy of the whole matrix             {self.total_captured}",
            )
        )

    def facts(self) -> dict[str, Any]:
        """As a table that JSON has; NaN becomes None."""
        return {
            name: [None if math.isnan(x) else x for x in value.tolist()]
            if isinstance(value, np.ndarray)
            else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Quality":
        """What `facts` wrote."""
        about = dict(facts)
        for name, value in facts.items():
            if isinstance(value, list):
                about[name] = np.array([math.nan if x is None else x for x in value])
            elif isinstance(value, Mapping):
                about[name] = Interval(**value)
        return cls(**about)


@dataclass(frozen=True)
class Sampled:
    """Rows of Y and Ŷ as random directions see them.

    Attributes:
        Y_u, Y_hat_u: Y u and Ŷ u for directions u = H g, g ~ N(0, I): (K, m).
        Y_1, Y_hat_1: sums of the rows, (K,).
        energy: ‖Ŷ_q‖², (K,).
        N: number of examples.
        projection: ⟨Y_q, Ŷ_q⟩ = ‖Ŷ_q‖² is known to hold.
    """

    Y_u: Array
    Y_hat_u: Array
    Y_1: Array
    Y_hat_1: Array
    energy: Array
    N: int
    projection: bool

    @property
    def m(self) -> int:
        return int(self.Y_u.shape[1])

    @property
    def a2(self) -> Array:
        """‖a‖² of the centred rows of Ŷ."""
        centred: Array = np.maximum(self.energy - self.Y_hat_1**2 / self.N, 0.0)
        return centred

    def seen_by(self, directions: Array) -> "Sampled":
        """The same from some of the directions."""
        return replace(self, Y_u=self.Y_u[:, directions], Y_hat_u=self.Y_hat_u[:, directions])

    def rows(self, part: slice) -> "Sampled":
        """Some of the queries."""
        Y_u, Y_hat_u, Y_1, Y_hat_1, energy = (
            x[part] for x in (self.Y_u, self.Y_hat_u, self.Y_1, self.Y_hat_1, self.energy)
        )
        return Sampled(Y_u, Y_hat_u, Y_1, Y_hat_1, energy, self.N, self.projection)

    def measures(self, inner: Array, y2: Array) -> tuple[Array, Array, Array, Array]:
        """(captured, lds, ‖Y_q - Ŷ_q‖², ‖Y_q‖²) from ⟨y, a⟩ and ‖y‖², (K, ·)."""
        a2, mean, mean_hat = (x[:, None] for x in (self.a2, self.Y_1, self.Y_hat_1))
        r2 = np.maximum(y2 - 2 * inner + a2, 0.0) + (mean - mean_hat) ** 2 / self.N
        Y2 = y2 + mean**2 / self.N
        with np.errstate(invalid="ignore", divide="ignore"):
            captured = 1 - r2 / Y2
            lds = np.clip(inner / np.sqrt(a2 * y2), -1.0, 1.0)
        # A prediction that is constant over examples has no correlation with anything.
        return captured, np.where((a2 == 0) & (y2 > 0), 0.0, lds), r2, Y2


def estimate(sampled: Sampled, level: float = 0.9) -> Quality:
    """The quality of an estimate, with intervals of this level.

    Args:
        sampled: at least two random directions.
        level: 0 < level < 1.
    """
    if not 0 < level < 1:
        raise ArgumentError(f"level={level}: of the intervals, between 0 and 1, such as 0.9")
    captured, lds, *_ = (x[:, 0] for x in sampled.measures(*_moments(sampled)))
    parts = [
        _intervals(sampled.rows(slice(start, start + _AT_ONCE)), level)
        for start in range(0, len(captured), _AT_ONCE)
    ]
    low, high, lds_low, lds_high = (np.concatenate(ends) for ends in zip(*parts, strict=True))
    total, mean, mean_lds = _means(sampled, level)
    return Quality(
        captured, low, high, lds, lds_low, lds_high, mean, mean_lds, total, level, sampled.m + 1
    )


def _moments(s: Sampled) -> tuple[Array, Array]:
    """Estimates of ⟨y, a⟩ and ‖y‖², (K, 1)."""
    if s.projection:
        inner = s.energy - s.Y_1 * s.Y_hat_1 / s.N
        rho2 = np.square(s.Y_u - s.Y_hat_u).mean(1)
        return inner[:, None], (2 * inner - s.a2 + rho2)[:, None]
    slope, spread, _ = _regression(s)
    return (slope * s.a2)[:, None], (slope**2 * s.a2 + spread)[:, None]


def _regression(s: Sampled) -> tuple[Array, Array, Array]:
    """Of ⟨y, u_j⟩ on ⟨a, u_j⟩, without intercept: slope, variance about it, Σ ⟨a, u_j⟩²; (K,)."""
    xx = np.square(s.Y_hat_u).sum(1)
    slope = np.where(xx > 0, (s.Y_u * s.Y_hat_u).sum(1) / np.where(xx > 0, xx, 1.0), 0.0)
    left = s.Y_u - slope[:, None] * s.Y_hat_u
    return slope, np.square(left).sum(1) / (s.m - 1), xx


def _intervals(s: Sampled, level: float) -> tuple[Array, Array, Array, Array]:
    """Ends for captured and for lds, (K,) each."""
    tails = (1 - level) / 2, (1 + level) / 2
    if s.projection:
        inner, _ = _moments(s)
        squares = np.square(s.Y_u - s.Y_hat_u).sum(1)[:, None]
        rho2 = squares / stats.chi2.ppf(tails, s.m)  # the larger first
        captured, lds, *_ = s.measures(inner, 2 * inner - s.a2[:, None] + rho2)
        return _sorted(captured) + _sorted(lds)
    return _pitman_morgan(s, level) + _noncentral(s, tails)


def _sorted(ends: Array) -> tuple[Array, Array]:
    return ends.min(1), ends.max(1)


def _pitman_morgan(s: Sampled, level: float) -> tuple[Array, Array]:
    """Ends for captured: r/√κ + y and r/√κ - y are uncorrelated at the true κ = var r / var y.

    Inverting the t test of that, with R the correlation of r and y in the sample:

        κ = (Σr²/Σy²) (c ± √(c² - 1)),    c = 1 + 2 (1 - R²) t² / (m - 1)
    """
    r, y = s.Y_u - s.Y_hat_u, s.Y_u
    rr, yy, ry = (np.sum(x, axis=1) for x in (r * r, y * y, r * y))
    with np.errstate(invalid="ignore", divide="ignore"):
        R2 = np.where(rr > 0, ry**2 / (rr * yy), 0.0)
        ratio = rr / yy
    t = stats.t.ppf((1 + level) / 2, s.m - 1)
    c = 1 + 2 * np.clip(1 - R2, 0, 1) * t**2 / (s.m - 1)
    kappa = ratio[:, None] * np.stack([c + np.sqrt(c**2 - 1), c - np.sqrt(c**2 - 1)], axis=1)
    # The means of the rows are known; beside them the energy of the rest is as estimated.
    y2 = _moments(s)[1]
    gap, mean = (s.Y_1 - s.Y_hat_1)[:, None] ** 2 / s.N, s.Y_1[:, None] ** 2 / s.N
    with np.errstate(invalid="ignore", divide="ignore"):
        return _sorted(1 - (kappa * y2 + gap) / (y2 + mean))


def _noncentral(s: Sampled, tails: tuple[float, float]) -> tuple[Array, Array]:
    """Ends for lds = δ / √(1 + δ²), δ the slope in units of the spread.

    Quantiles of t √(W/ν) - Z, with W ~ χ²_ν and Z ~ N(0, 1), over t's noncentrality: they are the
    inversion of the noncentral t distribution, which has no stable closed form.
    """
    points, generator = _LATTICE
    i = np.arange(points)
    W = stats.chi2.ppf((i + 0.5) / points, s.m - 1)
    Z = stats.norm.ppf((i * generator % points + 0.5) / points)
    slope, spread, xx = _regression(s)
    with np.errstate(invalid="ignore", divide="ignore"):
        t = slope * np.sqrt(xx) / np.sqrt(spread)
        drawn = t[:, None] * np.sqrt(W / (s.m - 1)) - Z
        delta = np.quantile(drawn, tails, axis=1) * np.sqrt(s.a2 / xx)
        lds = np.where(np.isinf(t), np.sign(slope), delta / np.sqrt(1 + delta**2))
    live = (s.a2 > 0) & (xx > 0)
    dead = np.where((s.a2 == 0) & (np.square(s.Y_u).sum(1) > 0), 0.0, math.nan)
    low, high = (np.where(live, end, dead) for end in lds)
    return low, high


def _means(sampled: Sampled, level: float) -> tuple[Interval, Interval, Interval]:
    """Over queries: captured of the whole, mean captured, mean lds.

    NOTE: the estimates of queries err together, since they share the directions. So the jackknife
    leaves out directions, not queries. It works on log(1 - x), whose error is nearer to normal
    where x is near its bound 1.
    """

    def summary(kept: Array) -> Array:
        s = sampled.seen_by(kept)
        captured, lds, r2, Y2 = (x[:, 0] for x in s.measures(*_moments(s)))
        total = 1 - r2.sum() / Y2.sum() if Y2.any() else math.nan
        means = np.array([total, _mean(captured), _mean(lds)])
        logs: Array = np.log(np.maximum(1 - means, np.finfo(float).tiny))
        return logs

    centre, low, high = jackknife(summary, sampled.m, level)
    ends = (1 - np.exp(logs) for logs in (centre, high, low))
    total, captured, lds = (Interval(*map(float, row)) for row in zip(*ends, strict=True))
    return total, captured, lds


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan
