"""`neondist doctor`: report on this machine, with remedies; robust against libraries that hang or crash."""

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
from ..launcher.launch import require_mpirun
from ..launcher.mpirun import INSTALL_REMEDY, Mpirun
from ..system import threads
from ..terminal.console import counted, emit
from ..version import get_versions, installed_version, unsupported_torch_remedy

MODULES_BY_PACKAGE = {
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


def add_parser(commands: Any) -> None:
    """Register the command."""
    cmd = commands.add_parser("doctor", help="print versions, the MPI library, backends, threads and warnings")
    cmd.set_defaults(command=print_diagnostics)


def print_diagnostics(arguments: argparse.Namespace) -> int:
    """Print versions, MPI, backends, threads, and warnings with their remedies."""
    warnings: list[str] = []
    _print_section(
        "versions", [("python", f"{platform.python_version()} ({sys.executable})"), *_check_packages(warnings)]
    )
    _print_section("MPI", _check_mpi(warnings))
    _print_section("backends", _check_backends(warnings))
    _print_section("threads", _check_threads(warnings))
    _print_section("warnings", [("-", text) for text in warnings] or [("none", "")])
    return 0


def _print_section(title: str, lines: Iterable[tuple[str, str]]) -> None:
    emit(f"{title}")
    for name, text in lines:
        emit(f"  {name:<2}{text}" if len(name) == 1 else f"  {name:<22}{text}".rstrip())


def _check_packages(warnings: list[str]) -> list[tuple[str, str]]:
    packages = get_versions()
    installed = [name for name in packages if packages[name] and name in MODULES_BY_PACKAGE]
    errors = failed_imports([module for name in installed for module in MODULES_BY_PACKAGE[name]])
    lines = []
    for name, version in packages.items():
        broken_module = next((module for module in MODULES_BY_PACKAGE.get(name, ()) if module in errors), "")
        lines.append((name, f"{version}, cannot be imported" if broken_module else version or "not installed"))
        if broken_module:
            warnings.append(f"`import {broken_module}` fails: {errors[broken_module]}; reinstall {name}, or remove it")
    if packages["torch"] and (remedy := unsupported_torch_remedy(packages["torch"])) and "neondist.torch" not in errors:
        warnings.append(remedy)
    return lines


def failed_imports(modules: Sequence[str], timeout: float = 300) -> dict[str, str]:
    """Return import errors by module; imports run in child processes, because a broken library may crash."""
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    errors: dict[str, str] = {}
    remaining_modules = list(modules)
    while remaining_modules:
        lines = _run_for_output(
            safe_path.python_command("neondist.launcher.import_probe", *remaining_modules), timeout, env
        ).splitlines()
        reported_errors = dict(line.split("\t", 1) for line in lines if "\t" in line)
        reported_modules = [module for module in remaining_modules if module in reported_errors]
        errors |= {module: reported_errors[module] for module in reported_modules if reported_errors[module]}
        remaining_modules = remaining_modules[len(reported_modules) :]
        if remaining_modules:
            errors[remaining_modules.pop(0)] = f"the import takes more than {timeout:g} s, or terminates the process"
    return errors


def _check_mpi(warnings: list[str]) -> list[tuple[str, str]]:
    mpirun: Mpirun | None = None
    try:
        mpirun = require_mpirun(os.environ)
    except LaunchError as error:
        warnings.append(str(error))
    mpi: MPILibrary = probe_mpi()
    if mpi.error and installed_version("mpi4py"):
        warnings.append(f"mpi4py cannot start MPI: {mpi.error}; {INSTALL_REMEDY}")
    launcher = mpirun.version.splitlines()[0] if mpirun and mpirun.version else "unknown"
    if mpirun and mpi.library and ("Open MPI" in mpi.library) != mpirun.is_open_mpi:
        warnings.append(
            f"mpi4py uses {mpi.library}, but mpirun is {launcher}: ranks could not communicate; put the matching"
            " mpirun first on PATH"
        )
    return [
        ("library", mpi.library or "none"),
        ("mpirun", f"{mpirun.path} ({launcher})" if mpirun else "not found"),
        ("GPU-aware", _describe_gpu_support(mpi)),
    ]


def _check_backends(warnings: list[str]) -> list[tuple[str, str]]:
    try:
        from ..backends import available, load_compiled_kernels

        choices, is_compiled = available(), load_compiled_kernels() is not None
    except (ImportError, UserError) as error:
        warnings.append(f"backends cannot be listed: {error}")
        return [("none", "")]
    selected = next((choice for choice in choices if choice.usable), None)
    lines = [(choice.name, f"{'yes' if choice.usable else 'no'}: {choice.reason}") for choice in choices]
    if not is_compiled:
        warnings.append(
            "normalisation, activations and sums take several passes over memory, because neondist was installed"
            " without a C compiler; install one, such as gcc, and reinstall neondist"
        )
    lines.append(("compiled kernels", "yes" if is_compiled else "no"))
    names = ", ".join(choice.name for choice in choices)
    choice_text = f"selects {selected.name}, the first usable of {names}" if selected else "finds none"
    return [*lines, ("auto", choice_text)]


def _check_threads(warnings: list[str]) -> list[tuple[str, str]]:
    cores = threads.count_cores()
    lines = [("cores", f"{cores} for this process, {os.cpu_count()} in the machine")]
    for name in threads.THREAD_COUNT_VARIABLES:
        setting = os.environ.get(name)
        lines.append((name, setting or "not set"))
        if setting and setting.isdecimal() and int(setting) > cores:
            warnings.append(
                f"{name}={setting} is more than {counted(cores, 'core')}; unset it to let neondist divide the cores"
            )
    reason = pinning.unpinned_reason(os.environ)
    condition = f"if they have at most {counted(cores, 'thread')} in total"
    note = f"ranks of `neondist run -n N` are pinned to their own cores {condition}"
    lines.append(("pinning", f"no: {reason}" if reason else f"{note}; {pinning.PIN_VARIABLE}=no switches it off"))
    lines += [("library", text) for text in _describe_thread_pools()]
    return lines


@dataclass(frozen=True)
class MPILibrary:
    """MPI library that mpi4py loads, or the error if it cannot be loaded."""

    library: str = ""
    error: str = ""
    is_cuda_aware: bool | None = None
    """whether the library reports that it accepts GPU memory addresses; None: not reported"""


def probe_mpi(timeout: float = 20) -> MPILibrary:
    """Return the MPI library after starting MPI in a child process."""
    env = {"OMPI_MCA_btl": "^ofi", **os.environ, "OMPI_MCA_osc": "^ucx"}
    text = _run_for_output(safe_path.python_command("neondist.launcher.mpi_probe"), timeout, env)
    try:
        return MPILibrary(**json.loads(text.splitlines()[-1]))
    except (IndexError, ValueError):
        return MPILibrary(error=f"no answer within {timeout:g} s, or the process was terminated")


def _describe_gpu_support(mpi: MPILibrary) -> str:
    """Return whether MPI accepts GPU memory addresses, and the consequence."""
    if not mpi.library:
        return "no MPI"
    if mpi.is_cuda_aware:
        return "yes, according to the library (CUDA); each run verifies it with a message first"
    support_text = (
        "no, according to the library" if mpi.is_cuda_aware is False else "unknown, not reported by the library"
    )
    return f"{support_text}; messages from a GPU are staged through pinned host memory"


def _describe_thread_pools() -> list[str]:
    try:
        import numpy  # noqa: F401
        from threadpoolctl import threadpool_info
    except ImportError as error:
        return [str(error)]
    return [
        f"{p['internal_api']} {p['version'] or ''}: {counted(p['num_threads'], 'thread')}" for p in threadpool_info()
    ]


def _run_for_output(command: list[str], timeout: float, env: dict[str, str]) -> str:
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=env, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout
