"""Tensors by name in a file: safetensors, or a state_dict that torch.save has written; neither executes anything."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import DataError, MissingPackageError, UserError
from ..io.regular_file import check_regular, open_regular

OF_TORCH = (".pt", ".pth", ".ckpt", ".bin")
"""Suffixes of what torch.save writes."""
_STATES = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "weights")
"""Keys under which training scripts keep a state_dict beside what else they save."""


@dataclass(frozen=True)
class SafeTensors:
    """A safetensors file, open.

    Attributes
    ----------
    shapes : by name
    facts : texts and numbers that the file holds beside its tensors
    """

    file: Any
    shapes: Mapping[str, tuple[int, ...]]
    facts: Mapping[str, Any]

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor; it is read now."""
        found: torch.Tensor = self.file.get_tensor(name)
        return found


@dataclass(frozen=True)
class StateDict:
    """A state_dict in memory, with the attributes of SafeTensors."""

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        return self.tensors[name]


@contextmanager
def opened_weights(path: Path) -> Iterator[SafeTensors | StateDict]:
    """Open a file of weights by its suffix: .pt, .pth, .ckpt and .bin are PyTorch's, others safetensors.

    Raises
    ------
    DataError
        It is missing or damaged, or has something else in it than tensors by name.
    """
    if path.suffix.lower() in OF_TORCH:
        yield StateDict(_state_dict(path))
        return
    with _safe(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        yield SafeTensors(file, shapes, _facts(file.metadata()))


def safetensors() -> Any:
    """Return the package; MissingPackageError says how to install it."""
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise MissingPackageError("weights files need safetensors: pip install 'neondist[torch]'") from None
    return safetensors


def _safe(path: Path) -> Any:
    package = safetensors()
    try:
        check_regular(path)
        return package.safe_open(path, framework="pt")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except UserError:
        raise
    except Exception as error:  # the library's own, and those of the file system
        raise DataError(f"{path}: is not a safetensors file ({error}); name a file written by save_weights") from error


def _state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Return the one state_dict of a file, which may lie under a key such as 'model' or 'state_dict'."""
    try:
        with open_regular(path) as file:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: is not a state_dict of tensors only, and objects in a file are not executed"
            f"{_object(error)}; write it with torch.save(module.state_dict(), FILE)"
        ) from error
    except Exception as error:  # of a damaged file, whatever the library stumbles over
        raise DataError(
            f"{path}: is damaged, or was not written by torch.save ({type(error).__name__}: {error}); restore it from a"
            " copy, or name another file"
        ) from error
    if _is_state(found):
        return dict(found)
    keys = list(found) if isinstance(found, Mapping) else []
    states = [key for key in keys if key in _STATES and _is_state(found[key])]
    if len(states) == 1:
        return dict(found[states[0]])
    if states:
        what = f"holds several states, under {' and '.join(map(repr, states))}"
    else:
        what = f"holds no state_dict, but {_words(found, keys)}"
    raise DataError(f"{path}: {what}; write one with torch.save(module.state_dict(), FILE)")


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in value.items())
    )


def _object(error: Exception) -> str:
    """Return ' (NAME)' of the object that PyTorch refuses, if its message says so."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f" ({found[1]})" if found else ""


def _words(found: Any, keys: list[Any]) -> str:
    named = f" with the keys {', '.join(map(repr, keys[:8]))}" if keys else ""
    return f"a {type(found).__name__}{named}"


def _facts(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Return what `save_weights` was told; another program's texts are no JSON, and stay texts."""
    found: dict[str, Any] = {}
    for name, text in (metadata or {}).items():
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):
            found[name] = text
    return found
