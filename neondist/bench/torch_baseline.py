"""Process that trains a model's network in PyTorch, for comparison."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .. import safe_path
from ..config import dump
from ..errors import ConfigError, LaunchError
from ..models import Model
from ..system.threads import THREAD_COUNT_VARIABLES

LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "SLURM_")


class TorchBaseline:
    """A process that trains a model's network in PyTorch; it is idle between calls.

    Parameters
    ----------
    model : Model
    state : dict of name to array
        Whole arrays of the model.
    trained : sequence of str
        Names of the trained arrays.
    x, targets : ndarray
        The whole batch: (N, *spatial, C), and labels.
    threads : int
    settings : dict, optional
        Additional environment variables.

    Raises
    ------
    ConfigError
        Part of the model has no counterpart in PyTorch; raised by any method.
    LaunchError
        The process has ended; raised by any method.
    """

    def __init__(
        self,
        model: Model,
        state: Mapping[str, np.ndarray],
        trained: Sequence[str],
        x: np.ndarray,
        targets: np.ndarray,
        threads: int,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.state = state
        self.folder = TemporaryDirectory(prefix="neondist-bench-")
        self.folder_path = Path(self.folder.name)
        (self.folder_path / "model.yaml").write_text(dump(model), encoding="utf-8")
        (self.folder_path / "trained.json").write_text(json.dumps(list(trained)), encoding="utf-8")
        self._write("weights.npz", state)
        self._write("batch.npz", {"x": np.ascontiguousarray(x), "targets": targets})
        self.process = subprocess.Popen(
            safe_path.python_command("neondist.bench.torch_twin", self.folder_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_baseline_environment(os.environ, threads) | dict(settings or {}),
        )
        _use_all_cores(self.process.pid, threads)

    def compare_gradients(self, gradients: Mapping[str, np.ndarray]) -> tuple[float, float, str]:
        """Return the loss for the initial weights, without dropout, and the error and name of the worst gradient."""
        loss, worst, name = self._request(
            "compare_gradients", self._write("gradients.npz", {**self.state, **gradients})
        )
        return loss, worst, name

    def compile(self) -> str:
        """Use torch.compile from now on; return the error message, or ''."""
        return str(self._request("compile"))

    def time_steps(self, steps: int) -> tuple[list[float], int, int]:
        """Return the seconds of each step, and the peak memory in bytes: beyond that of an empty process, and total."""
        seconds, above, peak = self._request("time_steps", steps)
        return seconds, above, peak

    def close(self) -> None:
        """End the process."""
        self.process.communicate()  # the process ends when its input is closed
        self.folder.cleanup()

    def _write(self, name: str, arrays: Mapping[str, np.ndarray]) -> str:
        file = str(self.folder_path / name)
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return file

    def _request(self, *request: Any) -> Any:
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
            raise LaunchError(f"PyTorch's process ended with exit code {code}; see its output above")
        reply = json.loads(answer)
        if "error" in reply:
            raise ConfigError(f"network in PyTorch: {reply['error']}")
        return reply["made"]


def _use_all_cores(process: int, threads: int) -> None:
    """Let a process use all cores that the ranks share, even if this rank is bound to fewer."""
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) < threads:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process, os.sched_getaffinity(os.getppid()))


def _baseline_environment(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return an environment with this number of threads, and without the MPI job's variables."""
    kept_variables = {name: value for name, value in env.items() if not name.startswith(LAUNCHER_PREFIXES)}
    return kept_variables | dict.fromkeys(THREAD_COUNT_VARIABLES, str(threads))
