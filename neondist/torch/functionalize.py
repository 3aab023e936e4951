"""Mutated arguments of operators in a captured graph, and whether reading results instead is equivalent."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
"""Calls a part of a program with or without gradients."""
RUNNING = "running_mean", "running_var"
"""Statistics that operators write into in training, though their schemas do not tell."""
_WITH_STATISTICS = torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default
"""Whose rules return the statistics after the result."""
_DECOMPOSED = "aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm", "aten::_batch_norm_impl_index"
"""With such writes, which their rules or decompositions give as results."""
_TRAINING = "training", "train", "use_input_stats"
_PURE = "backward", "functional", "no_training", "no_update"


def is_simple(graph: Any, buffers: Collection[str] = ()) -> bool:
    """Return whether all that is written into may be replaced by what is written, from there on.

    This holds if no alias of the memory is read later, and only buffers outlive the program. PyTorch does
    it for all others, but traces the whole module once more. Operators in place have their functional twins noted.

    Parameters
    ----------
    buffers : of str
        Names of the graph's inputs that are buffers.
    """
    nodes = list(graph.nodes)
    called = [node for node in nodes if node.op == "call_function" and node.target is not operator.getitem]
    if not all(isinstance(node.target, torch._ops.OpOverload) for node in called):  # such as torch.vmap's
        return False
    at = {node: place for place, node in enumerate(nodes)}
    names: dict[int, list[Any]] = {}
    for node in nodes:
        for tensor in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(tensor, torch.Tensor) and (node.users or node.op != "placeholder"):
                names.setdefault(memory_of(tensor), []).append(node)
    twins: dict[Any, Any] = {}
    for node in called:
        if written(node):
            twins[node] = node.target if node.target in _WITH_STATISTICS else _twin(node)
        for old in written(node):
            if not isinstance(old, torch.fx.Node) or twins[node] is None:
                return False
            first, *others = found = names[memory_of(old.meta["val"])]
            before = (name for name in found if at[name] < at[node] and name is not old)
            if any(at[user] > at[node] for name in before for user in name.users):
                return False
            is_buffer = old is first and old.name in buffers and all(map(written, others))
            if first.op != "call_function" and not is_buffer:
                return False
    for node, twin in twins.items():
        node.meta = node.meta | {"twin": twin}  # PyTorch lets nodes that it adds share one dictionary with others
    return True


def written(node: Any) -> list[Any]:
    """Return what an operator writes into, in the order of its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [leaf for arg in written_arguments(node.target, node.args, node.kwargs) for leaf in pytree.tree_leaves(arg)]


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes into: tensors, or lists of them."""
    arguments = target._schema.arguments
    names = [arg.name for arg in arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    told = [arg.name for arg in arguments if arg.alias_info and arg.alias_info.is_write]
    if set(RUNNING) <= set(names) - set(told) and not any(word in target._schema.name for word in _PURE):
        trains = all(given.get(name, True) for name in names if name in _TRAINING)
        told += [name for name in RUNNING if trains and given.get(name) is not None]
    return [given.get(name) for name in told]


def writes_unseen(node: Any) -> bool:
    """Return whether an operator writes into statistics in a way that PyTorch's functionalisation does not know."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name in _DECOMPOSED:
        return False
    told = sum(bool(arg.alias_info and arg.alias_info.is_write) for arg in target._schema.arguments)
    return len(written_arguments(target, node.args, node.kwargs)) > told


def keep_statistics(graph: Any) -> None:
    """Let operators of their own write the running statistics of instance norms.

    PyTorch's functionalisation takes these for operators without effects, and drops them where the result is unused.
    """
    ops = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is not ops.instance_norm.default or not (olds := written(node)):
            continue
        x, momentum = node.args[0], node.args[6]
        with graph.inserting_before(node):
            cells = graph.call_function(ops.detach.default, (x,))
            axes = list(range(2, x.meta["val"].dim()))
            moments = graph.call_function(ops.var_mean.correction, (cells, axes), {"correction": 1})
            for old, at in zip(olds, (1, 0), strict=True):
                each = graph.call_function(operator.getitem, (moments, at))
                mean = graph.call_function(ops.mean.dim, (each, [0]))
                kept, new = (
                    graph.call_function(ops.mul.Tensor, (value, share))
                    for value, share in ((old, 1 - momentum), (mean, momentum))
                )
                graph.call_function(ops.copy_.default, (old, graph.call_function(ops.add.Tensor, (kept, new))))
        node.args = (*node.args[:3], None, None, *node.args[5:])


def note_result(env: dict[Any, Any], node: Any, found: Any) -> list[Any]:
    """Note in `env` what a node gives, also of what it writes into: that is read from there on; return the latter."""
    env[node] = found
    if olds := written(node):
        env[node], *news = found if type(found) is tuple else [found] * (1 + len(olds))
        env.update(zip(olds, news, strict=True))
    return olds


def _twin(node: Any) -> Any:
    """Return the operator that gives what one in place writes into its first argument; None: there is none."""
    schema = node.target._schema
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    if packet is None or written(node) != list(node.args[:1]):
        return None
    overloads = [getattr(packet, name) for name in packet.overloads()]
    # the first is called otherwise in some, such as dropout
    found = next((f for f in overloads if not f._schema.is_mutable and _takes(f) == _takes(node.target)), None)
    if found is None:
        return None
    args, kwargs = pytree.tree_map(
        lambda arg: arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg, (node.args, dict(node.kwargs))
    )
    with torch.no_grad():
        made, old = found(*args, **kwargs), node.meta["val"]
    return found if (made.shape, made.dtype) == (old.shape, old.dtype) else None


def _takes(operator: Any) -> tuple[list[str], list[str]]:
    """Return the types of an operator's arguments, and the names of all but the first."""
    arguments = operator._schema.arguments
    return [str(arg.type) for arg in arguments], [arg.name for arg in arguments[1:]]


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that is the same for tensors in the same memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # inside of torch.vmap
        return id(tensor)
