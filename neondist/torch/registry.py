"""The rules by which operators are distributed; a rule is a small function, and users may add their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Rule for distributing an operator.

    Attributes
    ----------
    function : callable
        `function(lowering, **arguments) -> Value`: the operator's arguments by the names of its schema, of which `self`
        and `input` are `x`.
    always : bool
        Whether the rule also applies where every rank has all arguments whole.
    whole : tuple of str
        Names of arguments that the function is given with all indices on every rank.
    """

    function: Callable[..., Any]
    always: bool
    note: str
    whole: tuple[str, ...] = ()


TRACING = threading.Lock()
"""Held while PyTorch traces, since it replaces functions of its modules meanwhile: virtual ranks take turns."""
RULES: dict[str, Rule] = {}
POINTWISE: set[str] = set()
CAPTURED_AS: dict[Any, Callable[..., Any]] = {}
"""Functions of PyTorch that refuse tensors by their values, and what is captured in their place."""


def rule(
    *names: str, always: bool = False, whole: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the rule of operators.

    Parameters
    ----------
    names : str
        Operator names as printed by torch.export, such as 'aten.conv2d.default'.
    always : bool
        Whether the rule also applies where every rank has all arguments whole.
    whole : sequence of str
        Names of arguments that every rank needs whole, such as weights that a module computes from cells.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        note = (function.__doc__ or "").strip().split("\n")[0]
        RULES.update({name: Rule(function, always, note, tuple(whole)) for name in names})
        return function

    return register


def pointwise(*names: str) -> None:
    """Say of operators that each of their results depends on one index of each argument."""
    POINTWISE.update(names)


def table() -> list[tuple[str, str, list[str]]]:
    """Return (kind, what is done, operators) for all operators that have a rule; kinds are the modules of `rules`."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, known in RULES.items():
        found.setdefault((known.function.__module__.rpartition(".")[2], known.note), []).append(name)
    rows = [(kind, note, names) for (kind, note), names in found.items()]
    rows.append(("pointwise", "Local: one index of each argument.", sorted(POINTWISE - set(RULES))))
    return sorted(rows)
