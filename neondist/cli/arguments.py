"""Command-line parser of `neondist`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from ..launcher.report import is_reporting_rank
from ..registry.names import suggest_nearest
from ..terminal.console import say
from ..version import __version__
from . import (
    bench,
    data,
    doctor,
    files,
    inference,
    init,
    launch,
    options,
    plan,
    run,
    serve,
    submit,
    sweep,
    top,
    train,
    zoo,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2; in an MPI job, only one rank prints the message."""
        if is_reporting_rank():
            say(f"error: {self.prog}: {message} (usage: {self.prog} --help)", sys.stderr)
        sys.exit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse this command's arguments; reject unknown options, which argparse would report for the root command."""
        words = list(sys.argv[1:] if args is None else args)
        # checked first: argparse would report a misspelt required option as missing
        own_words = takewhile(lambda word: word.startswith("-"), words) if self._subparsers is not None else words
        for word in own_words:
            if word.startswith("--") and word != "--" and not self._is_option(word.partition("=")[0]):
                self._reject_option(word)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown and unknown[0].startswith("-"):
            self._reject_option(unknown[0])
        if unknown:
            self.error(f"unexpected argument{'s' * (len(unknown) > 1)} {' '.join(unknown)}")
        return parsed, unknown

    def _is_option(self, name: str) -> bool:
        known_options = self._option_string_actions
        return name in known_options or (self.allow_abbrev and any(option.startswith(name) for option in known_options))

    def _reject_option(self, word: str) -> NoReturn:
        name = word.partition("=")[0]
        self.error(f"unknown option {name}{suggest_nearest(name, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        # commands without help texts are internal
        choices = [shown.dest for shown in getattr(action, "_choices_actions", ())] or list(map(str, action.choices))
        hint = suggest_nearest(str(value), choices)
        choice_names = ", ".join(map(repr, choices))
        raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {choice_names}){hint}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments and keep their text: ranks are started with the same command line."""
        words = list(sys.argv[1:] if args is None else args)
        if bad := next((word for word in words if re.fullmatch(r"--[\w-]+=--", word)), None):
            self.error(f"{bad}: -- ends the options and is not a value; write {bad[:-2]}./-- for a file of that name")
        if "--" in words:  # a launcher may append options to the command line
            position = words.index("--")
            words = [*words[:position], *map(options.escape_leading_dash, words[position + 1 :])]
        words, script = run.split_at_script(words)
        arguments = super().parse_args(train.route_to_model_command(normalise_option_words(words)), namespace)
        arguments.words, arguments.script = words, script
        if script:
            arguments.stops = arguments.watched = False
        arguments.folder = options.output_folder(arguments) if arguments.stops else None
        return arguments


def create_parser() -> argparse.ArgumentParser:
    """Return the parser; `arguments.command(arguments)` runs the command."""
    parser = _Parser(
        prog="neondist",
        description="Train convolutional networks on images that are partitioned into tiles, one per MPI rank.",
    )
    parser.add_argument("--version", action="version", version=f"neondist {__version__}")
    # stops: SIGTERM and SIGUSR1 request a stop instead of killing the command, which writes to `folder`; watched:
    # monitored for hangs by `watchdog`; restarts, elastic, lease: as in `run`; begun: start time of the job's first
    # generation
    parser.set_defaults(stops=False, watched=False, watchdog=None, restarts=None, elastic=None, lease=None, begun=None)
    # options of `launch` and of elastic hosts
    parser.set_defaults(resources=None, hosts_from=None, cooldown=None, wait=None, snapshot=None, source=None, spares=0)
    parser.set_defaults(hosts=None, generation=None)
    # options of `train`: number of servers (0: default), their `SyncPolicy`; bounds of the number of workers, source
    # of their slots, maximum wait for slots; a process with all imports, from which the job's processes are forked
    parser.set_defaults(num_ps=0, sync_policy=None, bounds=None, slots_from=None, slots_wait=None, fork_server=None)
    parser.set_defaults(nonfinite="stop")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for command in (
        run, train, launch, submit, plan, inference, sweep, bench, serve, top, doctor, data, init, files, zoo,
    ):  # fmt: skip
        command.add_parser(commands)
    return parser


def normalise_option_words(argv: Sequence[str]) -> list[str]:
    """Return the arguments in a form in which argparse does not mistake the file for a preceding option's value.

    `--set a=1 b=2` becomes `--set a=1 --set b=2`, and likewise for --vary; `--resume auto` becomes `--resume=auto`, and
    `--resume` becomes `--resume=yes`.
    """
    words: list[str] = []
    distance, option = 0, ""  # words since the last --set or --vary
    for at, word in enumerate(argv):
        if word == "--resume":
            word = f"--resume={'auto' if argv[at + 1 : at + 2] == ['auto'] else 'yes'}"
        elif word == "auto" and argv[max(0, at - 1)] == "--resume":
            continue
        if distance > 1 and re.match(r"[\w.-]+=", word) and not word.startswith("-"):
            words.append(option)
        elif distance > 1:
            distance = 0
        words.append(word)
        distance, option = (1, word) if word in ("--set", "--vary") else (distance + bool(distance), option)
    return words
