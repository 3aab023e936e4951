"""Do all ranks have the same experiment before them? Otherwise they would wait for messages that never come."""

from __future__ import annotations

import hashlib

import numpy as np

from ..comm import ProcessGrid, Transport
from ..comm.facts import described, text_of
from ..data import Dataset
from ..errors import ConfigError
from ..io.hdf5 import checksum
from ..models.facts import facts_of
from ..plan import ModelPlan
from ..version import __version__
from .validate import Experiment


def outline(experiment: Experiment, plan: ModelPlan, resume: bool | str = False) -> list[str]:
    """Return what all ranks must agree on, a fact a line: the plan, the weights' layout, how to train."""
    dataset, best = experiment.dataset, experiment.best
    return [
        f"neondist {__version__}",
        f"{plan.grid}",
        f"dataset: {type(dataset).__name__} {tuple(dataset.sample_shape)} {text_of(dataset.arguments())}",
        f"batch_size: {experiment.batch_size}, epochs: {experiment.epochs}, resume: {resume}",
        f"{experiment.checkpoint}",
        f"best: {text_of(best.arguments()) if best is not None else None}",
        *(f"augment: {described(step, step.arguments())}" for step in experiment.augment),
        *(f"{name}: {value}" for name, value in facts_of(experiment.model, plan).items()),
    ]


def check_data_consistency(grid: ProcessGrid, dataset: Dataset) -> None:
    """Compare what an opened data set holds, since files may differ from machine to machine; collective.

    Raises
    ------
    ConfigError
        On every rank, if the samples are not the same, or two replicas have other cells in one tile.
    """
    check_consistency(grid.world, dataset.fingerprint())
    if grid.replicas > 1:
        kept = [split.tiles for split in dataset.splits.values()]
        sums = [f"{checksum(tiles):08x}" if isinstance(tiles, np.ndarray) else "" for tiles in kept]
        told = grid.world.allgather(f"{sums}")
        tiles = grid.shape.tiles
        check_consistency(
            grid.world, [f"tile {n}: cells of hash {told[grid.replica * tiles + n]}" for n in range(tiles)]
        )


def check_consistency(world: Transport, lines: list[str]) -> None:
    """Compare the lines, as a hash that every rank tells; collective.

    Raises
    ------
    ConfigError
        On every rank, with the first line that differs, if they are not the same.
    """
    digests = world.allgather(_digest(lines))
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    told = world.allgather(lines)
    length = max(map(len, (told[0], told[odd])))
    mine, other = ([*one, *["nothing"] * (length - len(one))] for one in (told[0], told[odd]))
    pair = next((a, b) for a, b in zip(mine, other, strict=True) if a != b)
    raise ConfigError(
        f"the ranks disagree: rank 0 has {pair[0]}, but rank {odd} has {pair[1]}; start all ranks with the same"
        " files, options and version of neondist"
    ).on_all_ranks()


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
