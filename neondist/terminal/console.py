"""Telling the person at the keyboard, who may not be there any more."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO


def visible(text: str, keep: str = "\n") -> str:
    """Return a text with each character that cannot be seen, as names in files may have, shown by its number."""
    return "".join(one if one.isprintable() or one in keep else repr(one)[1:-1] for one in text)


def counted(count: int, noun: str) -> str:
    """Return a number of things: '1 rank', '4 ranks'."""
    return f"{count} {noun}{'s' * (count != 1)}"


def emit(*texts: object) -> None:
    """Print what a command was asked for to stdout, line by line; unlike `say`, OSError if that fails."""
    for text in texts:
        print(visible(str(text)), flush=True)


def say(text: str, file: IO[str] | None = None, end: str = "\n", start: str = "") -> None:
    """Print to `file`, default stdout; a closed pipe or a full disk is ignored, so that a run continues."""
    stream = sys.stdout if file is None else file
    try:
        print(start + visible(text), file=stream, end=end, flush=True)
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            stream.flush()  # what it still holds
