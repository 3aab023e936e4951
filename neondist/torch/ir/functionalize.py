"""Mutated arguments of operators in a captured graph, and their replacement by results."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .errors import CaptureError

GRAD_MODE_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
"""Operator that runs a subgraph with or without gradients."""
RUNNING_STATS = "running_mean", "running_var"
"""Arguments that operators update in training, although their schemas do not declare it."""
_OPS_RETURNING_STATISTICS = torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default
"""Operators whose rules return the statistics after the result."""
_OPS_WITH_RULES = ("aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::_batch_norm_impl_index")
"""Operators with undeclared writes whose rules or decompositions return the written values as results."""
_TRAINING_ARGUMENTS = "training", "train", "use_input_stats"
_PURE_WORDS = "backward", "functional", "no_training", "no_update"
_SCATTER_OPS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal.default: torch.ops.aten.diagonal_scatter.default,
}
"""Views, and the operators that write into a copy of the viewed tensor."""


def store_out_of_place_variants(graph: Any, buffers: Collection[str] = ()) -> bool:
    """Store out-of-place variants of operators in `node.meta`; return whether they can replace all writes.

    They can if no other alias of written memory is read after the write, and buffers are the only inputs written.
    Tensors written through a slice, an element or a diagonal may be read afterwards: the part is inserted into a copy.
    Otherwise, PyTorch's functionalisation is needed, which traces the whole module again.

    Parameters
    ----------
    buffers : collection of str
        Names of the graph's inputs that are buffers.
    """
    nodes = list(graph.nodes)
    operators = [node for node in nodes if node.op == "call_function" and node.target is not operator.getitem]
    if not all(isinstance(node.target, torch._ops.OpOverload) for node in operators):  # such as torch.vmap
        return False
    positions = {node: position for position, node in enumerate(nodes)}
    last_uses = {node: max(map(positions.__getitem__, node.users), default=-1) for node in nodes}
    nodes_by_storage: dict[int, list[Any]] = {}
    for node in nodes:
        for tensor in tensors_in(node.meta.get("val")) if node.users or node.op != "placeholder" else ():
            nodes_by_storage.setdefault(storage_id(tensor), []).append(node)
    variants: dict[Any, Any] = {}
    view_chains: dict[Any, list[tuple[Any, Any]]] = {}
    for node in operators:
        if written_values(node):
            variants[node] = node.target if node.target in _OPS_RETURNING_STATISTICS else _out_of_place_variant(node)
        for target in written_values(node):
            if not isinstance(target, torch.fx.Node) or variants[node] is None:
                return False
            first_alias, *other_aliases = aliases = nodes_by_storage[storage_id(target.meta["val"])]
            view_chains[node] = list(_views_and_bases(target))
            written = [target, *(base for _, base in view_chains[node])]
            old_aliases = (alias for alias in aliases if positions[alias] < positions[node] and alias not in written)
            if any(last_uses[alias] > positions[node] for alias in old_aliases):
                return False
            while view_chains[node] and last_uses[view_chains[node][-1][1]] < positions[node]:
                view_chains[node].pop()
            if view_chains[node] and len(written_values(node)) > 1:
                return False
            is_buffer = target is first_alias and target.name in buffers and all(map(written_values, other_aliases))
            if first_alias.op != "call_function" and not is_buffer:
                return False
    for node, variant in variants.items():
        node.meta = node.meta | {"out_of_place": variant}  # not in place: PyTorch lets nodes share one dictionary
    _insert_scatters(graph, view_chains, positions)
    return True


def _insert_scatters(graph: Any, view_chains: Mapping[Any, Sequence[Any]], positions: Mapping[Any, int]) -> None:
    """Insert parts written through views into copies of the viewed tensors, which later nodes read instead.

    Parameters
    ----------
    view_chains : dict of node to sequence of (node, node)
        Views and the tensors that they are parts of, for each node that writes.
    positions : dict of node to int
        Positions in the graph as captured.
    """
    current_values: dict[Any, Any] = {}
    for node, chain in view_chains.items():
        later_nodes = {user for user, position in positions.items() if position > positions[node]} if chain else set()
        written = node
        for view, base in chain:
            old = current_values.get(base, base)
            with graph.inserting_after(written):
                new = graph.call_function(_SCATTER_OPS[view.target], (old, written, *view.args[1:]), dict(view.kwargs))
            new.meta = node.meta | {"val": base.meta["val"]}
            del new.meta["out_of_place"]
            old.replace_all_uses_with(new, later_nodes.__contains__)
            current_values[base] = written = new


def _views_and_bases(target: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes (view, viewed tensor) of each view on the way from the target to the whole tensor."""
    while target.args and written_values(target) == [target.args[0]]:
        target = target.args[0]
    if target.target in _SCATTER_OPS:
        yield target, target.args[0]
        yield from _views_and_bases(target.args[0])


def written_values(node: Any) -> list[Any]:
    """Return the values that an operator writes to, in the order of its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [leaf for arg in written_arguments(node.target, node.args, node.kwargs) for leaf in pytree.tree_leaves(arg)]


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to: tensors, or lists of them."""
    arguments = target._schema.arguments
    names = [arg.name for arg in arguments]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    written = [arg.name for arg in arguments if arg.alias_info and arg.alias_info.is_write]
    if set(RUNNING_STATS) <= set(names) - set(written) and not any(word in target._schema.name for word in _PURE_WORDS):
        is_training = all(values.get(name, True) for name in names if name in _TRAINING_ARGUMENTS)
        written += [name for name in RUNNING_STATS if is_training and values.get(name) is not None]
    return [values.get(name) for name in written]


