"""A mistake is told once, and ends the command on all ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from ..comm import Transport
from ..config import place
from ..console import say
from ..errors import RemoteError, UserError
from ..job import detect

Prepared = TypeVar("Prepared")


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


def run_reported(world: Transport, prepare: Callable[[], Prepared], work: Callable[[Prepared], int]) -> int:
    """Prepare, whose mistakes all ranks find alike, then work; return its exit code, or that of an error.

    An error of one rank ends all of them, and one tells.
    """
    from ..comm import end_job

    agreed = True
    try:
        prepared = prepare()
        agreed = False
        return work(prepared)
    except RemoteError:  # the rank that failed says why
        return 1
    except UserError as error:
        if agreed or error.agreed:
            if world.rank == 0:
                show(error)
            return 2
        if world.rank:
            time.sleep(1)  # if rank 0 has it too, that one tells
        show(error)
        if world.size > 1:
            world.abort(2)
        return 2
    except BaseException as error:
        if agreed or world.size == 1:
            raise
        if isinstance(error, KeyboardInterrupt):
            world.abort(130)
        end_job(world, error)
        return 1
