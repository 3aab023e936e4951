"""Reporting of an error, printed once, which ends the command on all ranks."""

from __future__ import annotations

import os
import sys
import time

from ..config import place
from ..errors import UserError
from ..system.job import detect
from ..terminal.console import say


def show(error: UserError) -> None:
    """Print the message to stderr."""
    say(f"error: {place(error)}\n", sys.stderr, end="")  # in one piece: another rank may end this one at any time


def report(error: UserError) -> None:
    """Print the message to stderr; in an MPI job only the first rank does."""
    if speaks():
        show(error)


def speaks() -> bool:
    """Whether this rank is the one that prints, for errors that are found before MPI is there to agree on them."""
    job = detect(os.environ)
    if job is None or job.first:
        return True
    time.sleep(3)  # the first rank to end makes mpirun end the others: let the one that prints be that
    return False
