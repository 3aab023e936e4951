"""Process-wide effects of grids of several ranks, from the creation of the first until the last is closed."""

from __future__ import annotations

import atexit
import sys
import time
import traceback
from types import TracebackType

from ..errors import REPORT_DELAY_SECONDS, UserError
from ..terminal.script_errors import ChainedHook, ScriptErrorHook, own_stderr
from .agreement import CALL_KEY, check_equal_on_ranks
from .transport import Transport


class ExceptionAndExitHooks(ChainedHook):
    """Python's excepthook, and the number of threads, while grids of several ranks are open.

    An uncaught exception prints its traceback and ends the job on all ranks, so that no rank waits forever; so does an
    exit of some ranks while others are in another call. Ranks on one machine share its cores, unless the number of
    threads is set.

    Attributes
    ----------
    open_worlds : list of Transport
        Transports of the open grids.
    """

    def __init__(self, transport: Transport) -> None:
        self.open_worlds: list[Transport] = []
        self.previous_hook = sys.excepthook
        sys.excepthook = self
        self.restore_threads = transport.share_cores()
        atexit.register(self.check_exit)

    @classmethod
    def add_grid(cls, transport: Transport) -> ExceptionAndExitHooks:
        """Return the hooks of this process, after adding a grid."""
        hooks = sys.excepthook if isinstance(sys.excepthook, cls) else cls(transport)
        hooks.open_worlds.append(transport)
        return hooks

    def remove_grid(self, transport: Transport) -> None:
        """Remove a closed grid; after the last grid, undo all effects on the process."""
        self.open_worlds.remove(transport)
        if not self.open_worlds:
            atexit.unregister(self.check_exit)
            self.restore_threads()
            if sys.excepthook is self:
                sys.excepthook = self.previous_hook

    def __call__(self, error_type: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """End the job; called by Python as the excepthook."""
        if not self.open_worlds:  # a hook installed later delegates to this hook
            self.previous_hook(error_type, error, traceback)
        elif isinstance(error, UserError) and isinstance(self.previous_hook, ScriptErrorHook):
            self.previous_hook.report(error)
            self.open_worlds[-1].abort(2)
        else:
            abort_with_error(self.open_worlds[-1], error)

    def check_exit(self) -> None:
        """Check at interpreter exit that all ranks are exiting; otherwise end the job."""
        for world in self.open_worlds:
            try:
                if not world.ended:
                    check_equal_on_ranks(world, {CALL_KEY: "exit"})
            except Exception as error:
                abort_with_error(world, error)


def abort_with_error(transport: Transport, error: BaseException) -> None:
    """Print the error of this rank and end the job on all ranks."""
    if transport.rank and isinstance(error, UserError) and error.raised_on_all_ranks:
        time.sleep(REPORT_DELAY_SECONDS)  # rank 0 reports the error and ends the job first, unless it catches the error
    traceback_lines = traceback.format_exception(type(error), error, error.__traceback__)
    stderr = own_stderr()
    stderr.write(f"rank {transport.rank} of {transport.size} failed and ends the job:\n{''.join(traceback_lines)}")
    stderr.flush()
    transport.abort(2 if isinstance(error, UserError) else 1)
