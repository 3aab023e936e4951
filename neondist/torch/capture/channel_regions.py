"""Regions of a program that are better partitioned by channels than by cells: those with more weights than cells.

In such a region, each of the ranks that share an image has all cells of its own channels. A convolution reads only the
weights of these channels, and batch norm and pooling need no messages; the inputs of the next convolution, which are
small there, are gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from typing import Any

import torch
from torch.fx import Node

from ..ir.layout import Mesh
from ..ir.registry import POINTWISE_OPS
from ..lowering.lowering import bind_arguments
from ..rules.channels import prefers_partial_sums

FLOPS_PER_SECOND, BYTES_PER_SECOND, SECONDS_PER_MESSAGE = 5e10, 8e9, 1.5e-4
"""Typical speed of a core, bandwidth, and latency with waiting; not measured, so that all ranks decide alike."""
BORDER_SECONDS = 4 * SECONDS_PER_MESSAGE
"""Time to gather the inputs of a region and partition its results into tiles, in the forward and backward pass."""
WEIGHT_PASSES, SUM_PASSES, GATHER_PASSES = 6, 4, 2
"""Numbers of passes over the memory of weights and their gradients, of summed values, and of gathered values."""
_PRODUCT_OPS = {"aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.linear.default"}
_BATCH_NORM_OPS = {
    "aten.batch_norm.default", "aten._native_batch_norm_legit_functional.default",
    "aten._batch_norm_with_update_functional.default", "aten._native_batch_norm_legit_no_training.default",
}  # fmt: skip
_GLOBAL_MEAN_OPS = {"aten.mean.dim", *(f"aten.adaptive_avg_pool{n}d.default" for n in (1, 2, 3))}
_CHANNELWISE_OPS = {
    *(f"aten.{name}.default" for n in (1, 2, 3) for name in (
        f"max_pool{n}d", f"max_pool{n}d_with_indices", f"avg_pool{n}d")),
    "aten.flatten.using_ints", "aten.view.default", "aten.dropout.default",
}  # fmt: skip
"""Further operators that need no messages if channels are partitioned."""


@dataclass(frozen=True)
class _NodeEstimate:
    """Estimated effect of partitioning a node by channels.

    Attributes
    ----------
    saved_seconds : float
        Seconds per training step that partitioning by channels saves; negative if it costs time.
    is_partitioned : bool
        Whether ranks have different channels of the results; otherwise, every rank has all channels.
    num_moved : int
        Elements that are gathered or summed over ranks.
    num_weights : int
        Elements of the weights of a convolution or matrix product, for all channels; 0 for other operators.
    """

    saved_seconds: float
    is_partitioned: bool
    num_moved: int = 0
    num_weights: int = 0


def find_channel_regions(program: Any, mesh: Mesh) -> set[Node]:
    """Return the nodes of a captured program to partition by channels; the result is the same on all ranks."""
    if prod(mesh.parts[1:]) == 1:
        return set()
    input_dependent = {node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs}
    chosen_nodes: set[Node] = set()
    region = dict[Node, _NodeEstimate]()
    for node in program.graph.nodes:
        is_constant = node.op == "call_function" and input_dependent.isdisjoint(node.all_input_nodes)
        if node.op == "placeholder" or is_constant:  # an input, or computed from parameters alone
            continue
        input_dependent.add(node)
        partitioned = {each for each, estimate in region.items() if estimate.is_partitioned}
        estimate = estimate_channel_partition(node, mesh, partitioned) if node.op == "call_function" else None
        if estimate is not None and estimate.num_moved <= estimate.num_weights and (region or estimate.num_weights):
            region[node] = estimate
            if sum(each.saved_seconds for each in region.values()) < 0 and not _best_leading_nodes(region):
                region = {}  # a region that begins later saves more
        else:
            chosen_nodes.update(_best_leading_nodes(region, BORDER_SECONDS))
            region = {}
    return chosen_nodes


def _best_leading_nodes(region: Mapping[Node, _NodeEstimate], min_saved_seconds: float = 0.0) -> list[Node]:
    """Return the leading nodes that together save the most time, or none if this is at most `min_saved_seconds`."""
    totals = list(accumulate(estimate.saved_seconds for estimate in region.values()))
    max_saved = max(totals, default=0.0)
    return list(region)[: totals.index(max_saved) + 1] if max_saved > min_saved_seconds else []


def estimate_channel_partition(node: Node, mesh: Mesh, partitioned: Collection[Node] = ()) -> _NodeEstimate | None:
    """Return the estimate for a node, or None if it cannot be partitioned by channels.

    Parameters
    ----------
    partitioned : collection of torch.fx.Node
        Nodes whose results are partitioned by channels.
    """
    target, out = node.meta.get("out_of_place", node.target), node.meta.get("val")
    has_partitioned_input, name = any(arg in partitioned for arg in node.all_input_nodes), str(target)
    if target is operator.getitem:
        return _NodeEstimate(0.0, has_partitioned_input)
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if name in _PRODUCT_OPS:
        arguments = bind_arguments(target, node.args, node.kwargs)
        return _estimate_channel_saving(arguments, out, mesh, has_partitioned_input)
    if name in _BATCH_NORM_OPS:
        is_training = bind_arguments(target, node.args, node.kwargs).get("training", "no_training" not in name)
        messages = (2 - has_partitioned_input) * bool(is_training)  # running statistics are gathered
        return _NodeEstimate(messages * SECONDS_PER_MESSAGE, has_partitioned_input)
    if name in _GLOBAL_MEAN_OPS:
        return _NodeEstimate(SECONDS_PER_MESSAGE, has_partitioned_input)
    is_pointwise = torch.Tag.pointwise in target.tags or name in POINTWISE_OPS
    return _NodeEstimate(0.0, has_partitioned_input) if is_pointwise or name in _CHANNELWISE_OPS else None


def _estimate_channel_saving(
    arguments: Mapping[str, Any], out: Any, mesh: Mesh, has_partitioned_input: bool
) -> _NodeEstimate | None:
    """Return the estimate for a convolution or a product of matrices with the given arguments."""
    x, weight, groups = arguments["x"].meta["val"], arguments["weight"].meta["val"], arguments.get("groups", 1)
    kernel, cells, parts = weight.shape[2:], out.shape[2:], mesh.parts[1:]
    if x.dim() != weight.dim() or len(kernel) not in (0, mesh.spatial_ndim):
        return None
    (out_channels, in_channels), samples, ranks = weight.shape[:2], ceil(x.shape[0] / mesh.parts[0]), prod(parts)
    uses_partial_sums = groups == 1 and has_partitioned_input and prefers_partial_sums(in_channels, out_channels)
    num_units = in_channels if uses_partial_sums else out_channels if groups == 1 else groups
    share = ceil(num_units / ranks) / num_units if num_units >= ranks else 1.0
    cells_per_tile = prod(ceil(n / p) for n, p in zip(cells, parts, strict=False))
    seconds_per_cell = 6 * samples * weight.numel() / FLOPS_PER_SECOND
    seconds_per_pass = x.element_size() * weight.numel() / BYTES_PER_SECOND
    halo_cost = 2 * SECONDS_PER_MESSAGE if max(kernel, default=1) > 1 else 0.0
    cells_cost = seconds_per_cell * cells_per_tile + seconds_per_pass * (WEIGHT_PASSES + SUM_PASSES) + halo_cost
    channels_cost = seconds_per_cell * prod(cells) * share + seconds_per_pass * (WEIGHT_PASSES * share + GATHER_PASSES)
    if groups > 1:
        return _NodeEstimate(cells_cost - channels_cost, share < 1)
    num_moved = samples * (2 * prod(out.shape[1:]) if uses_partial_sums else prod(x.shape[1:]))
    # if all ranks have all inputs, only their gradient is summed
    messages = 2 if has_partitioned_input and not uses_partial_sums else 1
    channels_cost += messages * SECONDS_PER_MESSAGE + GATHER_PASSES * x.element_size() * num_moved / BYTES_PER_SECOND
    return _NodeEstimate(cells_cost - channels_cost, share < 1 and not uses_partial_sums, num_moved, weight.numel())
