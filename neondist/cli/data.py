"""`neondist data`: download MNIST, convert a data set to HDF5, or write records."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.records import Mode, RecordIOWriter
from ..errors import ConfigError
from ..io.files import atomic_replacement
from ..terminal.console import counted, emit
from ..terminal.progress_line import ProgressLine
from . import options
from .definition import open_record_source

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


def add_parser(commands: Any) -> None:
    """Register the commands."""
    data_parser = commands.add_parser("data", help="download MNIST, convert images to HDF5, or write records")
    subparsers = data_parser.add_subparsers(required=True, metavar="WHAT")

    cmd = subparsers.add_parser("mnist", help="download the MNIST files")
    cmd.add_argument("--to", type=options.parse_path, metavar="DIR", required=True, help="output folder")
    cmd.add_argument("--mirror", metavar="URL", help="URL of the folder with the files (default: the public mirror)")
    cmd.set_defaults(command=download)

    cmd = subparsers.add_parser(
        "convert", help="convert images to an HDF5 file, from which each rank reads its tile", allow_abbrev=False
    )
    cmd.add_argument(
        "source", type=options.parse_path, nargs="+", metavar="SOURCE",
        help="a folder of images (a subfolder for each class), IMAGES.npy LABELS.npy, a .npz file, IDX files or their"
        " folder, or the binary version of CIFAR-10",
    )  # fmt: skip
    cmd.add_argument("--to", type=options.parse_path, metavar="FILE.h5", required=True, help="output file")
    cmd.add_argument(
        "--labels", type=options.parse_path, metavar="FILE.csv",
        help="labels of a folder of images, as rows of FILE,LABEL",
    )  # fmt: skip
    cmd.add_argument(
        "--maps", type=options.parse_path, metavar="DIR", help="folder of class maps with the same names as the images"
    )
    cmd.add_argument(
        "--size", nargs=2, type=options.positive_int, metavar=("HEIGHT", "WIDTH"), help="scale images to this size"
    )
    cmd.add_argument(
        "--mode", choices=["L", "RGB", "RGBA"], help="colour mode of images (default: that of the first image)"
    )
    cmd.add_argument("--compress", action="store_true", help="compress with gzip: smaller, slower to read")
    cmd.set_defaults(command=convert)

    cmd = subparsers.add_parser("records", help="write records to a CSV or a RecordIO file", allow_abbrev=False)
    cmd.add_argument("source", metavar="SOURCE", help="records, as for `neondist train --training-data`")
    cmd.add_argument(
        "--role", choices=[mode.value for mode in Mode], default="training",
        help="split to write, if the source has several",
    )  # fmt: skip
    cmd.add_argument(
        "--to", type=options.parse_as_path, metavar="FILE", required=True, help="output file, .csv or .recordio"
    )
    cmd.set_defaults(command=write_records)


def download(arguments: argparse.Namespace) -> int:
    """Download the files with a progress bar, and print their paths."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    from ..data.datasets.download import download_mnist

    mirror_option = {} if arguments.mirror is None else {"mirror": arguments.mirror}
    with progress_bars(DownloadColumn(), TransferSpeedColumn()) as progress:
        files = download_mnist(arguments.to, progress=progress, **mirror_option)
    for file in files:
        emit(file)
    emit(f"use them with dataset: !MNIST {{path: {arguments.to}}}")
    return 0


def write_records(arguments: argparse.Namespace) -> int:
    """Write the records of a source."""

    reader = open_record_source(arguments.source, Mode(arguments.role))
    with ProgressLine(len(reader), sys.stderr, "record") as progress:

        def read_records() -> Iterator[np.ndarray]:
            for number in range(len(reader)):
                yield reader.read([number])[0]
                progress.add_done_parts(1)

        if arguments.to.suffix == ".csv":
            with atomic_replacement(arguments.to) as file:
                for record in read_records():
                    np.savetxt(file, record.reshape(1, -1), fmt="%.17g", delimiter=",")
        elif arguments.to.suffix == ".recordio":
            with RecordIOWriter(arguments.to) as records:
                for record in read_records():
                    records.write(record)
        else:
            raise ConfigError(f"--to {arguments.to}: the name must end in .csv or .recordio")
    emit(f"{arguments.to}: {counted(len(reader), 'record')}")
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """Convert the sources, reporting progress; print the shapes, and the `dataset` field that reads the file."""
    from ..data.convert import convert, open_split_sources
    from ..formats.image_loader import ImageLoader

    loader = ImageLoader(arguments.mode, tuple(arguments.size) if arguments.size else None)
    labels, maps = (None if path is None else Path(path) for path in (arguments.labels, arguments.maps))
    sources = open_split_sources(arguments.source, loader, labels, maps)
    target = Path(os.path.expanduser(arguments.to))
    written_by_split = dict.fromkeys(sources, 0)
    with ProgressLine(sum(source.count for source in sources.values()), sys.stderr, "sample") as progress:

        def report_progress(name: str, done: int, total: int) -> None:
            progress.add_done_parts(done - written_by_split[name])
            written_by_split[name] = done

        shapes = convert(sources, target, arguments.compress, report_progress)
    for source in sources.values():
        for note in source.messages:
            emit(note)
    for name, shape in shapes.items():
        emit(f"{name}: {counted(shape[0], 'sample')} of {' x '.join(map(str, shape[1:]))}")
    emit(f"use it with dataset: !HDF5Dataset {{path: {arguments.to}}}")
    return 0


@contextmanager
def progress_bars(*columns: ProgressColumn) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar per name, with extra columns, inside the block; yield the function that updates the bars."""
    from rich.progress import BarColumn, Progress, TextColumn

    from ..terminal.rich_console import Console

    task_ids: dict[str, Any] = {}
    with Progress(TextColumn("{task.description}", markup=False), BarColumn(), *columns, console=Console()) as display:

        def update_bar(name: str, done: int, total: int | None) -> None:
            if name not in task_ids:
                task_ids[name] = display.add_task(name, total=total)
            display.update(task_ids[name], completed=done, total=total)

        yield update_bar
