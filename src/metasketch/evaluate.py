"""Does the attribution predict retraining? What `metasketch.evaluate` offers."""

from metasketch.geometry import Geometry, geometry
from metasketch.metrics import (
    Interval,
    by_quartile,
    captured_energy,
    lds,
    lds_interval,
    oracle,
    per_query_error,
    relative_error,
    row_norms,
)
from metasketch.removals import Removals, removals
from metasketch.retrain import Retrained, retrained

__all__ = [
    "Geometry",
    "Interval",
    "Removals",
    "Retrained",
    "by_quartile",
    "captured_energy",
    "geometry",
    "lds",
    "lds_interval",
    "oracle",
    "per_query_error",
    "relative_error",
    "removals",
    "retrained",
    "row_norms",
]
