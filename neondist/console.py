"""Telling the person at the keyboard, who may not be there any more."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO


def say(text: str, file: IO[str] | None = None, end: str = "\n") -> None:
    """Print to `file`, default stdout; where nobody reads on, or the disk is full, a run goes on in silence."""
    stream = sys.stdout if file is None else file
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            stream.flush()  # what it still holds
