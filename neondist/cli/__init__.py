"""The command line: neondist run | evaluate | predict | check | bench | doctor | data.

arguments: what can be typed. One file per command: run, apply, check, bench, doctor, data. ranks, job, mpirun,
launch, supervise: joining or starting an MPI job. leftovers, orphan: ending one without a trace. report: the one
message of a mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import UserError
from .arguments import parser, spread
from .report import report

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 the input is wrong, 130 interrupted.

    Anything else is a defect: its traceback, and exit code 1.
    """
    arguments = parser().parse_args(spread(sys.argv[1:] if argv is None else argv))
    try:
        return arguments.command(arguments)
    except UserError as error:
        report(error)
        return 2
    except KeyboardInterrupt:
        return 130
