"""Training-data attribution by metagradients: which examples made this model behave like this?"""

from metasketch import evaluate, losses, measures
from metasketch.advise import Advice, advise
from metasketch.attach import attach
from metasketch.attribute import attribute
from metasketch.audit import audit
from metasketch.check import CheckReport, check
from metasketch.conversion import from_scheduler
from metasketch.data import Microbatches
from metasketch.diagnose import Diagnosis, diagnose
from metasketch.errors import (
    ArgumentError,
    DataError,
    DerivativeError,
    LossError,
    MemoryBudgetError,
    MetasketchError,
    MetasketchWarning,
    MismatchError,
    ModelError,
    NumericalError,
    RecipeError,
    StoreError,
)
from metasketch.influence import Influence
from metasketch.integrations.hf_trainer import from_trainer
from metasketch.methods import methods
from metasketch.muon import Muon
from metasketch.optim import SGD, Adam, AdamW, Group
from metasketch.plan import JobPlan, plan
from metasketch.quality import Quality
from metasketch.queries import Queries
from metasketch.recipe import Recipe
from metasketch.report import report
from metasketch.run import Run
from metasketch.schedules import constant, cosine, linear, linear_warmup, one_cycle
from metasketch.train import load_run, train
from metasketch.version import __version__

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Advice",
    "ArgumentError",
    "CheckReport",
    "DataError",
    "DerivativeError",
    "Diagnosis",
    "Group",
    "Influence",
    "JobPlan",
    "LossError",
    "MemoryBudgetError",
    "MetasketchError",
    "MetasketchWarning",
    "Microbatches",
    "MismatchError",
    "ModelError",
    "Muon",
    "NumericalError",
    "Quality",
    "Queries",
    "Recipe",
    "RecipeError",
    "Run",
    "StoreError",
    "__version__",
    "advise",
    "attach",
    "attribute",
    "audit",
    "check",
    "constant",
    "cosine",
    "diagnose",
    "evaluate",
    "from_scheduler",
    "from_trainer",
    "linear",
    "linear_warmup",
    "load_run",
    "losses",
    "measures",
    "methods",
    "one_cycle",
    "report",
    "plan",
    "train",
]
