"""Process-wide effects of grids of several ranks, from the first one created until the last is closed."""

from __future__ import annotations

import atexit
import sys
import time
import traceback
from types import TracebackType

from ..errors import UserError
from .agree import CALL, check_alike
from .transport import Transport


class Effects:
    """Python's excepthook while there are such grids, where the next one finds it; and the owner of their threads.

    An exception that nothing catches prints its traceback and ends the job on all ranks, instead of leaving the others
    to wait for ever; and so does the end of the program on some ranks, while others are in another call. Ranks on one
    machine share its cores, unless the number of threads is set.

    Attributes
    ----------
    worlds : list of Transport
        Of the grids that are open.
    """

    def __init__(self, transport: Transport) -> None:
        self.worlds: list[Transport] = []
        self.before = sys.excepthook
        sys.excepthook = self
        self.take_back_threads = transport.share_cores()
        atexit.register(self.exit)

    @classmethod
    def enter(cls, transport: Transport) -> Effects:
        """Return the effects that there are in this process, with one grid more."""
        effects = sys.excepthook if isinstance(sys.excepthook, cls) else cls(transport)
        effects.worlds.append(transport)
        return effects

    def leave(self, transport: Transport) -> None:
        """Take note that a grid is closed; leave the process as it was before, if that was the last one."""
        self.worlds.remove(transport)
        if not self.worlds:
            atexit.unregister(self.exit)
            self.take_back_threads()
            if sys.excepthook is self:
                sys.excepthook = self.before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End the job, as Python's excepthook."""
        if self.worlds:
            end_job(self.worlds[-1], error)
        else:  # another hook has come after this one, and passes on to it
            self.before(kind, error, trace)

    def exit(self) -> None:
        """Compare with the other ranks, at the end of the program, that it ends on all; else end the job."""
        for world in self.worlds:
            try:
                if not world.ended:
                    check_alike(world, {CALL: "exit"})
            except Exception as error:
                end_job(world, error)


def end_job(transport: Transport, error: BaseException) -> None:
    """Print what happened on this rank, once, and end the job on all ranks."""
    if transport.rank and isinstance(error, UserError) and error.agreed:
        time.sleep(1)  # rank 0 has it too, unless it is caught there: that one tells, and ends this one
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"rank {transport.rank} of {transport.size} failed and ends the job:\n{''.join(lines)}")
    sys.stderr.flush()
    transport.abort(2 if isinstance(error, UserError) else 1)
