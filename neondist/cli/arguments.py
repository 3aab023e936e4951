"""What can be typed after `neondist`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import apply, bench, guards, options, restarts, virtual
from .check import check
from .data import add_data
from .doctor import doctor
from .report import speaks
from .run import run


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2; in an MPI job one rank says why."""
        if speaks():
            super().error(message)
        sys.exit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Keep the words beside what they mean: ranks are started with the same ones."""
        found = super().parse_args(args, namespace)
        found.words = list(sys.argv[1:] if args is None else args)
        return found


def parser() -> argparse.ArgumentParser:
    """Return the parser; `arguments.command(arguments)` runs what was asked for."""
    top = _Parser(prog="neondist", description="Train convolutional networks whose samples are split over MPI ranks.")
    # stops: SIGTERM and SIGUSR1 ask it to stop, instead of ending it; watched: it must not hang; watchdog: who watches;
    # restarts, elastic: as `run` has them; begun: when the job began for the first time
    top.set_defaults(stops=False, watched=False, watchdog=None, restarts=None, elastic=None, begun=None)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("run", help="train what a YAML file describes", allow_abbrev=False)
    options.experiment(one)
    one.add_argument("--output", metavar="DIR", help="where to write (default runs/NAME OF THE FILE)")
    virtual.option(one)
    one.add_argument(
        "--resume", nargs="?", default=False, const=True, type=_resume, metavar="auto",
        help="continue from the checkpoint in the output directory; with auto, or begin where there is none",
    )  # fmt: skip
    one.add_argument("--overwrite", action="store_true", help="replace the run that is in the output directory")
    one.add_argument("--init-from", metavar="FILE", help="a checkpoint whose weights are the first ones, by name")
    guards.add(one)
    restarts.add(one)
    one.set_defaults(command=run, stops=True, watched=True)

    one = commands.add_parser("check", help="validate a YAML file and print every layer's plan", allow_abbrev=False)
    options.experiment(one, "ranks to plan for (default 1); nothing is started")
    one.set_defaults(command=check)

    apply.add(commands)
    bench.add(commands)

    one = commands.add_parser("doctor", help="print versions, the MPI library, backends, threads and warnings")
    one.set_defaults(command=doctor)

    add_data(commands)
    return top


def _resume(text: str) -> bool | str:
    if text not in ("yes", "auto"):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be used; give --resume or --resume auto")
    return text == "yes" or text


def spread(argv: Sequence[str]) -> list[str]:
    """Return the words as argparse needs them, which would take the file as the value of an option in front of it.

    `--set a=1 b=2` becomes `--set a=1 --set b=2`, `--resume auto` `--resume=auto`, and `--resume` `--resume=yes`.
    """
    words: list[str] = []
    after = 0  # how many words ago the last --set was
    for at, word in enumerate(argv):
        if word == "--resume":
            word = f"--resume={'auto' if argv[at + 1 : at + 2] == ['auto'] else 'yes'}"
        elif word == "auto" and argv[max(0, at - 1)] == "--resume":
            continue
        if after > 1 and re.match(r"[\w.-]+=", word) and not word.startswith("-"):
            words.append("--set")
        elif after > 1:
            after = 0
        words.append(word)
        after = 1 if word == "--set" else after + bool(after)
    return words
