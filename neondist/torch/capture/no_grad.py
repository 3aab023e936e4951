"""Detachment of values that a captured module computes under no_grad, since decompositions drop the mode."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from ..ir.custom_gradients import DATA_ASSIGNMENT_FLAGS
from ..ir.errors import CaptureError
from ..ir.functionalize import GRAD_MODE_REGION, has_undeclared_writes, storage_id, tensors_in, written_values


def detach_no_grad_values(program: Any, location_of: Callable[[Any], str]) -> None:
    """Detach values computed under no_grad or inference_mode, and bypass parameter writes that autograd misses.

    Parameters
    ----------
    location_of : callable
        Returns the file and line of the user's code that created a node.

    Raises
    ------
    CaptureError
        If gradients would ignore a write, an operator does not declare a write, or assigned Tensor.data has aliases.
    """
    graph = program.graph_module.graph
    for node in graph.nodes:
        if has_undeclared_writes(node):
            raise CaptureError(
                f"{node.target} modifies running statistics, which its schema does not declare; use batch_norm",
                location_of(node),
            )
    inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    last_writes: dict[Any, tuple[Any, Any]] = {}
    assigned_storages: set[int] = set()
    for node, outer, old, hidden in [*_in_place_writes(program)]:
        kind = inputs[old.name].kind if old.name in inputs else None
        if hidden and kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise CaptureError(
                f"{node.target} modifies a tensor in place under torch.no_grad() or through .detach(), so that"
                " gradients ignore the change; create a new tensor instead", location_of(node),
            )  # fmt: skip
        is_assignment = node.target is torch.ops.aten.copy_.default and node.args[2:] == DATA_ASSIGNMENT_FLAGS
        if storage_id(old.meta["val"]) in assigned_storages or (is_assignment and _has_aliases(graph, node, outer)):
            raise CaptureError(
                "assigning Tensor.data is not recorded if the old or new values are also used through another tensor;"
                " use copy_() instead", location_of(node),
            )  # fmt: skip
        if is_assignment:
            assigned_storages.add(storage_id(node.args[1].meta["val"]))
        if hidden and kind == InputKind.PARAMETER:
            last_writes[old] = node, outer
    for parameter, (node, outer) in last_writes.items():
        if not _bypass_writes(program.graph_module, parameter, outer):
            raise CaptureError(
                f"{node.target} modifies the parameter {inputs[parameter.name].target!r} in place under torch.no_grad()"
                " or through .detach(), after the forward pass has read it, so that gradients ignore the change; change"
                " the parameter before it is read, or in the training loop", location_of(node),
            )  # fmt: skip
    for node in list(graph.nodes):
        results = list(node.users) if node.target is GRAD_MODE_REGION and node.args[0] is False else []
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_inference() and node.op == "call_function":
            results.append(node)
        for result in results:
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            result.replace_all_uses_with(detached, lambda user, keep=detached: user is not keep)


def _in_place_writes(program: Any) -> Iterator[tuple[Any, Any, Any, bool]]:
    """Yield (node, outer, first node, hidden) for each node that writes in place.

    `outer` is the node itself, or the node of the region that contains it. The first node is the first whose value is
    a tensor in the written memory. `hidden` tells whether autograd misses the write.
    """
    graph_module = program.graph_module
    first_nodes: dict[int, Any] = {}
    detached_storages: set[int] = set()
    for node in graph_module.graph.nodes:
        if isinstance(tensor := node.meta.get("val"), torch.Tensor):
            first_nodes.setdefault(storage_id(tensor), node)
        if node.target is torch.ops.aten.detach.default:
            detached_storages.add(storage_id(node.meta["val"]))
        is_no_grad_region = node.target is GRAD_MODE_REGION and node.args[0] is False
        for inner in getattr(graph_module, node.args[1].target).graph.nodes if is_no_grad_region else [node]:
            for old in written_values(inner):
                storage = storage_id(old.meta["val"]) if isinstance(old, torch.fx.Node) else None
                if storage in first_nodes:
                    yield inner, node, first_nodes[storage], is_no_grad_region or storage in detached_storages


def _has_aliases(graph: Any, write_node: Any, outer_node: Any) -> bool:
    """Return whether the old values of assigned data are used later, or the new values are in an input's memory."""
    old_storage, new_storage = (storage_id(value.meta["val"]) for value in write_node.args[:2])
    inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    if new_storage in map(storage_id, tensors_in(inputs)):
        return True
    for end in (write_node, outer_node):
        positions = {node: position for position, node in enumerate(end.graph.nodes)}
        for node in list(positions)[: positions[end]]:
            is_alias = node.op == "call_function" and old_storage in map(storage_id, tensors_in(node.meta.get("val")))
            if is_alias and any(user is not write_node and positions[user] >= positions[end] for user in node.users):
                return True
    return False


def _bypass_writes(graph_module: Any, parameter: Any, last_write: Any) -> bool:
    """Let reads of a parameter after writes hidden from autograd pass their gradients to the parameter.

    Returns False if a parameter that requires gradients is read before its last write.
    """
    graph, ops, aliases = graph_module.graph, torch.ops.aten, {parameter}
    positions = {node: position for position, node in enumerate(graph.nodes)}
    aliases.update(node for node in graph.nodes if _modified_value(graph_module, node) in aliases)
    users = {user for alias in aliases for user in alias.users} - aliases
    reads = [user for user in users if user.target not in (ops.detach.default, GRAD_MODE_REGION)]
    late_reads = {read for read in reads if positions[read] > positions[last_write]}
    original = parameter.meta["val"]
    if not original.is_floating_point() and not original.is_complex():
        return True
    if original.requires_grad and len(late_reads) < len(reads):
        return False

    def call(function: Any, *args: Any) -> Any:
        node = graph.call_function(function, args)
        node.meta = last_write.meta | {"val": original.detach().clone()}
        return node

    with torch.no_grad():
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            zeros = call(ops.sub.Tensor, parameter, call(ops.detach.default, parameter))  # zeros with a gradient
        with graph.inserting_before(last_write.next):
            result = call(ops.add.Tensor, call(ops.detach.default, parameter), zeros)
    for alias in aliases:
        alias.replace_all_uses_with(result, late_reads.__contains__)
    return True


def _modified_value(graph_module: Any, node: Any) -> Any:
    """Return the value that a node modifies in place and returns; None if it modifies none."""
    if node.target is operator.getitem and node.args[0].target is GRAD_MODE_REGION:
        region, index = node.args
        inner_graph = getattr(graph_module, region.args[1].target).graph
        *_, output = inner_graph.nodes
        value = output.args[0][index]
        while (before := _modified_value(graph_module, value)) is not None:
            value = before
        placeholders = [node for node in inner_graph.nodes if node.op == "placeholder"]
        return region.args[2 + placeholders.index(value)] if value in placeholders else None
    written_nodes = written_values(node)
    return node.args[0] if written_nodes and written_nodes == [*node.args[:1]] else None
