"""How an error on one of the ranks ends the command on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..errors import RemoteError, UserError
from .report import show

if TYPE_CHECKING:
    from ..comm import Transport

Prepared = TypeVar("Prepared")


def attend(world: Transport, prepare: Callable[[], Prepared], work: Callable[[Prepared], int]) -> int:
    """Prepare, whose mistakes all ranks find alike, then work; return its exit code, or that of an error.

    An error of one rank ends all of them, and one tells.
    """
    from ..comm import end_job

    try:
        prepared = prepare()
    except RemoteError:  # the rank that failed says why
        return 1
    except UserError as error:
        return _all_know(error, world)
    try:
        return work(prepared)
    except RemoteError:
        return 1
    except UserError as error:
        if getattr(error, "agreed", False):
            return _all_know(error, world)
        return _alone(error, world)
    except BaseException as error:
        if world.size == 1:
            raise
        if isinstance(error, KeyboardInterrupt):
            world.abort(130)
        end_job(world, error)
        return 1


def _all_know(error: UserError, world: Transport) -> int:
    """End a rank of a job whose ranks all have this error: the first one tells."""
    if world.rank == 0:
        show(error)
    return 2


def _alone(error: UserError, world: Transport) -> int:
    """End the job for an error that other ranks may not have; if rank 0 has it too, it is the one that tells."""
    if world.rank:
        time.sleep(1)
    show(error)
    if world.size > 1:
        world.abort(2)
    return 2
