"""One exception class per kind of mistake.

A `UserError` is a mistake that the user can correct: the command line prints its message once and exits with code 2.
Everything else is a defect, or a failure of the machine: a traceback and exit code 1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

MAX_MESSAGE_LENGTH = 4000
"""maximum number of characters of a message"""
REPORT_DELAY_SECONDS = 3.0
"""delay before a rank other than 0 reports an error, since rank 0 usually reports the same error and ends the job"""
_UserErrorType = TypeVar("_UserErrorType", bound="UserError")


class NeondistError(Exception):
    """Base class of neondist's errors."""


class UserError(NeondistError):
    """Invalid input; the message says where it is, what is wrong, and how to fix it.

    `subject` is the object at fault, if any: the command line adds its file and line. `raised_on_all_ranks`: every rank
    raises this error, so that a single rank can report it for all (comm.raise_if_any_failed).
    """

    subject: object = None
    raised_on_all_ranks: bool = False

    def __init__(self, *args: object) -> None:
        super().__init__(*(_shorten_middle(one) if isinstance(one, str) else one for one in args))

    def mark_raised_on_all_ranks(self: _UserErrorType) -> _UserErrorType:
        """Mark this error as raised on every rank, and return it."""
        self.raised_on_all_ranks = True
        return self


def _shorten_middle(text: str) -> str:
    """Return a message without its middle if it is long: names in files may be arbitrarily long."""
    if len(text) <= MAX_MESSAGE_LENGTH:
        return text
    return f"{text[: MAX_MESSAGE_LENGTH * 3 // 4]} [...] {text[-MAX_MESSAGE_LENGTH // 5 :]}"


class ConfigError(UserError):
    """A field of an experiment, a layer or a command has an invalid value."""


class ShapeError(UserError):
    """Shapes of arrays or layers do not match."""


class GridError(UserError):
    """Ranks, replicas, rows and columns do not match."""


class DataError(UserError):
    """A data file is missing, damaged or of the wrong type."""


class AmbiguousAxesError(DataError):
    """A file does not name the axes of an array, and its shape leaves several choices.

    `shape` is the shape of the array in the file.
    """

    shape: tuple[int, ...] = ()


class NotReadyError(UserError, AttributeError):
    """An object is used before it is ready, such as a data set before it is opened."""


class OutputError(UserError):
    """A file cannot be written: no disk space, or no permission."""


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite, or the loss scale is too small; models have not changed their weights."""


class PassOrderError(UserError):
    """A backward pass matches no forward pass, or a pass cannot end at the requested layer; the message says why."""


class LaunchError(UserError):
    """The job cannot be started: no MPI, no mpirun, or two incompatible MPI libraries."""


class MissingPackageError(LaunchError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class ServiceError(UserError):
    """A service of the job rejects a call; the message says why."""


class ServiceUnavailableError(ServiceError):
    """A service of the job cannot be reached, or does not answer in time."""


class HaloError(UserError):
    """A layer, scheme or exchange misuses cells that it does not own; detected by `--debug-halo`."""


class PlanMismatchError(UserError):
    """A layer or scheme sends messages that differ from its declaration; the message names the layer or scheme."""


class RemoteError(NeondistError):
    """Another rank failed; see its own message."""


class _ErrorSubject(AbstractContextManager[None]):
    """A context manager without a generator, since layers enter one for each of their calls."""

    def __init__(self, subject: object) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UserError) and error.subject is None:
            error.subject = self._subject


def set_error_subject(subject: object) -> AbstractContextManager[None]:
    """Set the subject of a UserError raised in the block to `subject`, unless the error already has one."""
    return _ErrorSubject(subject)
