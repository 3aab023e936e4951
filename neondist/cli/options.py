"""Options that several commands share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from pathlib import Path

from ..terminal.console import say, visible

RANKS = "ranks to start with mpirun (default 1); inside an MPI job the job's size is used"


def experiment(one: argparse.ArgumentParser, ranks_help: str = RANKS, required: bool = True) -> None:
    """Add FILE.yaml, -n, --set, --memory, --strategy and --import."""
    one.add_argument("file", type=path, metavar="FILE.yaml", nargs=None if required else "?", help="the experiment")
    ranks(one, ranks_help)
    one.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY.PATH=VALUE",
        help="change fields of the file, e.g. --set epochs=2 model.layers.0.kernel_size=3",
    )  # fmt: skip
    one.add_argument(
        "--memory", dest="settings", action="append", type="memory={}".format, metavar="SIZE",
        help="memory limit for all processes on a machine, such as 8GiB; larger steps are computed strip by strip",
    )  # fmt: skip
    one.add_argument(
        "--strategy", dest="settings", action="append", type="strategy={}".format, metavar="NAME|FILE",
        help="gradient synchronisation strategy, such as ShardedOptimizer, or the strategy.yaml of another run",
    )  # fmt: skip
    one.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="a module or .py file that registers your own classes",
    )  # fmt: skip


def ranks(one: argparse.ArgumentParser, text: str = RANKS) -> None:
    """Add -n and --force."""
    one.add_argument("-n", dest="ranks", type=positive, metavar="RANKS", help=text)
    one.add_argument(
        "--force",
        action="store_true",
        help="allow more ranks than cores, or more than the image can be divided among",
    )


def rounds(one: argparse.ArgumentParser, timed: str, steps: int) -> None:
    """Add --rounds and --steps of a benchmark; `timed`: its sides and a verb, for the help text."""
    one.add_argument(
        "--rounds", type=positive, default=3, metavar="R", help=f"rounds in which {timed} timed (default 3)"
    )
    one.add_argument(
        "--steps", type=positive, default=steps, metavar="K", help=f"steps timed in each round (default {steps})"
    )


def virtual(one: argparse.ArgumentParser, many: bool = False) -> None:
    """Add --virtual; `many`: one number after the other."""
    one.add_argument(
        "--virtual", type=counts if many else positive, metavar="1,4,16" if many else "P",
        help=f"{'1, 4, 16' if many else 'P'} virtual ranks in this process: slow, but with the same results",
    )  # fmt: skip


def folder(arguments: argparse.Namespace, kind: str = "") -> Path:
    """Return where the command writes: --output, or a folder of runs/ with the file's name and the kind of command."""
    return Path(arguments.output or Path("runs", Path(arguments.file).stem + (kind and f"-{kind}")))


def path(text: str) -> str:
    """Read a path; '~' is the home folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path; expected one such as ./name")
    return os.path.expanduser(text)


def file(text: str) -> Path:
    """Read a path, as `path`."""
    return Path(path(text))


def word(text: str) -> str:
    """Return a path as a word of a command, which does not begin like an option."""
    return os.path.join(os.curdir, text) if text.startswith("-") else text


def positive(text: str) -> int:
    """Read a number of 1 or more."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"invalid value '{text}'; expected an integer of at least 1")
    return number


def not_negative(text: str) -> int:
    """Read a whole number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid value '{text}'; expected an integer of at least 0")
    return int(text)


def positive_number(text: str) -> float:
    """Read a finite number above 0."""
    (number,) = numbers(text, 1)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"invalid value '{text}'; expected a number above 0")
    return number


def numbers(text: str, most: int = 1 << 16) -> list[float]:
    """Read '0.485,0.456,0.406', finite numbers."""
    try:
        found = [float(word) for word in text.split(",", most - 1)]
    except ValueError:
        found = []
    if not found or not all(map(math.isfinite, found)):
        raise argparse.ArgumentTypeError(f"invalid value '{text}'; expected one number, or several such as 0.5,0.4,0.3")
    return found


def counts(text: str) -> list[int]:
    """Read '1,2,4'."""
    return [positive(word) for word in text.split(",")]


def print_written(files: Iterable[Path]) -> None:
    """Name the files that a command has written."""
    say("\n  ".join(["written:", *(visible(str(file), keep="") for file in files)]))
