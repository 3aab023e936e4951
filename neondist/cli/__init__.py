"""The command line: neondist run | evaluate | predict | check | bench | doctor | data.

arguments: what can be typed. One file per command: run, apply, check, bench, doctor, data. ranks, job, mpirun,
launch, supervise: joining or starting an MPI job. leftovers, orphan: ending one without a trace. report: the one
message of a mistake.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..errors import UserError
from .arguments import parser, spread
from .report import report

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 the input is wrong, 130 interrupted, 141 nobody reads on.

    Anything else is a defect: its traceback, and exit code 1.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # of `neondist doctor | head -1`
        _send_nowhere()
        return 141


def _run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(spread(argv))
    try:
        return arguments.command(arguments)
    except UserError as error:
        report(error)
        return 2
    except KeyboardInterrupt:
        return 130


def _send_nowhere() -> None:
    """Let what is still to be written to a pipe that nobody reads from go to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
