"""Uncaught errors of a script that the user can correct: one message instead of a traceback."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from traceback import walk_tb
from types import TracebackType
from typing import Any

from ..errors import REPORT_DELAY_SECONDS, UserError
from ..system.job import detect_job
from .console import say


def own_stderr() -> Any:
    """Return the real stderr: torch.distributed's excepthook replaces it, and loses the text of a hook that exits."""
    return sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr


class ChainedHook:
    """Base class of excepthooks that keep the previous one, as `previous_hook`."""

    previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ScriptErrorHook:
    """Python's excepthook of a script: an uncaught UserError prints one message and exits with code 2.

    Parameters
    ----------
    script : str
        Path of the script, whose line the message names.
    """

    def __init__(self, script: str) -> None:
        self.script = script

    def __call__(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report a UserError and exit; print the traceback of any other error."""
        if not isinstance(error, UserError):
            sys.__excepthook__(error_type, error, trace)
            return
        self.report(error)
        raise SystemExit(2)

    def report(self, error: UserError) -> None:
        """Print the message of an error with the script's line; other ranks wait, so that rank 0 reports it first."""
        job = detect_job(os.environ)
        if job is not None and job.rank:
            time.sleep(REPORT_DELAY_SECONDS)
        trace = walk_tb(error.__traceback__)
        lines = [f"{self.script}:{line}: " for frame, line in trace if frame.f_code.co_filename == self.script]
        say(f"error: {lines[-1] if lines else ''}{error}", own_stderr())


def install_script_error_hook() -> None:
    """Install a ScriptErrorHook for the running script.

    Python's excepthook is left unchanged if it has been replaced already, and at the interpreter's prompt.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    hook = sys.excepthook
    if script is None:
        return
    if hook is sys.__excepthook__:
        sys.excepthook = ScriptErrorHook(script)
    elif isinstance(hook, ChainedHook) and hook.previous_hook is sys.__excepthook__:
        hook.previous_hook = ScriptErrorHook(script)
