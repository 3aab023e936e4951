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


def detach_no_grad_values(program: Any, place: Callable[[Any], str]) -> None:
    """Detach values computed under no_grad or inference_mode, and bypass parameter writes that autograd misses.

    Parameters
    ----------
    place : callable
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
                place(node),
            )
    inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    last_writes: dict[Any, tuple[Any, Any]] = {}
    assigned_storages: set[int] = set()
    for node, outer, old, hidden in [*_in_place_writes(program)]:
        kind = inputs[old.name].kind if old.name in inputs else None
        if hidden and kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise CaptureError(
                f"{node.target} modifies a tensor in place under torch.no_grad() or through .detach(), so that"
                " gradients ignore the change; create a new tensor instead", place(node),
            )  # fmt: skip
        is_assignment = node.target is torch.ops.aten.copy_.default and node.args[2:] == DATA_ASSIGNMENT_FLAGS
        if storage_id(old.meta["val"]) in assigned_storages or (is_assignment and _has_aliases(graph, node, outer)):
            raise CaptureError(
                "assigning Tensor.data is not recorded if the old or new values are also used through another tensor;"
                " use copy_() instead", place(node),
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
                " the parameter before it is read, or in the training loop", place(node),
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
    program.graph_module.recompile()


def _in_place_writes(program: Any) -> Iterator[tuple[Any, Any, Any, bool]]:
    """Yield (node, outer, first, hidden) for each node that writes in place.

    `outer` is the node itself, or the node of the region that contains it; `first` is the first node in the written
    memory; `hidden` tells whether autograd misses the write.
    """
    module = program.graph_module
    first: dict[int, Any] = {}
    detached: set[int] = set()
    for node in module.graph.nodes:
        for tensor in tensors_in(node.meta.get("val")):
            first.setdefault(storage_id(tensor), node)
        if node.target is torch.ops.aten.detach.default:
            detached.add(storage_id(node.meta["val"]))
        region = node.target is GRAD_MODE_REGION and node.args[0] is False
        for inner in getattr(module, node.args[1].target).graph.nodes if region else [node]:
            for old in written_values(inner):
                memory = storage_id(old.meta["val"]) if isinstance(old, torch.fx.Node) else None
                if memory in first:
                    yield inner, node, first[memory], region or memory in detached


def _has_aliases(graph: Any, write: Any, outer: Any) -> bool:
    """Return whether the old values of assigned data are used later, or the new values are in an input's memory."""
    old, new = (storage_id(value.meta["val"]) for value in write.args[:2])
    inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    if new in map(storage_id, tensors_in(inputs)):
        return True
    for end in (write, outer):
        positions = {node: position for position, node in enumerate(end.graph.nodes)}
        for node in list(positions)[: positions[end]]:
            is_alias = node.op == "call_function" and old in map(storage_id, tensors_in(node.meta.get("val")))
            if is_alias and any(user is not write and positions[user] >= positions[end] for user in node.users):
                return True
    return False


def _bypass_writes(module: Any, parameter: Any, last_write: Any) -> bool:
    """Let reads of a parameter after writes hidden from autograd pass their gradients to the parameter.

    Returns False if a parameter that requires gradients is read before its last write.
    """
    graph, ops, names = module.graph, torch.ops.aten, {parameter}
    positions = {node: position for position, node in enumerate(graph.nodes)}
    names.update(node for node in graph.nodes if _modified_value(module, node) in names)
    users = {user for name in names for user in name.users} - names
    reads = [user for user in users if user.target not in (ops.detach.default, GRAD_MODE_REGION)]
    late = {read for read in reads if positions[read] > positions[last_write]}
    before = parameter.meta["val"]
    if not before.is_floating_point() and not before.is_complex():
        return True
    if before.requires_grad and len(late) < len(reads):
        return False

    def add(function: Any, *args: Any) -> Any:
        node = graph.call_function(function, args)
        node.meta = last_write.meta | {"val": before.detach().clone()}
        return node

    with torch.no_grad():
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            zeros = add(ops.sub.Tensor, parameter, add(ops.detach.default, parameter))  # zeros with a gradient
        with graph.inserting_before(last_write.next):
            result = add(ops.add.Tensor, add(ops.detach.default, parameter), zeros)
    for name in names:
        name.replace_all_uses_with(result, late.__contains__)
    return True


def _modified_value(module: Any, node: Any) -> Any:
    """Return the value that a node modifies in place and returns; None if it modifies none."""
    if node.target is operator.getitem and node.args[0].target is GRAD_MODE_REGION:
        region, index = node.args
        inner = getattr(module, region.args[1].target).graph
        *_, output = inner.nodes
        value = output.args[0][index]
        while (before := _modified_value(module, value)) is not None:
            value = before
        placeholders = [node for node in inner.nodes if node.op == "placeholder"]
        return region.args[2 + placeholders.index(value)] if value in placeholders else None
    written = written_values(node)
    return node.args[0] if written and written == [*node.args[:1]] else None
