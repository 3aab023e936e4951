"""Reading of named tensors from safetensors files and state_dicts of torch.save, without executing code from them."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import DataError, MissingPackageError, UserError
from ...io.regular_file import check_regular, open_regular

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
"""Suffixes of files written by torch.save."""
_STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "weights")
"""Keys under which training scripts commonly save a state_dict together with other data."""


@dataclass(frozen=True)
class WeightsFile:
    """Open weights file.

    Attributes
    ----------
    metadata : mapping of str to object
        Strings and numbers stored with the tensors.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read_tensor: Callable[[str], torch.Tensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def open_weights(path: Path) -> Iterator[WeightsFile]:
    """Open a weights file in the format given by its suffix: torch.save for .pt, .pth, .ckpt, .bin, else safetensors.

    Raises
    ------
    DataError
        The file is missing or damaged, or contains anything other than named tensors.
    """
    if path.suffix.lower() in TORCH_SUFFIXES:
        tensors = _read_state_dict(path)
        yield WeightsFile({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)
        return
    with _open_safetensors(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        yield WeightsFile(shapes, file.get_tensor, _parse_metadata(file.metadata()))


def import_safetensors() -> Any:
    """Import and return the safetensors package; raise MissingPackageError if it is not installed."""
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise MissingPackageError("weights files need safetensors: pip install 'neondist[torch]'") from None
    return safetensors


def _open_safetensors(path: Path) -> Any:
    package = import_safetensors()
    try:
        check_regular(path)
        return package.safe_open(path, framework="pt")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except UserError:
        raise
    except Exception as error:  # from the library or the file system
        raise DataError(f"{path}: is not a safetensors file ({error}); give a file written by save_weights") from error


def _read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Return the only state_dict of a file, at top level or under a key such as 'model' or 'state_dict'."""
    try:
        with open_regular(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        rejected_class = re.search(r"GLOBAL ([\w.]+)", str(error))
        name = f" ({rejected_class[1]})" if rejected_class else ""
        raise DataError(
            f"{path}: contains objects other than tensors{name}, which are not loaded; write only the weights, with"
            " torch.save(module.state_dict(), FILE)"
        ) from error
    except Exception as error:  # a damaged file can cause any error in the library
        raise DataError(
            f"{path}: is damaged, or was not written by torch.save ({type(error).__name__}: {error}); restore it from a"
            " copy, or specify another file"
        ) from error
    if _is_state_dict(content):
        return dict(content)
    keys = list(content) if isinstance(content, Mapping) else []
    state_dict_keys = [key for key in keys if key in _STATE_DICT_KEYS and _is_state_dict(content[key])]
    if len(state_dict_keys) == 1:
        return dict(content[state_dict_keys[0]])
    if state_dict_keys:
        problem = f"contains several state_dicts, under {' and '.join(map(repr, state_dict_keys))}"
    else:
        keys_text = f" with the keys {', '.join(map(repr, keys[:8]))}" if keys else ""
        problem = f"contains no state_dict, but a {type(content).__name__}{keys_text}"
    raise DataError(f"{path}: {problem}; write a single one with torch.save(module.state_dict(), FILE)")


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items())
    )


def _parse_metadata(metadata_texts: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the metadata stored by `save_weights`; strings of other programs that are not JSON stay strings."""
    metadata: dict[str, Any] = {}
    for name, text in (metadata_texts or {}).items():
        try:
            metadata[name] = json.loads(text)
        except (ValueError, RecursionError):
            metadata[name] = text
    return metadata
