"""Which backends there are, and which one `auto` takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError
from ..registry import suggest
from ..registry.arguments import checked
from .base import Backend
from .numpy import NumpyBackend


@dataclass(frozen=True)
class Availability:
    """A backend's name, whether it can be used here, and why."""

    name: str
    usable: bool
    reason: str


def available() -> list[Availability]:
    """Return all backends, the one that `auto` prefers first; imports PyTorch, where it is, to see whether it works."""
    return [_torch_availability(), Availability("numpy", True, "always there")]


@checked
def get_backend(name: str | Backend = "auto") -> Backend:
    """Return the backend of this name ('auto': the first usable one), or ConfigError with the choices."""
    if isinstance(name, Backend):
        return name
    if name == "auto":
        name = next(choice.name for choice in available() if choice.usable)
    if name not in _MAKERS:
        raise ConfigError(f"backend '{name}' is unknown{suggest(name, ['auto', *_MAKERS])}")
    return _MAKERS[name]()


def _torch_availability() -> Availability:
    if importlib.util.find_spec("torch") is None:
        return Availability("torch", False, "not installed; pip install 'neondist[torch]'")
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        return Availability("torch", False, f"cannot be imported: {type(error).__name__}: {error}")
    return Availability("torch", True, f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads")


def _torch() -> Backend:
    found = _torch_availability()
    if not found.usable:
        raise ConfigError(f"backend 'torch' is {found.reason}, or use backend 'numpy'")
    from .torch import TorchBackend

    return TorchBackend()


_MAKERS: dict[str, Callable[[], Backend]] = {"torch": _torch, "numpy": NumpyBackend}
