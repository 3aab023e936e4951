"""Regions of a program whose values are not partitioned into tiles, and conversions at their borders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from ...geometry import Atom
from ..ir.graph import Value
from ..ir.layout import axes_of, replicated
from ..lowering.lowering import Lowering


class Partitioning(Enum):
    """Partition of the values of a node over the ranks that share an image."""

    TILES = "tiles"
    WHOLE = "whole"
    CHANNELS = "channels"


class PartitioningConverter:
    """Conversion of values between the regions of a program during its lowering.

    Parameters
    ----------
    gather_at : sequence of str
        Paths of modules that every rank computes on whole arrays.
    channel_nodes : collection of torch.fx.Node
        Nodes that are partitioned by channels.
    """

    def __init__(self, lowering: Lowering, gather_at: Sequence[str], channel_nodes: Collection[Node]) -> None:
        self.lowering, self.gather_at, self.channel_nodes = lowering, tuple(gather_at), frozenset(channel_nodes)
        self._partitionings: dict[int, Partitioning] = {}
        self._converted: dict[tuple[int, Partitioning], Value] = {}

    def begin_node(self, node: Node) -> None:
        """Prepare the lowering for the rule of a node."""
        self.lowering.partitions_channels = self._partitioning_of(node) is Partitioning.CHANNELS

    def record_result(self, result: Any, node: Node) -> None:
        """Record how the results of a node are partitioned."""
        partitioning = self._partitioning_of(node)
        if partitioning is not Partitioning.TILES:
            values = (value for value in pytree.tree_leaves(result) if isinstance(value, Value))
            self._partitionings.update((value.id, partitioning) for value in values)

    def convert(self, value: Any, node: Node | None = None) -> Any:
        """Convert a value, or the values in a list, for use in `node`; if `node` is None, for use after the program."""
        target = Partitioning.TILES if node is None else self._partitioning_of(node)
        if isinstance(value, (tuple, list)):
            return type(value)(self.convert(item, node) for item in value)
        if not isinstance(value, Value) or value.kind == "parameter":
            return value
        if self._partitionings.get(value.id, Partitioning.TILES) is target:
            return value
        key = value.id, target
        if key not in self._converted:
            self._converted[key] = self._convert(value, target)
        return self._converted[key]

    def gather(self, values: Iterable[Value]) -> list[Value]:
        """Gather values on every rank after the program, with one message per dtype for statistics of channels."""
        lowering, mesh, values = self.lowering, self.lowering.mesh, list(values)
        num_tiles = prod(mesh.parts[1:])
        even_vectors = [
            v for v in values
            if num_tiles > 1 and len(v.shape) == 1 and axes_of(v.layout) == mesh.axes - {0}
            and not v.shape[0] % num_tiles
        ]  # fmt: skip
        gathered: dict[int, Value] = {}
        for dtype in dict.fromkeys(value.dtype for value in even_vectors):
            rows = [lowering.reshape(v, (num_tiles, v.shape[0] // num_tiles)) for v in even_vectors if v.dtype == dtype]
            width = sum(row.shape[1] for row in rows)
            joined = lowering.local(lambda *ts: torch.cat(ts, 1), rows, (rows[0].layout[0], (Atom(width),)))
            gathered_rows, first_column = lowering.gather(joined), 0
            for value in (v for v in even_vectors if v.dtype == dtype):
                num_columns = value.shape[0] // num_tiles
                flatten = partial(_flatten_columns, first_column, num_columns)
                gathered[value.id] = lowering.local(flatten, [gathered_rows], replicated(value.shape))
                first_column += num_columns
        return [gathered.get(v.id) or lowering.gather(self.convert(v)) for v in values]

    def _partitioning_of(self, node: Node) -> Partitioning:
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        if any(path in self.gather_at for path in [*stack, *([""] if "" in self.gather_at else [])]):
            return Partitioning.WHOLE if node.op == "call_function" else Partitioning.TILES
        return Partitioning.CHANNELS if node in self.channel_nodes else Partitioning.TILES

    def _convert(self, value: Value, target: Partitioning) -> Value:
        lowering, mesh = self.lowering, self.lowering.mesh
        is_image = len(value.shape) == mesh.spatial_ndim + 2
        if target is Partitioning.WHOLE:
            return lowering.gather(value) if axes_of(value.layout) else value
        if target is Partitioning.CHANNELS:
            return lowering.gather(value, range(2, len(value.shape))) if is_image else value
        if self._partitionings[value.id] is Partitioning.WHOLE:
            return lowering.reshard(value, mesh.image_layout(value.shape)) if is_image else value
        if is_image and all(n >= parts for n, parts in zip(value.shape[2:], mesh.parts[1:], strict=True)):
            return lowering.partition_as(value, mesh.image_layout(value.shape))
        return lowering.gather(value, range(1, len(value.shape)))


def _flatten_columns(first_column: int, num_columns: int, rows: torch.Tensor) -> torch.Tensor:
    return rows[:, first_column : first_column + num_columns].reshape(-1)
