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
from ...geometry import GridShape
from ...io.checkpoint import opened
from ...io.checkpoint.checksum import BLOCK
from ...io.checkpoint.texts import of_kind, plain_json, whole
from ...io.regular_file import open_regular
from ...models import Model
from ...registry import Registered
from ..experiment import FitExperiment
from ..validate import grid_shape_of
from ..weights import take_weights
from .images import Images, open_images
from .routes import InBlocks, InTiles, choose, forward_plan

_EXECUTION = {"optimizer", "cost", "accumulate", "sync", "recompute", "strips", "memory"}


@contextmanager
def network(
    experiment: FitExperiment,
    checkpoint: str | Path,
    source: str | Path,
    grid: ProcessGrid,
    block: int | None,
    before: list[Any] | None,
    beyond: int = 0,
) -> Iterator[tuple[InBlocks | InTiles, Images, dict[str, str]]]:
    """Yield the route that a network with a checkpoint's weights goes, its images, and what both are; collective."""
    model, world, path = experiment.model, grid.world, Path(checkpoint)
    with all_or_none(world):
        grid_shape_of(experiment, grid.size)
    with opened(path, world) as file:
        sample_shape, factor, offset, fill = normalisation(path, file.facts.texts)
        with all_or_none(world):
            images = open_images(source, sample_shape, factor, offset, fill)
        with closing(images):
            with all_or_none(world), _extents_told(model, images):
                route = choose(model, images, grid, experiment.batch_size, block, before, beyond)
            take_weights(file, model)
            said = {"checkpoint": _identity(path), "network": hashlib.sha256(_text(model).encode()).hexdigest()[:16]}
            yield route, images, said


@contextmanager
def _extents_told(model: Any, images: Images) -> Iterator[None]:
    """Raise an error that names the file and valid extents if layers do not match for images of this extent."""
    try:
        yield
    except ShapeError as error:
        extents, channels = images.shape[1:-1], images.shape[-1]
        for step in (2, 4, 8, 16, 32, 64) if isinstance(model, Model) else ():
            fits = tuple(max(step, n // step * step) for n in extents)
            with suppress(ShapeError):
                forward_plan(model, (*fits, channels), GridShape(), 1)
                had, would = (" x ".join(map(str, of)) for of in (extents, fits))
                raise DataError(
                    f"{images.source.path}: {had} cells are not a valid input size of the network, but {would} are:"
                    f" crop or pad images to multiples of {step} ({error})"
                ) from error
        raise


def normalisation(path: Path, texts: dict[str, str]) -> tuple[tuple[int, ...], list[float], list[float], float | None]:
    """Return the shape of an image of training, and how they were made of raw values; the same on every rank."""
    try:
        facts = plain_json(texts["images"], dict)
        shape = tuple(whole("'shape'", n, 1) for n in of_kind("'shape'", facts["shape"], list))
        fill = None if facts.get("fill") is None else _numbers("fill", [facts["fill"]])[0]
        return shape, _channels(facts, "factor", shape), _channels(facts, "offset", shape), fill
    except (KeyError, ValueError) as problem:
        raise DataError(
            f"{path}: does not record how its images were normalised ({problem}); name another file"
        ) from None


def _channels(facts: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[float]:
    """Return the finite numbers of one name: one, or one for each channel."""
    numbers = _numbers(name, of_kind(f"'{name}'", facts[name], list))
    if len(numbers) not in (1, *shape[-1:]):
        raise ValueError(f"'{name}' has {len(numbers)} numbers")
    return numbers


def _numbers(name: str, numbers: list[Any]) -> list[float]:
    if not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in numbers):
        raise ValueError(f"'{name}' are not numbers")
    return numbers


def _identity(path: Path) -> str:
    """Return the first block of a checkpoint, which has its checksum."""
    with open_regular(path) as file:
        return hashlib.sha256(file.read(BLOCK)).hexdigest()[:16]


def _text(value: Any) -> str:
    """Return what the outputs of a network depend on, beside its weights."""
    if isinstance(value, Registered):
        given = {name: _text(one) for name, one in value.arguments().items() if name not in _EXECUTION}
        return f"{type(value).__name__}({given})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    return str(getattr(value, "__qualname__", value))
