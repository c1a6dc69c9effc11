"""What can go wrong in a training backend; every error names the thing, its value and the way out."""


class TrainError(Exception):
    """Anything a training backend refuses or fails at."""


class SettingsError(TrainError, ValueError):
    """A trainer setting has a value it cannot have."""


class UntrainableModelError(TrainError, ValueError):
    """A model folder is missing or incomplete, or holds a model that this backend cannot train."""


class BatchError(TrainError, ValueError):
    """A micro-batch contradicts itself, misses a column, or does not fit the model."""


class StepOrderError(TrainError, RuntimeError):
    """A verb was called when its turn had not come, such as a step with no gradient accumulated."""


class NonFiniteError(TrainError, ArithmeticError):
    """A gradient became NaN or infinite where the step cannot just be skipped."""


class StateMismatchError(TrainError, ValueError):
    """A state does not belong to this model or backend; nothing was loaded."""


class StateFileError(TrainError):
    """A state folder cannot be written or read."""


class StateMissingError(StateFileError, FileNotFoundError):
    """There is no state at this place."""


class StateCorruptError(StateFileError):
    """A state folder is damaged: it was cut short, changed, or is of another schema."""


class ExportError(TrainError):
    """An export cannot be written where it was asked for."""


class UnknownBackendError(TrainError, LookupError):
    """No training backend has this name or import path."""


class RankFailed(TrainError, RuntimeError):
    """A rank of the trainer raised, died or fell silent; the message names it and the cause.

    Attributes:
        rank: which; -1 for several or none in particular.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
