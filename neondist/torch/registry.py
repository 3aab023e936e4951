"""The rules by which operators are distributed; a rule is a small function, and users may add their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Rule(NamedTuple):
    """How an operator is distributed.

    Attributes
    ----------
    function : callable
        `function(lowering, **arguments) -> Value`: the operator's arguments by the names of its schema, of which `self`
        and `input` are `x`.
    always : bool
        Whether it is asked even where every rank has all of the arguments.
    """

    function: Callable[..., Any]
    always: bool
    note: str


TRACING = threading.Lock()
"""Held while PyTorch traces, since it replaces functions of its modules meanwhile: virtual ranks take turns."""
RULES: dict[str, Rule] = {}
POINTWISE: set[str] = set()


def rule(*names: str, always: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function the rule of operators.

    Parameters
    ----------
    names : str
        As torch.export prints them: 'aten.conv2d.default'.
    always : bool
        Whether it is asked even where every rank has all of the arguments.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        note = (function.__doc__ or "").strip().split("\n")[0]
        RULES.update({name: Rule(function, always, note) for name in names})
        return function

    return register


def pointwise(*names: str) -> None:
    """Say of operators that each of their results depends on one index of each argument."""
    POINTWISE.update(names)


def decomposed(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fake: Callable[[Any], Any]
) -> torch.fx.GraphModule | None:
    """Return an operator in terms of simpler ones, as PyTorch defines it; None: it is as simple as can be."""
    from torch._decomp import decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx

    from .plan import Value

    table = decomposition_table.get(target)
    if table is None and not target._can_decompose():
        return None
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Value)]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            filled[i] = tensor
        given, named = pytree.tree_unflatten(filled, spec)
        return (table or target.decompose)(*given, **named)

    try:
        with TRACING:
            return make_fx(run, tracing_mode="fake")(*[fake(leaves[i]) for i in at])
    except Exception:  # what cannot be traced cannot be taken apart
        return None


def table() -> list[tuple[str, str, list[str]]]:
    """Return (kind, what is done, operators) for all operators that have a rule; kinds are the modules of `rules`."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, known in RULES.items():
        found.setdefault((known.function.__module__.rpartition(".")[2], known.note), []).append(name)
    rows = [(kind, note, names) for (kind, note), names in found.items()]
    rows.append(("pointwise", "Local: one index of each argument.", sorted(POINTWISE - set(RULES))))
    return sorted(rows)
