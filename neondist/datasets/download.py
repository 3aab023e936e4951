"""The four MNIST files from their public mirror."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DataError
from .mnist_files import ALL
from .transfer import Progress, fetch

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"


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
        Called as progress(file name, bytes there, bytes in all or None); see `console_progress`.
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
            fetch(url, target, file.md5, progress or _silent, timeout)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror or error}); choose another folder") from error
    except ValueError as error:
        raise DataError(f"mirror: {mirror!r} is not a URL ({error}); give one such as {MIRROR}") from error
    return targets


@contextmanager
def console_progress() -> Iterator[Progress]:
    """Show a bar per file on the console while open; yields what `download_mnist` takes as `progress`."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    tasks = {}
    with Bars(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bars:

        def show(name: str, there: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=there, total=total)

        yield show


def _silent(name: str, there: int, total: int | None) -> None:
    pass
