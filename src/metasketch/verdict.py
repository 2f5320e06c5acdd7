"""What the doctor found of a run, in a few numbers that a run carries with it."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from metasketch.errors import MetasketchWarning

Word = Literal["smooth", "unclear", "rough"]

SMOOTH = 0.8
"""LDS of exact rows from which on attributing a run is worth a budget."""


@dataclass(frozen=True)
class Verdict:
    """Does the linear prediction hold, so that attributions of a run predict retraining?

    Attributes:
        word: "smooth": the interval lies above 0.8; "rough": below it; "unclear": across it.
        score: predicted LDS of exact rows, which no method exceeds by much.
        low, high: its interval.
        fraction: of the examples that the removals were of.
        retrainings: how many removals it was measured with.
        sound: whether the checks of replay and derivatives passed.
    """

    word: Word
    score: float
    low: float
    high: float
    fraction: float
    retrainings: int
    sound: bool

    @classmethod
    def of(cls, table: Mapping[str, Any] | None) -> "Verdict | None":
        """What `facts` gave."""
        if table is None or table.get("word") not in get_args(Word):
            return None
        return cls(**table)

    def facts(self) -> dict[str, Any]:
        """As a table that JSON has."""
        return asdict(self)

    @property
    def passed(self) -> bool:
        return self.word == "smooth" and self.sound

    def __str__(self) -> str:
        return (
            f"{self.word}: exact attributions would reach an LDS of about {self.score:.2f} "
            f"[{self.low:.2f}, {self.high:.2f}] when {100 * self.fraction:g} % of the examples are "
            f"removed"
        )


def judged(low: float, high: float) -> Word:
    """The word for an interval.

    >>> judged(0.9, 0.99), judged(0.7, 0.95), judged(-0.1, 0.3)
    ('smooth', 'unclear', 'rough')
    """
    if low >= SMOOTH:
        return "smooth"
    return "rough" if high < SMOOTH else "unclear"


def warn(verdict: Verdict | None, stacklevel: int = 3) -> list[str]:
    """Warn where a run was never checked, or failed; returns what to note with a result."""
    if verdict is None:
        words = (
            "this run was never checked: ms.diagnose(run, queries) says, for a few sweeps and "
            "retrainings, whether attributions of it predict retraining"
        )
    elif verdict.word == "rough" or not verdict.sound:
        words = f"the doctor found this run {verdict}"
        if not verdict.sound:
            words += "; a check of its replay or of its derivatives failed"
    else:
        return []
    warnings.warn(words, MetasketchWarning, stacklevel=stacklevel)
    return [words]
