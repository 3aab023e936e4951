"""`--virtual P`: P tiles in one process, a thread each, without MPI."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import threads
from ..errors import LaunchError
from . import options
from .job import detect
from .modules import import_module

if TYPE_CHECKING:
    from ..comm import Transport

PATIENCE = 24 * 3600.0
"""seconds that a virtual rank waits for a message of another, which may have a core's work before it"""


def option(one: argparse.ArgumentParser, many: bool = False) -> None:
    """Add --virtual; `many`: one number after the other."""
    one.add_argument(
        "--virtual", type=options.counts if many else options.positive, metavar="1,4,16" if many else "P",
        help=f"{'1, 4, 16' if many else 'P'} virtual ranks in this process: slow, but the same numbers",
    )  # fmt: skip


def on_virtual_ranks(arguments: argparse.Namespace, body: Callable[[Transport], int]) -> int:
    """Call body(transport) on every virtual rank and return the highest exit code.

    Raises
    ------
    LaunchError
        With -n, or inside an MPI job.
    """
    if arguments.ranks is not None:
        raise LaunchError("--virtual runs all ranks in this process, and -n starts processes; give one of them")
    if detect(os.environ) is not None:
        raise LaunchError("--virtual inside an MPI job: leave it out, or run the command without mpirun")
    from ..comm import loopback

    for module in getattr(arguments, "modules", ()):
        import_module(module)  # now, and not in every thread
    threads.limit(arguments.virtual)
    return max(loopback.run(arguments.virtual, body, timeout=PATIENCE, at_once=threads.cores()))
