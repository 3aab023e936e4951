"""Regions of a program whose values are partitioned otherwise than into tiles, and conversions at their borders."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

from torch.fx import Node
from torch.utils import _pytree as pytree

from ..ir.graph import Value
from ..ir.layout import axes_of
from ..lowering.lowering import Lowering


class Partitioning(Enum):
    """Partition of the values of a node over the ranks that share an image."""

    TILES = "tiles"
    WHOLE = "whole"
    CHANNELS = "channels"


class RegionConversion:
    """Conversion of values between the regions of a program that is lowered.

    Parameters
    ----------
    gather_at : sequence of str
        Paths of modules that every rank computes on whole arrays.
    by_channels : collection of torch.fx.Node
        Nodes that are partitioned by channels.
    """

    def __init__(self, lowering: Lowering, gather_at: Sequence[str], by_channels: Collection[Node]) -> None:
        self.lowering, self.gather_at, self.by_channels = lowering, tuple(gather_at), frozenset(by_channels)
        self._partitionings: dict[int, Partitioning] = {}
        self._converted: dict[tuple[int, Partitioning], Value] = {}

    def enter(self, node: Node) -> None:
        """Prepare the lowering for the rule of a node."""
        self.lowering.partitions_channels = self._of_node(node) is Partitioning.CHANNELS

    def record(self, result: Any, node: Node) -> None:
        """Record how the results of a node are partitioned."""
        partitioning = self._of_node(node)
        if partitioning is not Partitioning.TILES:
            values = (value for value in pytree.tree_leaves(result) if isinstance(value, Value))
            self._partitionings.update((value.id, partitioning) for value in values)

    def convert(self, value: Any, node: Node | None = None) -> Any:
        """Return a value, or the values in a list, for the use in a node; None: after the program."""
        wanted = Partitioning.TILES if node is None else self._of_node(node)
        if isinstance(value, (tuple, list)):
            return type(value)(self.convert(item, node) for item in value)
        if not isinstance(value, Value) or value.kind == "parameter":
            return value
        if self._partitionings.get(value.id, Partitioning.TILES) is wanted:
            return value
        key = value.id, wanted
        if key not in self._converted:
            self._converted[key] = self._convert(value, wanted)
        return self._converted[key]

    def _of_node(self, node: Node) -> Partitioning:
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        if any(path in self.gather_at for path in [*stack, *([""] if "" in self.gather_at else [])]):
            return Partitioning.WHOLE if node.op == "call_function" else Partitioning.TILES
        return Partitioning.CHANNELS if node in self.by_channels else Partitioning.TILES

    def _convert(self, value: Value, wanted: Partitioning) -> Value:
        lowering, mesh = self.lowering, self.lowering.mesh
        is_image = len(value.shape) == mesh.spatial + 2
        if wanted is Partitioning.WHOLE:
            return lowering.gather(value) if axes_of(value.layout) else value
        if wanted is Partitioning.CHANNELS:
            return lowering.gather(value, range(2, len(value.shape))) if is_image else value
        if self._partitionings[value.id] is Partitioning.WHOLE:
            return lowering.reshard(value, mesh.image_layout(value.shape)) if is_image else value
        tiles = is_image and all(n >= parts for n, parts in zip(value.shape[2:], mesh.parts[1:], strict=True))
        return (
            lowering.partition_as(value, mesh.image_layout(value.shape))
            if tiles
            else lowering.gather(value, range(1, len(value.shape)))
        )
