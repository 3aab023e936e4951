"""An experiment as a job of a cluster: its files, its words, and the ranks of each node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError

RESTARTS = 3
"""Losses of ranks that a job survives without help of the scheduler."""
_LONGEST = 40
"""Characters of a name: schedulers append to it, and 63 are the limit of Kubernetes."""


@dataclass(frozen=True)
class Submission:
    """An experiment to be run by a scheduler.

    Attributes
    ----------
    name : str
        Of the job: lower-case letters, digits and hyphens.
    file : str
        Path of the experiment.
    ranks, nodes : int
        Each node has as many ranks as any other.
    settings, modules : tuple of str
        Values of `--set` and `--import`.
    elastic : tuple of int, or None
        The fewest and the most ranks of a job that goes on after a loss.
    needs_servers : bool
        Whether its strategy does: then its workers are jobs of their own on the nodes.

    Raises
    ------
    ConfigError
        The ranks do not fit the nodes, or the bounds the ranks or the strategy.
    """

    name: str
    file: str
    ranks: int
    nodes: int
    settings: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    elastic: tuple[int, int] | None = None
    needs_servers: bool = False

    def __post_init__(self) -> None:
        if self.ranks % self.nodes:
            raise ConfigError(
                f"-n {self.ranks} --nodes {self.nodes}: each node has the same number of ranks; give a multiple of"
                f" {self.nodes}, such as -n {-(-self.ranks // self.nodes) * self.nodes}"
            )
        if self.elastic is not None and not self.elastic[0] <= self.ranks <= self.elastic[1]:
            low, high = self.elastic
            raise ConfigError(f"-n {self.ranks} is not within --elastic {low}:{high}; change one of them")

        if self.elastic is not None and self.needs_servers:
            raise ConfigError("--elastic: applies to a single MPI job, but the strategy needs servers; leave it out")

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of each node."""
        return self.ranks // self.nodes

    @property
    def files(self) -> list[str]:
        """Paths of the experiment, of its strategy, and of modules: what a machine without this disk needs."""
        return [self.file, *filter(None, map(_strategy_file, self.settings)), *filter(_is_file, self.modules)]

    def restart_words(self) -> list[str]:
        """Return the words of `neondist run` for what it does after losses; workers beside servers need none."""
        return [] if self.needs_servers else ["--restarts", str(RESTARTS)]

    def run_words(self, place: Callable[[str], str] = str) -> list[str]:
        """Return the words of `neondist` that run the experiment, with each file at the path that `place` gives."""
        words = ["run", place(self.file)]
        for setting in self.settings:
            file = _strategy_file(setting)
            words += ["--set", f"strategy={place(file)}" if file else setting]
        for module in self.modules:
            words += ["--import", place(module) if _is_file(module) else module]
        return words


def job_name(file: str) -> str:
    """Return a name for the job of a file, of the characters that schedulers take."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(file).stem.lower())[:_LONGEST].strip("-")
    return name if re.match("[a-z]", name) else f"neondist-{name}".rstrip("-")


def _strategy_file(setting: str) -> str:
    key, _, value = setting.partition("=")
    return value if key == "strategy" and os.path.isfile(value) else ""


def _is_file(module: str) -> bool:
    return module.endswith(".py")
