"""Cross-rank consistency check of an experiment; without it, ranks with different settings would deadlock."""

from __future__ import annotations

import hashlib

import numpy as np

from ..comm import ProcessGrid, Transport
from ..comm.argument_text import describe_object, format_arguments
from ..data import Dataset
from ..errors import ConfigError
from ..io.hdf5 import checksum
from ..models.consistency import settings_to_compare
from ..plan import ModelPlan
from ..version import __version__
from .validate import Experiment


def format_settings_to_compare(experiment: Experiment, plan: ModelPlan, resume: bool | str = False) -> list[str]:
    """Return the settings that all ranks must agree on, one per line: plan, layout of weights, training settings."""
    dataset, best = experiment.dataset, experiment.best
    return [
        f"neondist {__version__}",
        f"{plan.grid}",
        f"dataset: {type(dataset).__name__} {tuple(dataset.sample_shape)} {format_arguments(dataset.arguments())}",
        f"batch_size: {experiment.batch_size}, epochs: {experiment.epochs}, resume: {resume}",
        f"{experiment.checkpoint}",
        f"best: {format_arguments(best.arguments()) if best is not None else None}",
        *(f"metric: {describe_object(metric, metric.arguments())}" for metric in experiment.metrics),
        *(f"augment: {describe_object(step, step.arguments())}" for step in experiment.augment),
        *(f"{name}: {value}" for name, value in settings_to_compare(experiment.model, plan).items()),
    ]


def check_same_data_on_ranks(grid: ProcessGrid, dataset: Dataset) -> None:
    """Compare the contents of an opened data set, since files may differ between machines. Collective.

    Raises
    ------
    ConfigError
        On every rank, if sizes, normalisation, labels or contents differ, or the cells of a tile between replicas.
    """
    check_same_lines_on_ranks(grid.world, dataset.properties_equal_on_all_ranks())
    if grid.replicas > 1:
        tile_arrays = [split.tiles for split in dataset.splits.values()]
        checksums = [f"{checksum(tiles):08x}" if isinstance(tiles, np.ndarray) else "" for tiles in tile_arrays]
        hashes = grid.world.allgather(f"{checksums}")
        num_tiles = grid.shape.tiles
        check_same_lines_on_ranks(
            grid.world, [f"tile {n}: cells with hash {hashes[grid.replica * num_tiles + n]}" for n in range(num_tiles)]
        )


def check_same_lines_on_ranks(world: Transport, lines: list[str]) -> None:
    """Compare the lines of all ranks by their hash. Collective.

    Raises
    ------
    ConfigError
        On every rank, with the first line that differs.
    """
    digests = world.allgather(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    differing = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if differing is None:
        return
    gathered = world.allgather(lines)
    length = max(map(len, (gathered[0], gathered[differing])))
    expected, other = ([*ls, *["nothing"] * (length - len(ls))] for ls in (gathered[0], gathered[differing]))
    pair = next((a, b) for a, b in zip(expected, other, strict=True) if a != b)
    raise ConfigError(
        f"the ranks disagree: rank 0 has {pair[0]}, but rank {differing} has {pair[1]}; start all ranks with the same"
        " files, options and version of neondist"
    ).mark_raised_on_all_ranks()
