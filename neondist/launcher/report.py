"""A mistake is told once, and ends the command on all ranks."""

from __future__ import annotations

import os
import sys
import time

from ..config import place
from ..console import say
from ..errors import UserError
from ..job import detect


def show(error: UserError) -> None:
    """Print the message to stderr; a character that cannot be seen, as a file may have, is shown by its number."""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(place(error)))
    say(f"error: {text}\n", sys.stderr, end="")  # in one piece: another rank may end this one at any time


def report(error: UserError) -> None:
    """Print the message to stderr; in an MPI job only the first rank does."""
    if speaks():
        show(error)


def speaks() -> bool:
    """Tell whether this rank is the one that prints, for errors that are found before MPI is there to agree on them."""
    job = detect(os.environ)
    if job is None or job.first:
        return True
    time.sleep(3)  # the first rank to end makes mpirun end the others: let the one that prints be that
    return False
