"""`neondist doctor`: what this machine offers, and what to mend; a broken library can neither hang nor end it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import safe_path
from ..errors import LaunchError, UserError
from ..launcher import pinning
from ..launcher.launch import ready
from ..launcher.mpirun import REMEDY, Mpirun
from ..system import threads
from ..terminal.console import emit
from ..version import installed, torch_remedy, versions

MODULES = {
    "numpy": ["numpy"],
    "mpi4py": ["mpi4py"],
    "h5py": ["h5py"],
    "PyYAML": ["yaml"],
    "threadpoolctl": ["threadpoolctl"],
    "psutil": ["psutil"],
    "grpcio": ["grpc"],
    "torch": ["torch", "neondist.torch"],
    "cupy": ["cupy"],
    "matplotlib": ["matplotlib.figure"],
}
"""Modules to import, by package."""


def add(commands: Any) -> None:
    """Say what can be typed."""
    one = commands.add_parser("doctor", help="print versions, the MPI library, backends, threads and warnings")
    one.set_defaults(command=doctor)


def doctor(arguments: argparse.Namespace) -> int:
    """Print versions, MPI, backends, threads, and warnings with their remedies."""
    warnings: list[str] = []
    _section("versions", [("python", f"{platform.python_version()} ({sys.executable})"), *_versions(warnings)])
    _section("MPI", _mpi(warnings))
    _section("backends", _backends(warnings))
    _section("threads", _threads(warnings))
    _section("warnings", [("-", text) for text in warnings] or [("none", "")])
    return 0


def _section(title: str, lines: Iterable[tuple[str, str]]) -> None:
    emit(f"{title}")
    for name, text in lines:
        emit(f"  {name:<2}{text}" if len(name) == 1 else f"  {name:<22}{text}".rstrip())


def _versions(warnings: list[str]) -> list[tuple[str, str]]:
    """Return the versions of what is installed, and whether it can be imported."""
    found = versions()
    names = [name for name in found if found[name] and name in MODULES]
    errors = failed_imports([module for name in names for module in MODULES[name]])
    lines = []
    for name, version in found.items():
        broken = next((module for module in MODULES.get(name, ()) if module in errors), "")
        lines.append((name, f"{version}, cannot be imported" if broken else version or "not installed"))
        if broken:
            warnings.append(f"`import {broken}` fails: {errors[broken]}; reinstall {name}, or remove it")
    if found["torch"] and (remedy := torch_remedy(found["torch"])) and "neondist.torch" not in errors:
        warnings.append(remedy)
    return lines


def failed_imports(modules: Sequence[str], timeout: float = 300) -> dict[str, str]:
    """Return why some modules cannot be imported, by name; processes of their own import them: some may end those."""
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    errors: dict[str, str] = {}
    left = list(modules)
    while left:
        lines = _output(safe_path.command("neondist.launcher.tell_import", *left), timeout, env).splitlines()
        told = dict(line.split("\t", 1) for line in lines if "\t" in line)
        answered = [module for module in left if module in told]
        errors |= {module: told[module] for module in answered if told[module]}
        left = left[len(answered) :]
        if left:
            errors[left.pop(0)] = f"no answer within {timeout:g} s, or it ends the process"
    return errors


def _mpi(warnings: list[str]) -> list[tuple[str, str]]:
    mpirun: Mpirun | None = None
    try:
        mpirun = ready(os.environ)
    except LaunchError as error:
        warnings.append(str(error))
    found: MPI = probe_mpi()
    if found.error and installed("mpi4py"):
        warnings.append(f"mpi4py cannot start MPI: {found.error}; {REMEDY}")
    launcher = mpirun.version.splitlines()[0] if mpirun and mpirun.version else "unknown"
    if mpirun and found.library and ("Open MPI" in found.library) != mpirun.is_open_mpi:
        warnings.append(
            f"mpi4py uses {found.library}, but mpirun is {launcher}: ranks could not communicate; put the matching"
            " mpirun first on PATH"
        )
    return [
        ("library", found.library or "none"),
        ("mpirun", f"{mpirun.path} ({launcher})" if mpirun else "not found"),
        ("GPU-aware", _gpu_aware(found)),
    ]


def _backends(warnings: list[str]) -> list[tuple[str, str]]:
    try:
        from ..backends import available, compiled

        choices, there = available(), compiled() is not None
    except (ImportError, UserError) as error:
        warnings.append(f"backends cannot be listed: {error}")
        return [("none", "")]
    taken = next((choice for choice in choices if choice.usable), None)
    lines = [(choice.name, f"{'yes' if choice.usable else 'no'}: {choice.reason}") for choice in choices]
    if not there:
        warnings.append(
            "normalisation, activations and sums take several passes over memory, because neondist was installed"
            " without a C compiler; install one, such as gcc, and reinstall neondist"
        )
    lines.append(("compiled kernels", "yes" if there else "no"))
    first = f"takes {taken.name}, the first of {', '.join(choice.name for choice in choices)}" if taken else ""
    return [*lines, ("auto", f"{first} that is usable" if taken else "finds none")]


def _threads(warnings: list[str]) -> list[tuple[str, str]]:
    cores = threads.cores()
    lines = [("cores", f"{cores} for this process, {os.cpu_count()} in the machine")]
    for name in threads.VARIABLES:
        value = os.environ.get(name)
        lines.append((name, value or "not set"))
        if value and value.isdecimal() and int(value) > cores:
            warnings.append(f"{name}={value} is more than the {cores} cores; unset it, and neondist shares them out")
    off = pinning.why_not(os.environ)
    kept = f"ranks of `neondist run -n N` are pinned to their own cores, up to {cores} threads in total"
    lines.append(("pinning", f"no: {off}" if off else f"{kept}; {pinning.SWITCH}=no switches it off"))
    lines += [("library", text) for text in _pools()]
    return lines


@dataclass(frozen=True)
class MPI:
    """The MPI library that mpi4py loads, or why it cannot."""

    library: str = ""
    error: str = ""
    cuda: bool | None = None
    """whether it says that it takes the addresses of a GPU's memory; None: it does not tell"""


def probe_mpi(timeout: float = 20) -> MPI:
    """Start MPI in a process of its own."""
    env = {"OMPI_MCA_btl": "^ofi", **os.environ, "OMPI_MCA_osc": "^ucx"}
    text = _output(safe_path.command("neondist.launcher.tell_mpi"), timeout, env)
    try:
        return MPI(**json.loads(text.splitlines()[-1]))
    except (IndexError, ValueError):
        return MPI(error=f"no answer within {timeout:g} s, or it ended the process")


def _gpu_aware(found: MPI) -> str:
    """Return whether MPI takes the addresses of a GPU's memory, and what follows."""
    if not found.library:
        return "no MPI"
    if found.cuda:
        return "yes, according to the library (CUDA); each run verifies it with a message first"
    said = "no, according to the library" if found.cuda is False else "unknown, not reported by the library"
    return f"{said}; messages from a GPU are staged through pinned host memory"


def _pools() -> list[str]:
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
