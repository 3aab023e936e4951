"""Regions of a program that are better partitioned by channels than by cells: those with more weights than cells.

Ranks that share an image then have all cells of their own channels. A convolution reads only its rank's weights, and
batch norm and pooling need no messages; inputs of the next convolution are gathered, which are small there.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch.fx import Node

from ..ir.layout import Mesh
from ..ir.registry import POINTWISE_OPS
from ..lowering.lowering import bind_arguments

FLOPS_PER_SECOND = 5e10
BYTES_PER_SECOND = 8e9
SECONDS_PER_MESSAGE = 1e-4
BORDER_SECONDS = 2 * SECONDS_PER_MESSAGE
"""Time to convert the inputs of a region to channels, and its results to tiles."""
WEIGHT_PASSES = 6
"""Times that a training step reads or writes the weights of a convolution, including their gradients."""
INPUT_PASSES = 3
"""Times that a training step moves the inputs of a convolution, or their gradients, between ranks or in memory."""
_PRODUCTS = {"aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.linear.default"}
_BATCH_NORMS = {
    "aten.batch_norm.default", "aten._native_batch_norm_legit_functional.default",
    "aten._batch_norm_with_update_functional.default", "aten._native_batch_norm_legit_no_training.default",
}  # fmt: skip
_OTHERS = {
    *(f"aten.{name}{n}d{end}.default" for n in (1, 2, 3) for name, end in (
        ("max_pool", ""), ("max_pool", "_with_indices"), ("avg_pool", ""), ("adaptive_avg_pool", ""))),
    "aten.mean.dim", "aten.flatten.using_ints", "aten.view.default", "aten.dropout.default",
}  # fmt: skip
"""Operators whose rules need no messages for partitioned channels."""


@dataclass(frozen=True)
class _NodeEstimate:
    """Estimate for a node if it is partitioned by channels.

    Attributes
    ----------
    saved : float
        Seconds of a training step that this saves; negative: it takes longer.
    elements : int
        Elements of the input and the results.
    weights : int
        Elements of the weights of a dense convolution or product; 0: of another operator.
    """

    saved: float
    elements: int
    weights: int = 0


def find_channel_regions(program: Any, mesh: Mesh, excluded: Collection[str] = ()) -> set[Node]:
    """Return the nodes of a program that are partitioned by channels; the same ones on all ranks.

    Parameters
    ----------
    program
        Result of `capture_module`.
    excluded : collection of str
        Paths of modules whose nodes are not partitioned by channels.
    """
    if prod(mesh.parts[1:]) == 1 or excluded:
        return set()
    read_inputs = {node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs}
    chosen: set[Node] = set()
    region: list[Node] = []
    saved = best = 0.0
    best_length = largest = 0
    for node in program.graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and read_inputs.isdisjoint(node.all_input_nodes)):
            continue  # or computed from parameters alone
        read_inputs.add(node)
        estimate = estimate_node(node, mesh) if node.op == "call_function" else None
        if estimate is not None and (region or estimate.weights):
            largest = max(largest, estimate.weights)
            if estimate.elements <= largest:
                region.append(node)
                saved += estimate.saved
                if saved > best:
                    best, best_length = saved, len(region)
                elif saved < 0:  # a region that begins later saves more
                    region, saved, best, best_length, largest = [], 0.0, 0.0, 0, 0
                continue
        chosen.update(region[:best_length] if best > BORDER_SECONDS else ())
        region, saved, best, best_length, largest = [], 0.0, 0.0, 0, 0
    return chosen


def estimate_node(node: Node, mesh: Mesh) -> _NodeEstimate | None:
    """Return the estimate for a node, or None if it cannot be partitioned by channels."""
    target, out = node.meta.get("out_of_place", node.target), node.meta.get("val")
    if target is operator.getitem:
        return _NodeEstimate(0.0, 0)
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = str(target)
    if name in _PRODUCTS:
        return _estimate_product(bind_arguments(target, node.args, node.kwargs), out, mesh)
    if name in _BATCH_NORMS:
        trains = bind_arguments(target, node.args, node.kwargs).get("training", "no_training" not in name)
        return _NodeEstimate(SECONDS_PER_MESSAGE if trains else 0.0, 0)
    is_pointwise = torch.Tag.pointwise in target.tags or name in POINTWISE_OPS
    return _NodeEstimate(0.0, 0) if is_pointwise or name in _OTHERS else None


def _estimate_product(given: Mapping[str, Any], out: Any, mesh: Mesh) -> _NodeEstimate | None:
    """Return the estimate for a convolution or a product of matrices with the given arguments."""
    x, weight, groups = given["x"].meta["val"], given["weight"].meta["val"], given.get("groups", 1)
    kernel, cells, parts = weight.shape[2:], out.shape[2:], mesh.parts[1:]
    if x.dim() != weight.dim() or len(kernel) not in (0, mesh.spatial):
        return None
    units, ranks = weight.shape[0] if groups == 1 else groups, prod(parts)
    share = ceil(units / ranks) / units if units >= ranks else 1.0
    tile = prod(ceil(n / p) for n, p in zip(cells, parts, strict=False))
    seconds_per_cell = 6 * ceil(x.shape[0] / mesh.parts[0]) * weight.numel() / FLOPS_PER_SECOND
    weight_pass = x.element_size() * weight.numel() / BYTES_PER_SECOND
    halo = 2 * SECONDS_PER_MESSAGE if max(kernel, default=1) > 1 else 0.0
    by_cells = seconds_per_cell * tile + weight_pass * WEIGHT_PASSES + halo
    # gradients of other ranks' weights are zeros, written and added
    by_channels = seconds_per_cell * prod(cells) * share + weight_pass * (WEIGHT_PASSES * share + 2 * (1 - share))
    inputs, results = _elements(x, mesh), _elements(out, mesh)
    if groups > 1:
        return _NodeEstimate(by_cells - by_channels, inputs + results)
    by_channels += 2 * SECONDS_PER_MESSAGE + INPUT_PASSES * x.element_size() * inputs / BYTES_PER_SECOND
    return _NodeEstimate(by_cells - by_channels, inputs + results, weight.numel())


def _elements(tensor: torch.Tensor, mesh: Mesh) -> int:
    """Return the number of elements for the samples of one replica."""
    return prod(tensor.shape[1:]) * ceil(tensor.shape[0] / mesh.parts[0])