def has_undeclared_writes(node: Any) -> bool:
    """Return whether an operator updates statistics without declaring it, and has no rule that returns them."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name in _OPS_WITH_RULES:
        return False
    num_declared = sum(bool(arg.alias_info and arg.alias_info.is_write) for arg in target._schema.arguments)
    return len(written_arguments(target, node.args, node.kwargs)) > num_declared


def clone_aliased_buffer_values(graph: Any) -> None:
    """Clone values assigned to buffers if they share memory with another assigned buffer.

    torch.export copies the assigned values to the buffers one after another at the end of the program.
    """
    copies = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    copies = [node for node in copies if node.meta is node.args[1].meta]  # added by torch.export, not the module's own
    buffer_storages = {storage_id(node.args[0].meta["val"]) for node in copies}
    for node in copies:
        buffer, value = node.args
        if storage_id(value.meta["val"]) in buffer_storages - {storage_id(buffer.meta["val"])}:
            with graph.inserting_before(copies[0]), torch.no_grad():
                clone = graph.call_function(torch.ops.aten.clone.default, (value,))
                clone.meta = value.meta | {"val": value.meta["val"].clone()}
            node.args = (buffer, clone)


def separate_statistics_updates(graph: Any) -> None:
    """Update the running statistics of instance norms by separate operators.

    PyTorch's functionalisation treats instance norms as free of side effects, and drops them if the result is unused.
    """
    ops = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is not ops.instance_norm.default or not (olds := written_values(node)):
            continue
        x, momentum = node.args[0], node.args[6]
        with graph.inserting_before(node):
            detached = graph.call_function(ops.detach.default, (x,))
            axes = list(range(2, x.meta["val"].dim()))
            var_and_mean = graph.call_function(ops.var_mean.correction, (detached, axes), {"correction": 1})
            for old, index in zip(olds, (1, 0), strict=True):
                statistic = graph.call_function(operator.getitem, (var_and_mean, index))
                mean = graph.call_function(ops.mean.dim, (statistic, [0]))
                factors = (old, 1 - momentum), (mean, momentum)
                terms = tuple(graph.call_function(ops.mul.Tensor, pair) for pair in factors)
                graph.call_function(ops.copy_.default, (old, graph.call_function(ops.add.Tensor, terms)))
        node.args = (*node.args[:3], None, None, *node.args[5:])


def reject_writes_through_windows(graph: Any) -> None:
    """Reject writes through Tensor.unfold: PyTorch's functionalisation sets cells outside of all windows to zero."""
    for node in graph.nodes:
        for view in written_values(node):
            while isinstance(view, torch.fx.Node) and view.target is not torch.ops.aten.unfold.default:
                base: Any = view.args[0] if view.args else None
                is_view = isinstance(base, torch.fx.Node) and isinstance(base.meta.get("val"), torch.Tensor)
                view = base if is_view and storage_id(base.meta["val"]) == storage_id(view.meta["val"]) else None
            if view is not None:
                raise CaptureError("a write through Tensor.unfold is not recorded; write to slices instead")


def store_result(env: dict[Any, Any], node: Any, result: Any) -> list[Any]:
    """Store a node's result in `env`, and the new values of the nodes that it overwrites; return these nodes."""
    env[node] = result
    if targets := written_values(node):
        env[node], *values = result if type(result) is tuple else [result] * (1 + len(targets))
        env.update(zip(targets, values, strict=True))
    return targets


def _out_of_place_variant(node: Any) -> Any:
    """Return the out-of-place variant of an operator that writes only to its first argument, or None."""
    variant = _overload_without_writes(node.target)
    if variant is None or written_values(node) != list(node.args[:1]):
        return None
    # the variant may lack a default, such as p=0.5 of bernoulli_
    for argument in node.target._schema.arguments[len(node.args) :]:
        if argument.name not in node.kwargs and argument.has_default_value():
            node.update_kwarg(argument.name, argument.default_value)
    args, kwargs = pytree.tree_map(
        lambda arg: arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg, (node.args, dict(node.kwargs))
    )
    with torch.no_grad():
        result, expected = variant(*args, **kwargs), node.meta["val"]
    return variant if (result.shape, result.dtype) == (expected.shape, expected.dtype) else None


@cache
def _overload_without_writes(target: Any) -> Any:
    """Return the operator without writes that has the same name and arguments, or None."""
    packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    # the first argument may have another name, such as in dropout
    types = _argument_types_and_names(target)
    return next((f for f in overloads if not f._schema.is_mutable and _argument_types_and_names(f) == types), None)


def _argument_types_and_names(operator: Any) -> tuple[list[str], list[str]]:
    """Return the types of an operator's arguments, and the names of all but the first."""
    arguments = operator._schema.arguments
    return [str(arg.type) for arg in arguments], [arg.name for arg in arguments[1:]]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a tree."""
    leaves = [tree] if isinstance(tree, torch.Tensor) else pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors sharing memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # inside torch.vmap; sparse tensors
        return id(tensor)
