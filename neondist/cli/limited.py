"""C code that lets no other thread run, such as the start of MPI, must not hang for ever either."""

from __future__ import annotations

import faulthandler
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

# it waits outside of this process, in which nothing runs but faulthandler's own thread, for that one to write
_TELL = 'read word && printf "%s\\n" "$0" >&2'


@contextmanager
def limited(seconds: float, text: str) -> Iterator[None]:
    """End this process with exit code 1, and say `text`, if the block takes longer than so many seconds."""
    if os.name != "posix":
        yield
        return
    teller = subprocess.Popen(["/bin/sh", "-c", _TELL, text], stdin=subprocess.PIPE, start_new_session=True)
    assert teller.stdin is not None
    faulthandler.dump_traceback_later(seconds, exit=True, file=teller.stdin.fileno())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        teller.stdin.close()
        teller.wait()
