"""Names of a model's layers, and checks of layers, grid and batch size."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm import ProcessGrid
from ..errors import ConfigError, GridError
from ..layers import Layer, Node
from .layer_model import LayerModel


def name_layers(layers: Sequence[Node], leaves: Sequence[Layer]) -> None:
    """Name unnamed layers by class and number; raise ConfigError for a layer or a name that occurs twice."""
    name_counts: dict[str, int] = {}
    for layer in layers:
        layer.assign_names("", name_counts)
    names = [layer.name for layer in leaves]
    repeated = {name for name in names if names.count(name) > 1}
    if len(set(map(id, leaves))) < len(names):
        raise ConfigError(f"layers: layer '{min(map(str, repeated))}' is used twice; create a layer for each place")
    if repeated:
        raise ConfigError(f"layers: the name '{min(map(str, repeated))}' is given twice; use unique names")


def check_grid_and_batch_size(model: LayerModel, grid: ProcessGrid, batch_size: int) -> None:
    """Raise an error if a model cannot be built on a grid, or has layers of the other kind, serial or distributed."""
    name = type(model).__name__
    if not model.distributed and grid.size > 1:
        raise GridError(f"{name} is serial, but the grid has {grid.size} ranks; use {name}Dist or nd.distribute")
    if batch_size < grid.replicas:
        raise ConfigError(
            f"batch_size {batch_size} is less than replicas {grid.replicas}; give each replica at least one sample"
        )
    for layer in model.leaves:
        if layer.distributed != model.distributed:
            layer_kind = "serial" if model.distributed else "distributed"
            raise ConfigError(
                f"layer '{layer.name}' ({type(layer).__name__}) is {layer_kind}, but {name} is not;"
                f" use the {'distributed' if model.distributed else 'serial'} class of the layer, or nd.distribute"
            )
