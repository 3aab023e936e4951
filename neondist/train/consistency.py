"""Do all ranks have the same experiment before them? Otherwise they would wait for messages that never come."""

from __future__ import annotations

import hashlib
import os

import numpy as np

from ..comm import ProcessGrid, Transport
from ..data import Dataset
from ..errors import ConfigError
from ..halo import scheme_text
from ..io.hdf5 import checksum
from ..plan import ModelPlan
from ..version import __version__
from .validate import Experiment

_FEW = 10  # numbers that are told one by one


def outline(experiment: Experiment, plan: ModelPlan, resume: bool | str = False) -> list[str]:
    """Return what all ranks must agree on, a fact a line: the plan, the weights' layout, how to train."""
    model, dataset = experiment.model, experiment.dataset
    shape = tuple(dataset.sample_shape)
    return [
        f"neondist {__version__}",
        f"{plan.grid}",
        f"dataset: {type(dataset).__name__} {shape} {_plain(_without_places(dataset.arguments()))}",
        f"batch_size: {experiment.batch_size}, epochs: {experiment.epochs}, resume: {resume}",
        f"{experiment.checkpoint}, nonfinite: {model.nonfinite}",
        f"best: {_plain(experiment.best.arguments()) if experiment.best is not None else None}",
        f"seed: {model.seed}, dtype: {model.dtype}, precision: {model.precision.name}, model: {model}",
        f"optimizer: {type(model.optimizer).__name__} {_plain(model.optimizer.arguments())}",
        f"cost: {type(model.cost).__name__} {_plain(model.cost.arguments())}",
        *(f"augment: {type(step).__name__} {_plain(step.arguments())}" for step in experiment.augment),
        *plan.outline(),
        *(f"'{name}': scheme {scheme_text(scheme)}" for name, scheme in model.schemes.items()),
        f"strategy: {plan.parameters.strategy.builder} {plan.parameters.strategy.digest}",
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


def _without_places(arguments: dict[str, object]) -> dict[str, object]:
    """Return arguments without paths: the same data may lie in another place on each machine."""
    return {k: v for k, v in arguments.items() if not (k.endswith("path") or isinstance(v, os.PathLike))}


def _plain(arguments: dict[str, object]) -> str:
    """Return arguments as text; objects by their class, since their addresses differ."""
    return ", ".join(f"{name}: {_text(value)}" for name, value in arguments.items())


def _text(value: object) -> str:
    if isinstance(value, (bool, int, float, str, type(None))):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{_plain(_without_places(value))}}}"
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return (
            _text(value.tolist()) if value.size < _FEW else f"{value.shape} of hash {checksum(np.asarray(value)):08x}"
        )
    return type(value).__name__


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
