"""One exception class per kind of mistake.

A `UserError` is something the person at the keyboard can mend: the command line prints its message once and exits with
code 2. Everything else is a defect or a failure of the machine: a traceback and exit code 1.
"""

from __future__ import annotations

from typing import TypeVar

LONGEST = 4000
"""characters of a message"""
_Error = TypeVar("_Error", bound="UserError")


class NeondistError(Exception):
    """Base of all errors that neondist raises on purpose."""


class UserError(NeondistError):
    """The input is wrong; the message says where, what and how to mend it.

    `subject` is the object that the message is about, if there is one: the command line adds its file and line.
    `agreed` says that every rank has this error (comm.agree), so that one of them can tell.
    """

    subject: object = None
    agreed: bool = False

    def __init__(self, *args: object) -> None:
        super().__init__(*(_shortened(one) if isinstance(one, str) else one for one in args))

    def on_all_ranks(self: _Error) -> _Error:
        """Return this error, which every rank has."""
        self.agreed = True
        return self


def _shortened(text: str) -> str:
    """Return a message without its middle if it is long: names in files have any length."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST * 3 // 4]} [...] {text[-LONGEST // 5 :]}"


class ConfigError(UserError):
    """A field of an experiment, a layer or a command has a value that cannot work."""


class ShapeError(UserError):
    """Array or layer shapes do not fit together."""


class GridError(UserError):
    """Ranks, replicas, rows and columns do not fit together."""


class DataError(UserError):
    """A data file is missing, damaged or not what its name promises."""


class AxesError(DataError):
    """A file does not name the axes of an array, and its shape leaves several choices.

    `shape` is that of the array as it lies in the file.
    """

    shape: tuple[int, ...] = ()


class NotReadyError(UserError, AttributeError):
    """Something is used before it is ready, such as a data set before it is open."""


class OutputError(UserError):
    """A file cannot be written: no room, or no permission."""


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite; the message says at which step and where first. Weights are as before."""


class PassError(UserError):
    """A bprop does not belong to the last fprop, whose arrays are gone; the message says what came between."""


class LaunchError(UserError):
    """The job cannot be started: no MPI, no mpirun, or two MPIs that do not know each other."""


class MissingPackageError(LaunchError, ImportError):
    """An optional package is not installed; the message says how to."""


class ServiceError(UserError):
    """A service of the job refuses a call; the message says why."""


class ServiceUnavailableError(ServiceError):
    """A service of the job cannot be reached, or does not answer in time."""


class HaloError(UserError):
    """A layer, scheme or exchange treats cells wrongly that are not its own; found by `--debug-halo`."""


class PlanError(UserError):
    """What a layer or a scheme sends is not what it has declared; the message names it."""


class RemoteError(NeondistError):
    """Another rank failed; its own message is the one to read."""
