"""Console output that tolerates closed pipes and full disks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO


def escape_invisible(text: str, keep: str = "\n") -> str:
    """Return a text with invisible characters, as in file names, replaced by escapes."""
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Format a count with its noun: '1 rank', '4 ranks'; `plural`: for nouns with an irregular plural."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def format_duration(seconds: float) -> str:
    """Return a duration as text such as '2 h 5 min'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def emit(*texts: object) -> None:
    """Print a command's results to stdout, line by line; unlike `say`, raise OSError on failure."""
    for text in texts:
        print(escape_invisible(str(text)), flush=True)


def say(text: str, file: IO[str] | None = None, end: str = "\n", start: str = "") -> None:
    """Print to `file`, default stdout; a closed pipe or a full disk is ignored, so that a run continues."""
    stream = sys.stdout if file is None else file
    try:
        print(start + escape_invisible(text), file=stream, end=end, flush=True)
    except OSError:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()  # discard buffered text
