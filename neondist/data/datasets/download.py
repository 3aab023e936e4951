"""The four MNIST files from their public mirror: resumable downloads, verified and then renamed.

pooch is not used: it restarts interrupted transfers, verifies only checksums of compressed files (mirrors recompress
them), and would add six dependencies.
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
from .mnist import ALL_FILES

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
OnProgress = Callable[[str, int, int | None], None]
"""Called with the file name, the bytes received and the total bytes (None if the server does not report them)."""
_DOWNLOAD_PIECE_BYTES = 1 << 16


def download_mnist(
    directory: str | os.PathLike[str], mirror: str = MIRROR, progress: OnProgress | None = None, timeout: float = 10.0
) -> list[Path]:
    """Download the four MNIST files, about 11 MB, and verify them bit for bit; valid existing files are kept.

    Parameters
    ----------
    directory : path
        Target folder; created if missing, `~` is expanded.
    mirror : str
        URL of a folder that holds the four .gz files.
    progress : callable, optional
        Called as progress(file name, bytes received, total bytes or None).
    timeout : float
        Seconds without data after which the transfer is aborted; a later call resumes it.

    Returns
    -------
    list of Path
        The four files.

    Raises
    ------
    DataError
        If there is no network, a file is incomplete or damaged, or the directory cannot be written.
    """
    folder = Path(os.path.expanduser(directory))
    targets = [folder / f"{file.name}.gz" for file in ALL_FILES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, target in zip(ALL_FILES, targets, strict=True):
            url = f"{mirror.rstrip('/')}/{target.name}"
            _download_verified(url, target, file.md5, progress or (lambda name, received, total: None), timeout)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror or error}); choose another folder") from error
    except ValueError as error:
        raise DataError(f"mirror: {mirror!r} is not a URL ({error}); give one such as {MIRROR}") from error
    return targets


def _download_verified(url: str, target: Path, md5: str, progress: OnProgress, timeout: float) -> None:
    """Download `url` to `target`, whose unpacked bytes must have this md5; a valid existing file is kept.

    Partial data are kept in `target`.part, which the next call resumes.
    """
    if _has_md5(target, md5):
        progress(target.name, target.stat().st_size, target.stat().st_size)
        return
    partial_file = target.with_name(f"{target.name}.part")
    resumed = partial_file.exists() and partial_file.stat().st_size > 0
    _resume_download(url, partial_file, progress, timeout)
    if resumed and not _has_md5(partial_file, md5):
        # the partial file may be from another version: restart from the beginning
        partial_file.unlink()
        _resume_download(url, partial_file, progress, timeout)
    if not _has_md5(partial_file, md5):
        partial_file.unlink()
        raise DataError(f"{url}: the download is damaged (wrong checksum); try again, or choose another mirror")
    os.replace(partial_file, target)


def _resume_download(url: str, partial_file: Path, progress: OnProgress, timeout: float) -> None:
    start = partial_file.stat().st_size if partial_file.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
            is_resumed, size = _parse_resumed_and_total_size(response)
            with open(partial_file, "ab" if is_resumed else "wb") as file:
                received = _copy_response(response, file, lambda received: progress(partial_file.stem, received, size))
                file.flush()
                os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        # nothing is left to send: the partial file was complete (or wrong, as its checksum then shows)
        if error.code == 416 and start:
            return
        raise DataError(f"{url}: the server returned {error.code} {error.reason}; specify another mirror") from error
    except (urllib.error.URLError, ConnectionError, TimeoutError, http.client.HTTPException) as error:
        raise DataError(_interruption_message(url, partial_file, getattr(error, "reason", None) or error)) from error
    if size is not None and received < size:
        raise DataError(_interruption_message(url, partial_file, f"{received} of {size} bytes arrived"))


def _parse_resumed_and_total_size(response: http.client.HTTPResponse) -> tuple[bool, int | None]:
    """Return whether the response resumes the transfer (servers may ignore Range), and the size of the file."""
    if response.status == 206:
        match = re.search(r"/(\d+)$", response.headers.get("Content-Range") or "")
        return True, int(match[1]) if match else None
    content_length = response.headers.get("Content-Length")
    return False, int(content_length) if content_length else None


def _copy_response(response: http.client.HTTPResponse, file: BinaryIO, progress: Callable[[int], None]) -> int:
    while piece := _read_piece(response):
        file.write(piece)
        progress(file.tell())
    return file.tell()


def _read_piece(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_DOWNLOAD_PIECE_BYTES)
    except http.client.IncompleteRead as error:
        return error.partial
    # here an OSError is a network error; in file.write, a disk error
    except OSError as error:
        raise http.client.HTTPException(str(error)) from error


def _has_md5(path: Path, md5: str) -> bool:
    try:
        return path.exists() and unpacked_md5(path) == md5
    except DataError:
        return False


def _interruption_message(url: str, partial_file: Path, reason: object) -> str:
    alternative = f"copy the files by hand to {partial_file.parent}"
    if partial_file.exists() and partial_file.stat().st_size:
        return f"{url}: the transfer stopped: {reason}; repeat the command to resume it, or {alternative}"
    return f"no network: {url}: {reason}; {alternative}, or specify another mirror"
