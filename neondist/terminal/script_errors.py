"""Uncaught errors of a script that the user can correct: one message instead of a traceback."""

from __future__ import annotations

import sys
from traceback import walk_tb
from types import TracebackType

from ..errors import UserError
from .console import say


def install_script_error_hook() -> None:
    """Let an uncaught UserError of a script print one message with the script's line, and exit with code 2.

    Python's excepthook is left unchanged if it has been replaced already, and at the interpreter's prompt.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            sys.__excepthook__(kind, error, trace)
            return
        lines = [f"{script}:{line}: " for frame, line in walk_tb(trace) if frame.f_code.co_filename == script]
        say(f"error: {lines[-1] if lines else ''}{error}", sys.stderr)
        raise SystemExit(2)

    if script is not None and sys.excepthook is sys.__excepthook__:
        sys.excepthook = report
