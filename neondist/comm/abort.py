"""One failing rank ends the job on all ranks, instead of leaving the others to wait for ever."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from ..errors import UserError
from .transport import Transport


def abort_on_error(transport: Transport) -> None:
    """From now on, an exception that nothing catches prints its traceback and ends the job on all ranks."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end_job(transport, error)

    if transport.size > 1:
        sys.excepthook = hook


def end_job(transport: Transport, error: BaseException) -> None:
    """Print what happened on this rank, once, and end the job on all ranks."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"rank {transport.rank} of {transport.size} failed and ends the job:\n{''.join(lines)}")
    sys.stderr.flush()
    transport.abort(2 if isinstance(error, UserError) else 1)
