"""Experiment as a job of a cluster: its files, its command, and the ranks of each node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError

RANK_LOSS_RESTARTS = 3
"""Maximum number of times that a job restarts itself after losses of ranks, without the scheduler."""
_MAX_NAME_LENGTH = 40
"""Maximum length of a name: schedulers append to it, and Kubernetes allows 63 characters."""


@dataclass(frozen=True)
class Submission:
    """Experiment to be run by a scheduler.

    Attributes
    ----------
    name : str
        Name of the job: lower-case letters, digits and hyphens.
    experiment_file : str
        Path of the experiment.
    ranks, nodes : int
        Number of ranks, a multiple of the number of nodes.
    settings, modules : tuple of str
        Values of `--set` and `--import`.
    rank_bounds : tuple of int, or None
        Minimum and maximum number of ranks of a job that continues after a failure.
    needs_servers : bool
        Whether its strategy needs servers; its workers are then separate jobs on the nodes.

    Raises
    ------
    ConfigError
        The ranks do not match the nodes, or the bounds do not match the ranks or the strategy.
    """

    name: str
    experiment_file: str
    ranks: int
    nodes: int
    settings: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    rank_bounds: tuple[int, int] | None = None
    needs_servers: bool = False

    def __post_init__(self) -> None:
        if self.ranks % self.nodes:
            raise ConfigError(
                f"-n {self.ranks} --nodes {self.nodes}: each node has the same number of ranks; give a multiple of"
                f" {self.nodes}, such as -n {-(-self.ranks // self.nodes) * self.nodes}"
            )
        if self.rank_bounds is not None and not self.rank_bounds[0] <= self.ranks <= self.rank_bounds[1]:
            low, high = self.rank_bounds
            raise ConfigError(f"-n {self.ranks} is not within --elastic {low}:{high}; change one of them")

        if self.rank_bounds is not None and self.needs_servers:
            raise ConfigError("--elastic: applies to a single MPI job, but the strategy needs servers; leave it out")

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of each node."""
        return self.ranks // self.nodes

    @property
    def files(self) -> list[str]:
        """Files required on a machine without this disk: the experiment, its strategy, and modules."""
        return [
            self.experiment_file,
            *filter(None, map(_strategy_file_of, self.settings)),
            *filter(_is_python_file, self.modules),
        ]

    def restart_options(self) -> list[str]:
        """Return the options of `neondist run` for restarts after failures; workers with servers need none."""
        return [] if self.needs_servers else ["--restarts", str(RANK_LOSS_RESTARTS)]

    def run_arguments(self, map_path: Callable[[str], str] = str) -> list[str]:
        """Return the arguments of `neondist` that run the experiment, with each path mapped by `map_path`."""
        words = ["run", map_path(self.experiment_file)]
        for setting in self.settings:
            strategy_file = _strategy_file_of(setting)
            words += ["--set", f"strategy={map_path(strategy_file)}" if strategy_file else setting]
        for module in self.modules:
            words += ["--import", map_path(module) if _is_python_file(module) else module]
        return words


def job_name(experiment_file: str) -> str:
    """Return a job name for a file, of characters that schedulers accept."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(experiment_file).stem.lower())[:_MAX_NAME_LENGTH].strip("-")
    return name if re.match("[a-z]", name) else f"neondist-{name}".rstrip("-")


def _strategy_file_of(setting: str) -> str:
    key, _, value = setting.partition("=")
    return value if key == "strategy" and os.path.isfile(value) else ""


def _is_python_file(module: str) -> bool:
    return module.endswith(".py")
