"""Options shared by several commands."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO

from ..terminal.console import escape_invisible, say

RANKS_HELP = "number of ranks to start with mpirun (default 1); inside an MPI job, taken from the job"
MAX_RANKS = 1_000_000
"""Maximum number of ranks of a plan: more than any machine has, but few enough to list."""
MAX_VIRTUAL_RANKS = 4096
"""Maximum number of virtual ranks, each of which is a thread."""
MAX_INTEGER = 2**31 - 1
"""Maximum value of all integer options; arrays, HDF5 and MPI would reject larger values with various errors."""
IMPORT_HELP = "a module or .py file that defines custom classes; may be repeated"


def add_experiment_options(cmd: argparse.ArgumentParser, ranks_help: str = RANKS_HELP, required: bool = True) -> None:
    """Add FILE.yaml, -n, --force, --set, --memory, --strategy and --import."""
    cmd.add_argument(
        "file", type=parse_path, metavar="FILE.yaml", nargs=None if required else "?", help="the experiment"
    )
    add_rank_options(cmd, ranks_help)
    cmd.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY.PATH=VALUE",
        help="set fields of the file, such as --set epochs=2 model.layers.0.kernel_size=3",
    )  # fmt: skip
    cmd.add_argument(
        "--memory", dest="settings", action="append", type="memory={}".format, metavar="SIZE",
        help="total memory limit of all ranks on a machine, such as 8GiB; larger steps are processed strip by strip",
    )  # fmt: skip
    cmd.add_argument(
        "--strategy", dest="settings", action="append", type="strategy={}".format, metavar="NAME|FILE",
        help="strategy for gradients and updates, such as ShardedOptimizer, or the strategy.yaml of another run",
    )  # fmt: skip
    cmd.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help=IMPORT_HELP,
    )  # fmt: skip


def add_rank_options(cmd: argparse.ArgumentParser, ranks_help: str = RANKS_HELP) -> None:
    """Add -n and --force."""
    cmd.add_argument("-n", dest="ranks", type=rank_count, metavar="RANKS", help=ranks_help)
    cmd.add_argument(
        "--force", action="store_true",
        help="allow more than 16 ranks per core, more ranks than fit in memory, or more ranks than image cells",
    )  # fmt: skip


def add_round_options(cmd: argparse.ArgumentParser, timed_text: str, steps: int) -> None:
    """Add --rounds and --steps of a benchmark; `timed_text`, such as 'all variants are', is part of the help text."""
    add_count_option(cmd, "--rounds", "R", f"number of rounds in which {timed_text} timed", 3)
    add_count_option(cmd, "--steps", "K", "number of steps timed in each round", steps)


def add_count_option(
    cmd: argparse.ArgumentParser, name: str, metavar: str, text: str, default: int, lowest: int = 1
) -> None:
    """Add an option for an integer of at least `lowest`; its help is `text` and the default."""
    parse = partial(nonnegative_int, lowest=lowest)
    cmd.add_argument(name, type=parse, default=default, metavar=metavar, help=f"{text} (default {default})")


def add_output_option(cmd: argparse.ArgumentParser, kind: str = "", text: str = "output folder") -> None:
    """Add --output, whose default is that of `output_folder`; `text` describes the folder."""
    text += f" (default runs/NAME OF THE FILE{kind and f'-{kind}'})"
    cmd.add_argument("--output", type=parse_path, metavar="DIR", help=text)


def add_virtual_option(cmd: argparse.ArgumentParser, as_list: bool = False) -> None:
    """Add --virtual; `as_list`: a list of numbers, run in sequence."""
    cmd.add_argument(
        "--virtual", metavar="1,4,16" if as_list else "P",
        type=partial(parse_rank_counts if as_list else rank_count, limit=MAX_VIRTUAL_RANKS),
        help=f"run {'1, 4, 16' if as_list else 'P'} virtual ranks in this process instead of -n: slow, with identical"
             " results",
    )  # fmt: skip


def output_folder(arguments: argparse.Namespace, kind: str = "") -> Path:
    """Return the output folder: --output, or a folder in runs/ named after the file and the kind of command."""
    return Path(arguments.output or Path("runs", Path(arguments.file).stem + (kind and f"-{kind}")))


def parse_path(text: str) -> str:
    """Parse a path; '~' is the home folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path; expected one such as ./name")
    return os.path.expanduser(text)


def parse_as_path(text: str) -> Path:
    """Parse a path as a pathlib.Path."""
    return Path(parse_path(text))


def escape_leading_dash(text: str) -> str:
    """Return a path as a command-line word that is not mistaken for an option."""
    return os.path.join(os.curdir, text) if text.startswith("-") else text


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    return nonnegative_int(text, lowest=1)


def rank_count(text: str, limit: int = MAX_RANKS) -> int:
    """Parse a number of ranks, at most `limit`."""
    return nonnegative_int(text, 1, limit, "ranks are too many")


def parse_rank_counts(text: str, limit: int = MAX_RANKS) -> list[int]:
    """Parse numbers of ranks such as '1,4,16', each at most `limit`."""
    return [rank_count(word, limit) for word in text.split(",")]


def nonnegative_int(text: str, lowest: int = 0, limit: int = MAX_INTEGER, excess_error: str = "is too large") -> int:
    """Parse an integer from `lowest` to `limit`; `excess_error` is the error for a larger one."""
    if not re.fullmatch("[0-9]{1,4000}", text) or int(text) < lowest:
        raise argparse.ArgumentTypeError(f"invalid value '{text}'; expected an integer of at least {lowest}")
    if int(text) > limit:
        raise argparse.ArgumentTypeError(f"{text:.30} {excess_error}; give at most {limit}")
    return int(text)


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    (number,) = parse_floats(text, 1)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"invalid value '{text}'; expected a number above 0")
    return number


def parse_floats(text: str, max_count: int = 1 << 16) -> list[float]:
    """Parse finite numbers such as '0.485,0.456,0.406'."""
    try:
        values = [float(word) for word in text.split(",", max_count - 1)]
    except ValueError:
        values = []
    if not values or not all(map(math.isfinite, values)):
        raise argparse.ArgumentTypeError(f"invalid value '{text}'; expected one number, or several such as 0.5,0.4,0.3")
    return values


def positive_ints(text: str) -> list[int]:
    """Parse integers such as '1,2,4'."""
    return [positive_int(word) for word in text.split(",")]


def print_written(files: Iterable[str | Path | None], file: IO[str] | None = None) -> None:
    """Print the paths of the files that a command has written, if any, to `file` (default stdout); skip None."""
    if paths := [escape_invisible(str(path), keep="") for path in files if path is not None]:
        say("\n  ".join(["written:", *paths]), file)
