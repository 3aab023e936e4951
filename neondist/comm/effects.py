"""What grids of several ranks change in their process, from the first that is made until the last is closed."""

from __future__ import annotations

import sys
import time
import traceback
from types import TracebackType

from ..errors import UserError
from .transport import Transport


class Effects:
    """Python's excepthook while there are such grids, where the next one finds it; and the owner of their threads.

    An exception that nothing catches prints its traceback and ends the job on all ranks, instead of leaving the others
    to wait for ever. Ranks on one machine share its cores, if nobody has set the number of threads.
    """

    def __init__(self, transport: Transport) -> None:
        self.grids, self.transport, self.before = 0, transport, sys.excepthook
        sys.excepthook = self
        self.take_back_threads = transport.share_cores()

    @classmethod
    def enter(cls, transport: Transport) -> Effects:
        """Return the effects that there are in this process, with one grid more."""
        effects = sys.excepthook if isinstance(sys.excepthook, cls) else cls(transport)
        effects.grids, effects.transport = effects.grids + 1, transport
        return effects

    def leave(self) -> None:
        """Leave the process as it was before, if this was the last grid."""
        self.grids -= 1
        if not self.grids:
            self.take_back_threads()
            if sys.excepthook is self:
                sys.excepthook = self.before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End the job, as Python's excepthook."""
        if self.grids:
            end_job(self.transport, error)
        else:  # another hook has come after this one, and passes on to it
            self.before(kind, error, trace)


def end_job(transport: Transport, error: BaseException) -> None:
    """Print what happened on this rank, once, and end the job on all ranks."""
    if transport.rank and isinstance(error, UserError) and error.agreed:
        time.sleep(1)  # rank 0 has it too, unless it is caught there: that one tells, and ends this one
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"rank {transport.rank} of {transport.size} failed and ends the job:\n{''.join(lines)}")
    sys.stderr.flush()
    transport.abort(2 if isinstance(error, UserError) else 1)
