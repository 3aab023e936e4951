"""The command-line interface: neondist COMMAND.

arguments: the parser. options: options shared by several commands. experiment, definition: loading of experiments.
completion: shell completion. Each other module implements the command of its name, except for run (also check),
inference (evaluate, predict), train (also evaluate, predict and check for model definitions), files (schema, report).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from ..errors import OutputError, UserError
from ..io.files import WRITE_REMEDY, convert_path_errors, short_reason
from ..launcher.parent_watch import die_with_launcher
from ..launcher.report import report_error
from ..launcher.workers import end_with_supervisor
from ..system.heartbeat import send_to_supervisor
from ..system.signals import INTERRUPTED_EXIT_CODE, SignalRecorder, find_command_signal_recorder
from .arguments import create_parser
from .completion import print_completions

__all__ = ["main"]

_OUTPUT_ERRNOS = errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO
"""Error numbers of writes to a closed pipe, a full disk or a broken device."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done, 2: invalid input, 75: stopped with a checkpoint, 130: interrupted, 141: output closed; other codes are
    those of a failed job or benchmark. A bug ends the command with a traceback and exit code 1. Without `argv`, the
    arguments are those of sys.argv, and signals are handled until the process exits.
    """
    if argv is not None:
        signals = SignalRecorder().install_signal_handlers()
        try:
            return _run_and_flush(argv, signals)
        finally:
            signals.restore_signal_handlers()
    signals = find_command_signal_recorder() or SignalRecorder(owns_process=True).install_signal_handlers()
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.encoding.lower() not in ("utf-8", "utf8"):
        sys.stdout.reconfigure(errors="replace")  # for characters such as × in an ASCII locale
    die_with_launcher(os.environ)
    end_with_supervisor(os.environ)
    send_to_supervisor(os.environ, "listens")
    try:
        code = _run_and_flush(sys.argv[1:], signals)
    except SystemExit as exit_:
        send_to_supervisor(os.environ, "failed" if isinstance(exit_.code, str) else f"ended {exit_.code or 0}")
        raise
    except BaseException:  # an interrupt may surface as another exception
        send_to_supervisor(os.environ, "failed")
        if not signals.interrupted:
            raise
        code = INTERRUPTED_EXIT_CODE
    signals.ignore_further_signals()
    send_to_supervisor(os.environ, f"ended {code}")
    if signals.interrupted:
        os._exit(INTERRUPTED_EXIT_CODE)  # threads may still be running
    return code


def _run_and_flush(argv: Sequence[str], signals: SignalRecorder) -> int:
    try:
        try:
            return _run_command(argv, signals)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRNOS:
            raise
        _redirect_broken_streams()
        if isinstance(error, BrokenPipeError):  # for example, in `neondist doctor | head -1`
            return 141
        report_error(OutputError(f"standard output: cannot be written to ({short_reason(error)}); {WRITE_REMEDY}"))
        return 2


def _run_command(argv: Sequence[str], signals: SignalRecorder) -> int:
    command_parser = create_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        print_completions(command_parser)
    arguments = command_parser.parse_args(argv)
    arguments.signals = signals
    if not arguments.stops:
        signals.restore_signal_defaults()
        signals.needs_cleanup = True
    try:
        with convert_path_errors():
            return arguments.command(arguments)
    except UserError as error:
        report_error(error)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    finally:
        if arguments.watchdog is not None and not signals.owns_process:  # the caller's process continues
            arguments.watchdog.stop_watching()


def _redirect_broken_streams() -> None:
    """Redirect stdout and stderr to /dev/null if they cannot be flushed."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
    os.close(null)
