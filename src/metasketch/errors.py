"""What can go wrong, as one tree, so that a caller can catch as much of it as they mean to.

    MetasketchError
    ├── ArgumentError          an argument of a call: its value, what is allowed
    ├── RecipeError            what is trained, or how, cannot be differentiated as described
    │   ├── ModelError         the module: mutable buffers, precision, no parameters
    │   ├── LossError          the loss: wrong shape, already reduced, mutates its inputs
    │   └── DataError          the data set: empty, indices out of range, items that change
    ├── NumericalError         NaN or infinity, with the step at which it appeared
    ├── DerivativeError        no derivative of the needed kind, with the module that lacks it
    ├── MemoryBudgetError      the budget is too small; says how much is needed
    ├── MismatchError          something recomputed differs from what was recorded
    └── StoreError             a stored run is damaged, of another version, or of another recipe

Every message says what was wrong, with which value, and what to do about it. Warnings are of the
class MetasketchWarning.
"""


class MetasketchError(Exception):
    """Base of every error that the library raises on purpose."""


class ArgumentError(MetasketchError, ValueError):
    """An argument has a value that the call cannot use."""


class RecipeError(MetasketchError, ValueError):
    """The training run as described cannot be run, or not be differentiated."""


class ModelError(RecipeError):
    """The module cannot be trained as a differentiable program."""


class LossError(RecipeError):
    """The loss function does not have one of the three forms, or misbehaves."""


class DataError(RecipeError):
    """The data set, its collation, its order or its augmentation cannot be used."""


class NumericalError(MetasketchError, ArithmeticError):
    """A value stopped being finite."""


class DerivativeError(MetasketchError, RuntimeError):
    """An operation of the model or the loss has no derivative of the needed kind."""


class MemoryBudgetError(MetasketchError, ValueError):
    """The memory (or disk) budget is smaller than the least that the job needs."""


class MismatchError(MetasketchError, RuntimeError):
    """Something that was recomputed is not what was recorded in training."""


class StoreError(MetasketchError, RuntimeError):
    """A store on disk is damaged, incomplete, or belongs to something else."""


class MetasketchWarning(UserWarning):
    """Something that is allowed, and that the caller should know."""
