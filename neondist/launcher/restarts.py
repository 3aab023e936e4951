"""`neondist run -n N --restarts K`: a job that has lost a rank begins again from its newest whole checkpoint."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..console import say
from ..errors import DataError, LaunchError, UserError
from ..job import Job
from .launch import launch, show_loss

KEEP = 2
"""Checkpoints that stay, so that there is one if the newest is damaged."""


def settle(arguments: argparse.Namespace, job: Job | None) -> None:
    """Let -n follow from --elastic.

    Raises
    ------
    LaunchError
        The options do not fit each other.
    """
    if arguments.elastic is not None:
        low, high = arguments.elastic
        if arguments.restarts is None:
            raise LaunchError("--elastic: says on how many ranks a restart may go on; give --restarts too")
        if arguments.ranks is None:
            arguments.ranks = high
        elif not low <= arguments.ranks <= high:
            raise LaunchError(f"-n {arguments.ranks} is not within --elastic {low}:{high}; change one of them")
    if arguments.restarts is not None and (arguments.ranks is None or job is not None):
        raise LaunchError(
            "--restarts: `neondist run` starts again only ranks that it has started itself: give their number with -n,"
            " outside of an MPI job; in a job of the batch system's, put the job back into its queue"
        )


def with_restarts(arguments: argparse.Namespace, experiment: Any) -> int:
    """Start the job of `neondist run`, and start it again as often as it may if a rank, a node or mpirun is lost."""
    heard, folder, begun = arguments.signals.heard, arguments.folder, time.time()
    words = list(arguments.words)
    if experiment.checkpoint.keep < KEEP:
        words += ["--set", f"checkpoint.keep={KEEP}"]
    for number in range(1, arguments.restarts + 1):
        arguments, before = _changed(arguments, words=words, begun=begun), checkpoints(folder)
        ending = launch(arguments, heard)
        if not ending.loss or heard:
            return show_loss(ending, arguments)
        source = "as it began"
        if checkpoints(folder).items() - before.items():  # those that are gone were of the run that it replaces
            source, words = f"from {make_whole(folder).name}", resuming_words(words)
        arguments = _changed(arguments, ranks=_left(arguments, experiment))
        say(f"restart {number} of {arguments.restarts}: {ending.loss}; goes on {source}, on {arguments.ranks} ranks")
    return show_loss(launch(_changed(arguments, words=words), heard), arguments)


def checkpoints(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the checkpoints of a folder, with what changes when one is written."""
    from ..io.output import CHECKPOINTS

    stats = {path: path.stat() for name in CHECKPOINTS for path in folder.glob(name)}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def make_whole(folder: Path) -> Path:
    """Return the newest whole checkpoint of a run, which takes the place of the newest where that is damaged."""
    from ..io.checkpoint import kept_files
    from ..io.checkpoint.checksum import check
    from ..io.files import replacing
    from ..io.output import CHECKPOINT
    from ..io.regular_file import open_regular

    stages = sorted((path for path in folder.glob("pretrain_*.h5") if path.stem[9:].isdecimal()), key=_number)
    path = folder / CHECKPOINT if (folder / CHECKPOINT).exists() or not stages else stages[-1]
    for candidate in (path, *kept_files(path)):
        with suppress(DataError):
            check(candidate)
            if candidate != path:
                with open_regular(candidate) as old, replacing(path) as new:
                    shutil.copyfileobj(old, new)
            return candidate
    return path  # the ranks will say what is wrong with it


def resuming_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command that goes on with its own run."""
    found = []
    for before, word in zip(["", *words], words, strict=False):
        told = word in ("--resume", "--overwrite") or word.startswith("--resume=")
        if not told and (before, word) != ("--resume", "auto"):
            found.append(word)
    return [*found, "--resume", "auto"]


def _number(stage: Path) -> int:
    return int(stage.stem[9:])


def _left(arguments: argparse.Namespace, experiment: Any) -> int:
    """Return on how many ranks to go on: as many, or, if that is allowed, fewer, as many as the experiment can take."""
    if arguments.elastic is not None:
        for ranks in range(arguments.ranks - 1, arguments.elastic[0] - 1, -1):
            try:
                experiment.validate(ranks)
            except UserError:
                continue
            return ranks
    return int(arguments.ranks)


def _changed(arguments: argparse.Namespace, **fields: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(arguments), **fields})
