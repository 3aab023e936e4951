"""Fetching one file over HTTP: resumed where it stopped, checked, and renamed when it is whole."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ..errors import DataError
from .unpack import unpacked_md5

#: called with the file name, the bytes there so far and the total, None where the server does not tell
Progress = Callable[[str, int, int | None], None]
_PIECE = 1 << 16
_TOTAL = re.compile(r"/(\d+)$")


def fetch(url: str, target: Path, md5: str, progress: Progress, timeout: float = 10.0) -> None:
    """Download `url` to `target`, whose unpacked bytes must have this md5; a good file that is there is kept.

    What has arrived is kept in `target`.part, from where the next call goes on.

    Parameters
    ----------
    timeout : float
        Seconds without an answer or a byte after which the transfer is given up.

    Raises
    ------
    DataError
        If the transfer stops, the server refuses, or what arrives is not the expected file.
    """
    if _good(target, md5):
        progress(target.name, target.stat().st_size, target.stat().st_size)
        return
    part = target.with_name(f"{target.name}.part")
    resumed = part.exists() and part.stat().st_size > 0
    _transfer(url, part, progress, timeout)
    if resumed and not _good(part, md5):
        # the old piece, or the range, may have been of other bytes: once more, from the start
        part.unlink()
        _transfer(url, part, progress, timeout)
    if not _good(part, md5):
        part.unlink()
        raise DataError(f"{url}: what arrived is damaged (wrong checksum); try again, or name another mirror")
    os.replace(part, target)


def _transfer(url: str, part: Path, progress: Progress, timeout: float) -> None:
    start = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
            appends, total = _place(answer)
            with open(part, "ab" if appends else "wb") as file:
                there = _copy(answer, file, lambda there: progress(part.stem, there, total))
                file.flush()
                os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        # nothing is left to send: the piece was whole (or wrong, which its checksum tells)
        if error.code == 416 and start:
            return
        raise DataError(f"{url}: the server answers {error.code} {error.reason}; name another mirror") from error
    except (urllib.error.URLError, ConnectionError, TimeoutError, http.client.HTTPException) as error:
        raise DataError(_stopped(url, part, getattr(error, "reason", None) or error)) from error
    if total is not None and there < total:
        raise DataError(_stopped(url, part, f"{there} of {total} bytes arrived"))


def _place(answer: http.client.HTTPResponse) -> tuple[bool, int | None]:
    """Return whether the bytes go on where the piece ends (servers may ignore Range), and the size of the file."""
    if answer.status == 206:
        found = _TOTAL.search(answer.headers.get("Content-Range") or "")
        return True, int(found[1]) if found else None
    length = answer.headers.get("Content-Length")
    return False, int(length) if length else None


def _copy(answer: http.client.HTTPResponse, file: BinaryIO, progress: Callable[[int], None]) -> int:
    while piece := _receive(answer):
        file.write(piece)
        progress(file.tell())
    return file.tell()


def _receive(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read(_PIECE)
    except http.client.IncompleteRead as error:
        return error.partial
    # an OSError here is of the network; one of file.write is of the disk
    except OSError as error:
        raise http.client.HTTPException(str(error)) from error


def _good(path: Path, md5: str) -> bool:
    try:
        return path.exists() and unpacked_md5(path) == md5
    except DataError:
        return False


def _stopped(url: str, part: Path, reason: object) -> str:
    hand = f"copy the files by hand to {part.parent}"
    if part.exists() and part.stat().st_size:
        return f"{url}: the transfer stopped: {reason}; run the same command again to go on from there, or {hand}"
    return f"no network: {url}: {reason}; {hand}, or name another mirror"
