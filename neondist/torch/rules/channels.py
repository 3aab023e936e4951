"""Convolutions and products whose channels are partitioned over the ranks that share an image."""

from __future__ import annotations

from typing import NamedTuple

from ...geometry import Atom
from ..ir.graph import Value
from ..ir.layout import Dim, axes_of, merge_atoms, replace_dim, replicated
from ..lowering.lowering import Lowering


class ChannelOperands(NamedTuple):
    """Operands of a convolution or matrix product on this rank.

    Attributes
    ----------
    channels : Dim
        Layout of the results' channels.
    reduced_mesh_axes : frozenset of int
        Axes of the mesh over which results are summed, before the bias is added.
    """

    x: Value
    weight: Value
    bias: Value | None
    channels: Dim
    reduced_mesh_axes: frozenset[int] = frozenset()


def prefers_partial_sums(in_channels: int, out_channels: int) -> bool:
    """Return whether reducing partial sums over ranks is cheaper than gathering the input channels."""
    return in_channels >= 2 * out_channels


def partition_channel_operands(
    lowering: Lowering, x: Value, weight: Value, bias: Value | None, groups: int = 1
) -> ChannelOperands:
    """Return the operands, with weights partitioned by output channels, or by input channels for partial sums.

    Parameters
    ----------
    x : Value
        (N, C, ...), all cells.
    weight : Value
        (out_channels, C / groups, ...)
    """
    out_channels, in_channels = weight.shape[:2]
    if groups == 1 and prefers_partial_sums(in_channels, out_channels) and not lowering.is_whole(x, 1):
        own_weight = lowering.partition_as(weight, replace_dim(replicated(weight.shape), 1, *x.layout[1]))
        return ChannelOperands(x, own_weight, bias, (Atom(out_channels),), axes_of(x.layout[1:2]))
    other_axes = axes_of((x.layout[0], *x.layout[2:])) - {0}  # for example, rows that are cells of images
    tiled_dim = None if other_axes else _dim_split_over_tiles(lowering, out_channels if groups == 1 else groups)
    if tiled_dim is None:
        return ChannelOperands(lowering.gather(x, [1]), weight, bias, (Atom(out_channels),))
    if groups == 1:
        x, channels = lowering.gather(x, [1]), tiled_dim
    else:
        input_dim = merge_atoms((*tiled_dim, Atom(in_channels)))
        if not lowering.is_whole(x, 1) and x.layout[1] != input_dim:
            x = lowering.gather(x, [1])
        x = lowering.partition_as(x, replace_dim(x.layout, 1, *input_dim))
        channels = merge_atoms((*tiled_dim, Atom(out_channels // groups)))
    weight = lowering.partition_as(weight, replace_dim(replicated(weight.shape), 0, *channels))
    return ChannelOperands(x, weight, None if bias is None else lowering.partition_as(bias, (channels,)), channels)


def _dim_split_over_tiles(lowering: Lowering, extent: int) -> Dim | None:
    """Return a dimension split over all ranks that share an image, or None if that is impossible."""
    parts = lowering.mesh.parts
    axes, atoms = [axis for axis in range(1, len(parts)) if parts[axis] > 1], list[Atom]()
    for axis in axes:
        atom_extent = extent if axis == axes[-1] else parts[axis]
        if extent % atom_extent or atom_extent < parts[axis]:
            return None
        atoms.append(lowering.mesh.even_atom(atom_extent, axis))
        extent //= atom_extent
    return merge_atoms(atoms) if axes else None
