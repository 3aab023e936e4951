"""What cannot be held here is told before anything of that size is asked for.

Where a system promises more memory than it has, it kills whoever uses it.
"""

from __future__ import annotations

from ..errors import DataError
from ..memory import free_memory, words

_SURELY_FITS = 1 << 26  # bytes for which nobody needs to ask the machine


def require_room(needed: int, what: str, remedy: str) -> None:
    """Raise DataError if this machine has not so many bytes of memory left.

    Parameters
    ----------
    needed : bytes
    what : whose they are, for the message
    remedy : what to do about it
    """
    room = free_memory() if needed > _SURELY_FITS else None
    if room is not None and needed > room:
        raise DataError(f"{what} needs {words(needed)} of memory, there are {words(room)}; {remedy}")
