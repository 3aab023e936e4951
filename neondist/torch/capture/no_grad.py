"""Detachment of values that a captured module computes without gradients, since decompositions do not preserve this."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from ..ir.errors import CaptureError
from ..ir.functionalize import GRAD_MODE_REGION, has_undeclared_writes, storage_id, tensors_in, written_values


def detach_no_grad_values(program: Any, place: Callable[[Any], str]) -> None:
    """Detach values computed under no_grad or inference_mode.

    Parameters
    ----------
    place : callable
        Returns the file and line of the user's code that created a node.

    Raises
    ------
    CaptureError
        If an in-place write is hidden from autograd, or is not declared in the operator's schema.
    """
    graph = program.graph_module.graph
    for node in graph.nodes:
        if has_undeclared_writes(node):
            raise CaptureError(
                f"{node.target} modifies running statistics, undeclared in its schema; use batch_norm instead",
                place(node),
            )
    inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node, old, hidden in _in_place_writes(program):
        source = inputs.get(old.name)
        if hidden and (source is None or source.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)):
            what, remedy = "a tensor", "create a new tensor instead"
            if source is not None and source.kind == InputKind.PARAMETER:
                what, remedy = f"the parameter {source.target!r}", "change it in the training loop, or use a buffer"
            raise CaptureError(
                f"{node.target} modifies {what} in place under torch.no_grad() or through .detach(), so that"
                f" gradients ignore the change; {remedy}", place(node),
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


def _in_place_writes(program: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Yield each node that writes in place, the first node in its memory, and whether autograd misses the write."""
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
                    yield inner, first[memory], region or memory in detached
