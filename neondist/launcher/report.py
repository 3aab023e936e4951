"""Output of an error that ends the command on all ranks; the error is printed once."""

from __future__ import annotations

import os
import sys
import time

from ..config import add_location
from ..errors import UserError
from ..system.job import detect_job
from ..terminal.console import say


def print_error(error: UserError) -> None:
    """Print the message to stderr."""
    # in one write: another rank may end this one at any time
    say(f"error: {add_location(error)}\n", sys.stderr, end="")


def report_error(error: UserError) -> None:
    """Print the message to stderr, in an MPI job only on the first rank."""
    if is_reporting_rank():
        print_error(error)


def is_reporting_rank() -> bool:
    """Whether this rank prints an error detected before MPI is initialised."""
    job = detect_job(os.environ)
    if job is None or job.is_first_rank:
        return True
    time.sleep(3)  # mpirun ends all ranks once one exits: let the printing rank be first
    return False
