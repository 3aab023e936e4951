"""The four MNIST files from their public mirror: resumed where a transfer stopped, checked, renamed when whole.

Not by pooch, which starts over after an interruption, verifies checksums only of compressed files (mirrors compress
again), and brings six packages for these four files.
"""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ...errors import DataError
from .idx import unpacked_md5
from .mnist import ALL

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
Progress = Callable[[str, int, int | None], None]
"""Called with the file name, the bytes there so far and the total, None where the server does not tell."""
_PIECE = 1 << 16


def download_mnist(
    directory: str | os.PathLike[str], mirror: str = MIRROR, progress: Progress | None = None, timeout: float = 10.0
) -> list[Path]:
    """Download the four MNIST files, about 11 MB, and check them bit for bit; what is there and good is kept.

    Parameters
    ----------
    directory : path
        Where the files go; made if missing, `~` is expanded.
    mirror : str
        URL of a folder that holds the four .gz files.
    progress : callable, optional
        Called as progress(file name, bytes there, bytes in all or None).
    timeout : float
        Seconds without a byte after which the transfer is given up; a later call goes on from there.

    Returns
    -------
    list of Path
        The four files.

    Raises
    ------
    DataError
        If there is no network, a file does not arrive whole, or the directory cannot be written.
    """
    folder = Path(os.path.expanduser(directory))
    targets = [folder / f"{file.name}.gz" for file in ALL]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, target in zip(ALL, targets, strict=True):
            url = f"{mirror.rstrip('/')}/{target.name}"
            _fetch(url, target, file.md5, progress or (lambda name, there, total: None), timeout)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror or error}); choose another folder") from error
    except ValueError as error:
        raise DataError(f"mirror: {mirror!r} is not a URL ({error}); give one such as {MIRROR}") from error
    return targets


def _fetch(url: str, target: Path, md5: str, progress: Progress, timeout: float) -> None:
    """Download `url` to `target`, whose unpacked bytes must have this md5; a good file that is there is kept.

    What has arrived is kept in `target`.part, from where the next call goes on.
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
        raise DataError(f"{url}: the download is damaged (wrong checksum); try again, or choose another mirror")
    os.replace(part, target)


def _transfer(url: str, part: Path, progress: Progress, timeout: float) -> None:
    start = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
            appends, total = _range(answer)
            with open(part, "ab" if appends else "wb") as file:
                there = _copy(answer, file, lambda there: progress(part.stem, there, total))
                file.flush()
                os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        # nothing is left to send: the piece was whole (or wrong, which its checksum tells)
        if error.code == 416 and start:
            return
        raise DataError(f"{url}: the server returned {error.code} {error.reason}; name another mirror") from error
    except (urllib.error.URLError, ConnectionError, TimeoutError, http.client.HTTPException) as error:
        raise DataError(_stopped(url, part, getattr(error, "reason", None) or error)) from error
    if total is not None and there < total:
        raise DataError(_stopped(url, part, f"{there} of {total} bytes arrived"))


def _range(answer: http.client.HTTPResponse) -> tuple[bool, int | None]:
    """Return whether the bytes go on where the piece ends (servers may ignore Range), and the size of the file."""
    if answer.status == 206:
        found = re.search(r"/(\d+)$", answer.headers.get("Content-Range") or "")
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
        return f"{url}: the transfer stopped: {reason}; repeat the command to resume it, or {hand}"
    return f"no network: {url}: {reason}; {hand}, or name another mirror"
