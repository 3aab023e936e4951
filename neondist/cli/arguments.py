"""Command-line parser of `neondist`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..launcher.report import speaks
from ..terminal.console import say
from . import apply, bench, data, doctor, files, launch, options, plan, run, serve, submit, sweep, top, train, zoo


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2; in an MPI job one rank says why."""
        if speaks():
            say(f"error: {self.prog}: {message} (usage: {self.prog} --help)", sys.stderr)
        sys.exit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Keep the words beside what they mean: ranks are started with the same ones."""
        words = list(sys.argv[1:] if args is None else args)
        if odd := next((word for word in words if re.fullmatch(r"--[\w-]+=--", word)), None):
            self.error(f"{odd}: -- ends the options and is not a value; write {odd[:-2]}./-- for a file of that name")
        if "--" in words:  # a launcher may append options to these words
            at = words.index("--")
            words = [*words[:at], *map(options.word, words[at + 1 :])]
        words, script = run.split_script(words)
        found = super().parse_args(train.of_model(plain(words)), namespace)
        found.words, found.script = words, script
        if script:
            found.stops = found.watched = False
        found.folder = options.folder(found) if found.stops else None
        return found


def parser() -> argparse.ArgumentParser:
    """Return the parser; `arguments.command(arguments)` runs what was asked for."""
    every = _Parser(prog="neondist", description="Train convolutional networks whose samples are split over MPI ranks.")
    # stops: SIGTERM and SIGUSR1 ask it to stop, instead of ending it, and it writes to `folder`; watched: it must not
    # hang; watchdog: who watches; restarts, elastic, lease: as `run` has them; begun: when the job first began
    every.set_defaults(stops=False, watched=False, watchdog=None, restarts=None, elastic=None, lease=None, begun=None)
    # of `launch`, and of hosts that come and go
    every.set_defaults(resources=None, hosts_from=None, cool_down=None, wait=None, snapshot=None, source=None, spares=0)
    every.set_defaults(hosts=None, generation=None)
    # of `train`: servers, 0 for a default, and how they update; bounds of the number of workers, where their slots come
    # from, the wait; a process with all imports, from which those of the job are forked
    every.set_defaults(num_ps=0, update_rule=None, bounds=None, slots_from=None, slots_wait=None, fork_server=None)
    commands = every.add_subparsers(required=True, metavar="COMMAND")

    for command in (run, train, launch, submit, plan, apply, sweep, bench, serve, top, doctor, data, files, zoo):
        command.add(commands)
    return every


def plain(argv: Sequence[str]) -> list[str]:
    """Return the words as argparse needs them, which would take the file as the value of an option in front of it.

    `--set a=1 b=2` becomes `--set a=1 --set b=2`, and so with --vary; `--resume auto` `--resume=auto`, and `--resume`
    `--resume=yes`.
    """
    words: list[str] = []
    after, option = 0, ""  # how many words ago the last --set or --vary was
    for at, word in enumerate(argv):
        if word == "--resume":
            word = f"--resume={'auto' if argv[at + 1 : at + 2] == ['auto'] else 'yes'}"
        elif word == "auto" and argv[max(0, at - 1)] == "--resume":
            continue
        if after > 1 and re.match(r"[\w.-]+=", word) and not word.startswith("-"):
            words.append(option)
        elif after > 1:
            after = 0
        words.append(word)
        after, option = (1, word) if word in ("--set", "--vary") else (after + bool(after), option)
    return words
