"""Vector parallelism: fully connected layers in pairs, with one reduction per pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UserError

Shape = tuple[int, ...]


def alternate_output_and_input_splits(nodes: Sequence[Any], input_shape: Shape) -> None:
    """Divide consecutive layers by outputs and inputs alternately, the last one by inputs.

    A layer that reads an image is divided by inputs: each rank has its tile.
    """
    shape, layer_run = input_shape, []  # type: Shape, list[tuple[Any, Shape]]
    for node in nodes:
        if getattr(node, "can_split_outputs", False):
            layer_run.append((node, shape))
        else:
            _set_alternating_splits(layer_run)
            layer_run = []
        try:
            shape = node.output_shape_for(shape)
        except UserError:  # the plan reports the layer
            break
    _set_alternating_splits(layer_run)


def _set_alternating_splits(layer_run: Sequence[tuple[Any, Shape]]) -> None:
    """Divide consecutive layers, given with the shapes of their inputs."""
    next_splits_inputs = False  # whether the following layer is divided by inputs
    for layer, shape in reversed(layer_run):
        splits_outputs = next_splits_inputs and len(shape) == 1 and layer.output_may_stay_sharded
        layer.set_split("outputs" if splits_outputs else "inputs")
        next_splits_inputs = not splits_outputs
