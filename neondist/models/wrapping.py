"""Something that stands before the passes of layers for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..layers import Layer

PASSES = ("fprop", "bprop")


@contextmanager
def wrapped(layers: Sequence[Layer], wrap: Callable[[Layer, str, Any], Any]) -> Iterator[None]:
    """Let what `wrap(layer, name, method)` returns stand for `fprop` and `bprop` of every layer, in the block.

    Others may have put something before these methods already, such as the clock of a benchmark: it is called as the
    method, and stays.
    """
    before = [{name: vars(layer)[name] for name in PASSES if name in vars(layer)} for layer in layers]
    for layer in layers:
        vars(layer).update({name: wrap(layer, name, getattr(layer, name)) for name in PASSES})
    try:
        yield
    finally:
        for layer, methods in zip(layers, before, strict=True):
            for name in PASSES:
                del vars(layer)[name]
            vars(layer).update(methods)
