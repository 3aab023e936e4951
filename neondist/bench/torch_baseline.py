"""The process in which the same network trains in PyTorch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .. import safe_path
from ..errors import LaunchError
from ..threads import VARIABLES
from .network import Network, write

LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "SLURM_")


class TorchBaseline:
    """PyTorch's side; between the calls it sleeps.

    Parameters
    ----------
    network : Network
    x, targets : ndarray
        The whole batch: (N, *spatial, C), and labels.
    threads : int

    Raises
    ------
    LaunchError
        Its process ended.
    """

    def __init__(self, network: Network, x: np.ndarray, targets: np.ndarray, threads: int) -> None:
        self.folder = TemporaryDirectory(prefix="neondist-bench-")
        write(Path(self.folder.name), network, (np.ascontiguousarray(x), targets))
        self.process = subprocess.Popen(
            safe_path.command("neondist.bench.torch_twin", self.folder.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(os.environ, threads),
        )
        _unbind(self.process.pid, threads)

    def check(self) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss and all gradients of the first weights, without dropout."""
        file = str(Path(self.folder.name, "gradients.npz"))
        loss: float = self._ask("check", file)
        with np.load(file) as gradients:
            return loss, dict(gradients)

    def time(self, steps: int) -> tuple[float, int]:
        """Return the seconds of so many steps, and the peak of memory in bytes."""
        seconds, peak = self._ask("time", steps)
        return seconds, peak

    def close(self) -> None:
        """End the process."""
        self.process.communicate()  # it ends with its input
        self.folder.cleanup()

    def _ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self.process.wait()
            raise LaunchError(f"--against torch: PyTorch's process ended with code {code}; what it said is above")
        return json.loads(answer)


def _unbind(process: int, threads: int) -> None:
    """Let a new process of a rank that is bound to fewer cores run on all of those that the ranks share."""
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) < threads:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process, os.sched_getaffinity(os.getppid()))


def _environment(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment: all the threads that the ranks have together, and nothing of their MPI job."""
    kept = {name: value for name, value in env.items() if not name.startswith(LAUNCHERS)}
    return kept | dict.fromkeys(VARIABLES, str(threads))
