"""The failures that a user can act on; each owns one sentence and one hint."""


class GconvError(Exception):
    """A failure with a sentence for the user (`str(error)`) and a hint what to do about it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(GconvError):
    """Settings that do not go together, or a value that is not known."""


class ModelError(GconvError):
    """The model cannot be read, understood or run."""


class DataError(GconvError):
    """The data cannot be read, or does not fit the model."""


class PlanError(GconvError):
    """The plan or group configuration is malformed, or does not fit the model."""


class BudgetError(GconvError):
    """The budget is malformed or cannot be met."""


class VerifyError(GconvError):
    """Two models that must be the same function are not, or it could not be found out."""


class LatencyError(GconvError):
    """The result is slower than the model it was made from."""


class TrainingError(GconvError):
    """A training cannot start, go on, or end well."""


class DependencyError(GconvError):
    """An optional package that the command needs is not installed."""


class OutputError(GconvError):
    """A result could not be written."""


class DeployError(GconvError):
    """A runner, its host or what it measured: something is missing there, unreachable or malformed."""


class PointError(GconvError):
    """A point of an exploration could not be done; the others are."""


class ClusterError(GconvError):
    """A cluster cannot be reached, or cannot do our work."""


class ReportError(GconvError):
    """There is nothing to report on, or a file that a report is made from is malformed."""
