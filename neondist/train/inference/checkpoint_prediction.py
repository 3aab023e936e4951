"""A network with a checkpoint's weights, ready for images of any size."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ...comm import ProcessGrid, all_or_none
from ...errors import DataError, ShapeError
from ...formats.base import convert_read_errors
from ...geometry import GridShape
from ...io.checkpoint import open_checkpoint
from ...io.checkpoint.checksum import USER_BLOCK_SIZE
from ...io.checkpoint.texts import parse_json, require_json_integer, require_json_type
from ...io.regular_file import open_regular
from ...models import Model
from ...registry import Registered
from ...terminal.console import counted
from ..experiment import FitExperiment
from ..inference_weights import load_inference_weights
from ..validate import experiment_grid_shape
from .images import SourceSamples, open_images
from .prediction_methods import PredictionMethod, choose_method, compile_forward_plan

_UNHASHED_ARGUMENTS = {"optimizer", "cost", "accumulate", "sync", "recompute", "strips", "memory"}


@contextmanager
def open_checkpoint_prediction(
    experiment: FitExperiment,
    checkpoint: str | Path,
    source: str | Path,
    grid: ProcessGrid,
    block: int | None,
    resumed_method: list[Any] | None,
    extra_cells: int = 0,
    axes: str | None = None,
) -> Iterator[tuple[PredictionMethod, SourceSamples, dict[str, str]]]:
    """Yield the prediction method, the images, and hashes of the checkpoint and the network. Collective."""
    model, world, path = experiment.model, grid.world, Path(checkpoint)
    with all_or_none(world):
        experiment_grid_shape(experiment, grid.size)
    with open_checkpoint(path, world) as file:
        sample_shape, factor, offset, fill = parse_shape_and_normalisation(path, file.contents.texts)
        fill = getattr(experiment.dataset, "fill", None) if fill is None else fill
        with all_or_none(world):
            images = open_images(source, sample_shape, factor, offset, fill, axes=axes)
        with closing(images):
            with all_or_none(world), _suggest_valid_extents(model, images):
                method = choose_method(model, images, grid, experiment.batch_size, block, resumed_method, extra_cells)
                network_hash = _short_hash(_network_settings_text(model).encode())
                identities = {"checkpoint": _checkpoint_hash(path), "network": network_hash}
                identities |= {} if fill is None else {"fill": str(fill)}
            load_inference_weights(file, model)
            yield method, images, identities


@contextmanager
def _suggest_valid_extents(model: Any, images: SourceSamples) -> Iterator[None]:
    """On a shape mismatch of layers, raise an error that names the file and valid image extents."""
    try:
        yield
    except ShapeError as error:
        extents, channels = images.shape[1:-1], images.shape[-1]
        for step in (2, 4, 8, 16, 32, 64) if isinstance(model, Model) else ():
            valid_extents = tuple(max(step, n // step * step) for n in extents)
            with suppress(ShapeError):
                compile_forward_plan(model, (*valid_extents, channels), GridShape(), 1)
                actual, valid = (" x ".join(map(str, sizes)) for sizes in (extents, valid_extents))
                raise DataError(
                    f"{images.source.path}: {actual} cells are not a valid input size of the network, but {valid} are:"
                    f" crop or pad images to multiples of {step} ({error})"
                ) from error
        raise


def parse_shape_and_normalisation(
    path: Path, texts: dict[str, str]
) -> tuple[tuple[int, ...], list[float], list[float], float | None]:
    """Return shape, factor, offset and fill value of the training images; raise DataError if they are not recorded."""
    if "images" not in texts:
        raise DataError(
            f"{path}: this checkpoint does not record how its images were normalised; give a checkpoint of a training"
            " run on images"
        )
    try:
        saved = parse_json(texts["images"], dict)
        shape = tuple(
            require_json_integer("'shape'", n, 1) for n in require_json_type("'shape'", saved.get("shape"), list)
        )
        fill = None if saved.get("fill") is None else _require_finite_numbers("fill", [saved["fill"]])[0]
        return (shape, _channel_numbers(saved, "factor", shape), _channel_numbers(saved, "offset", shape), fill)
    except ValueError as problem:
        raise DataError(
            f"{path}: its record of how its images were normalised is invalid ({problem}); specify another checkpoint"
        ) from None


def _channel_numbers(json_object: dict[str, Any], key: str, shape: tuple[int, ...]) -> list[float]:
    """Return the finite numbers of a field: one, or one per channel."""
    numbers = _require_finite_numbers(key, require_json_type(f"'{key}'", json_object.get(key), list))
    if len(numbers) not in (1, *shape[-1:]):
        raise ValueError(f"'{key}' has {counted(len(numbers), 'number')} for {counted(shape[-1], 'channel')}")
    return numbers


def _require_finite_numbers(name: str, numbers: list[Any]) -> list[float]:
    if not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in numbers):
        raise ValueError(f"'{name}' contains a value that is not a finite number")
    return numbers


def _checkpoint_hash(path: Path) -> str:
    """Return a hash of a checkpoint's first block, which contains its checksum."""
    with convert_read_errors(path), open_regular(path) as file:
        return _short_hash(file.read(USER_BLOCK_SIZE))


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _network_settings_text(value: Any) -> str:
    """Return a text of all settings that determine a network's outputs, without its weights."""
    if isinstance(value, Registered):
        arguments = {
            name: _network_settings_text(item)
            for name, item in value.arguments().items()
            if name not in _UNHASHED_ARGUMENTS
        }
        return f"{type(value).__name__}({arguments})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_network_settings_text(item) for item in value)}]"
    return str(getattr(value, "__qualname__", value))
