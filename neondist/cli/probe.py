"""Looking at libraries without letting a broken one hang or end this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .. import safe_path
from .mpirun import Mpirun

_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x")}


@dataclass(frozen=True)
class MPI:
    """The MPI library that mpi4py loads, or why it cannot."""

    library: str = ""
    error: str = ""


def version(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed as a package" if importlib.util.find_spec(name) else None


def probe_mpi(timeout: float = 20) -> MPI:
    """Start MPI in a process of its own."""
    env = {"OMPI_MCA_btl": "^ofi", **os.environ, "OMPI_MCA_osc": "^ucx"}
    text = _output(safe_path.command("neondist.cli.tell_mpi"), timeout, env)
    try:
        return MPI(**json.loads(text.splitlines()[-1]))
    except (IndexError, ValueError):
        return MPI(error=f"no answer within {timeout:g} s, or it ended the process")


def gpu_aware(library: str, mpirun: Mpirun | None) -> str:
    """Return whether MPI takes GPU pointers: 'yes', 'no' or 'unknown', and how that is known."""
    if "Open MPI" not in library or mpirun is None:
        return "unknown (only Open MPI tells)" if library else "no MPI"
    info = shutil.which("ompi_info", path=str(Path(mpirun.path).parent)) or shutil.which("ompi_info")
    if info is None:
        return "unknown (ompi_info not found)"
    lines = _output([info, "--parsable", "--all"], 20, dict(os.environ)).splitlines()
    values = [line.rpartition(":")[2] for line in lines if "built_with_cuda_support:value:" in line]
    kinds = ["CUDA"] if "true" in values else []
    kinds += ["ROCm"] if any("built_with_rocm_support:value:true" in line for line in lines) else []
    return f"yes ({', '.join(kinds)})" if kinds else "no (ompi_info); GPU arrays go through host memory"


def pools() -> list[str]:
    """Return the thread pools of the libraries that NumPy has loaded, in words."""
    try:
        import numpy  # noqa: F401
        from threadpoolctl import threadpool_info
    except ImportError as error:
        return [str(error)]
    return [f"{p['internal_api']} {p['version'] or ''}: {p['num_threads']} threads" for p in threadpool_info()]


def _output(command: list[str], timeout: float, env: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=env, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
