"""Passes of training whose launches a device repeats: the host starts two graphs instead of hundreds of kernels."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from ..backends import Kernels
from ..registry import Registered

WARM = 2
"""Ordinary passes of a kind before its graphs are made: kernels are compiled and chosen, and memory is taken."""
KEPT = 4
"""Kinds, of those that were used last."""


class PassGraphs:
    """The graphs of one kind of pass: forward, and back.

    Parameters
    ----------
    kernels : Kernels
        Of a device that `captures`.
    forward : callable
        Returns a new pass for an array of images.
    backward : callable
        Takes a pass back, given the gradient of its output.
    x : array
        Images.
    """

    def __init__(self, kernels: Kernels, forward: Callable[[Any], Any], backward: Callable[[Any, Any], Any], x: Any):
        self._kernels, self._x = kernels, x.copy()
        run, self._forward = kernels.capture(lambda: forward(self._x))
        try:
            self._output, self._dy = run.output, kernels.xp.zeros_like(run.output)
            _, self._backward = kernels.capture(lambda: backward(run, self._dy), self._forward)
        finally:
            run.close()

    def forward(self, x: Any) -> Any:
        """Return the output for images; it is valid until `backward`."""
        self._kernels.copy(x, self._x)
        self._forward.replay()
        return self._output

    def backward(self, dy: Any) -> None:
        """Go back through the last pass, given the gradient of its output."""
        self._kernels.copy(dy, self._dy)
        self._backward.replay()


class Replays:
    """The graphs of an executor's passes, by what they depend on.

    Parameters
    ----------
    parts : iterable of Registered
        What has code that a pass runs: layers, activations, border schemes. Where a user wrote it, or the step's number
        matters, no graphs are used: the launches of the next pass may be others.
    """

    def __init__(self, kernels: Kernels, parts: Iterable[Registered]) -> None:
        each = list({id(part): part for part in parts}.values())
        self.usable = kernels.captures and all(map(_same_every_step, each))
        #: numbers and strings, which may be assigned between steps
        self._settings = [(part, name) for part in each for name in part.arguments() if _is_plain(part, name)]
        self._found: OrderedDict[Hashable, int | PassGraphs] = OrderedDict()

    def of(self, kind: Hashable, make: Callable[[], PassGraphs]) -> PassGraphs | None:
        """Return the graphs of a kind, which `make` makes when there were enough passes; None: there are none."""
        if not self.usable:
            return None
        kind = kind, *(getattr(part, name) for part, name in self._settings)
        found = self._found.pop(kind, 0)
        if found == WARM:
            try:
                found = make()
            except Exception as error:  # which an ordinary pass raises too, or can do without graphs
                self.usable = False
                self._found.clear()
                what = str(error).partition("\n")[0]
                warnings.warn(f"no CUDA graphs, steps may be slower: {type(error).__name__}: {what}", stacklevel=2)
                return None
        elif isinstance(found, int):
            found += 1
        self._found[kind] = found
        if len(self._found) > KEPT:
            self._found.popitem(last=False)
        return None if isinstance(found, int) else found


def _is_plain(part: Registered, name: str) -> bool:
    return isinstance(getattr(part, name, None), (int, float, str))


def _same_every_step(part: Registered) -> bool:
    packages = {cls.__module__.partition(".")[0] for cls in type(part).__mro__}
    return packages <= {"neondist", "abc", "builtins"} and not getattr(part, "by_step", False)
