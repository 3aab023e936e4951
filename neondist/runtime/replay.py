"""CUDA graphs of training passes: the host launches two graphs instead of hundreds of kernels."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from ..backends import Kernels
from ..registry import Registered

WARMUP_PASSES = 2  # ordinary passes of a kind before capture, which compile and select kernels and allocate memory
MAX_CACHED_PASS_KINDS = 4  # kinds of passes whose graphs are kept; the least recently used are evicted


class PassGraphs:
    """The graphs of one kind of pass: forward and backward.

    Parameters
    ----------
    kernels : Kernels
        Kernels whose `supports_capture` is True.
    forward : callable
        Returns a new pass for an array of images.
    backward : callable
        Runs a pass backward, given the gradient of its output.
    """

    def __init__(self, kernels: Kernels, forward: Callable[[Any], Any], backward: Callable[[Any, Any], Any], x: Any):
        self._kernels, self._x = kernels, x.copy()
        run, self._forward = kernels.capture_graph(lambda: forward(self._x))
        try:
            self._output, self._dy = run.output, kernels.xp.zeros_like(run.output)
            _, self._backward = kernels.capture_graph(lambda: backward(run, self._dy), self._forward)
        finally:
            run.close()

    def forward(self, x: Any) -> Any:
        """Return the output for images, valid until `backward`."""
        self._kernels.copy(x, self._x)
        self._forward.replay()
        return self._output

    def backward(self, dy: Any) -> None:
        """Run the last pass backward, given the gradient of its output."""
        self._kernels.copy(dy, self._dy)
        self._backward.replay()


class PassGraphCache:
    """Cache of the graphs of an executor's passes.

    Parameters
    ----------
    parts : iterable of Registered
        Objects whose code a pass runs: layers, activations, border schemes. Graphs are not used with user-defined
        code or code that depends on the step number, whose kernel launches may differ between passes.
    """

    def __init__(self, kernels: Kernels, parts: Iterable[Registered]) -> None:
        unique = list({id(part): part for part in parts}.values())
        self.is_usable = kernels.supports_capture and all(map(_is_same_every_step, unique))
        #: attributes (part, name) that are numbers or strings, which users may assign between steps
        self._user_settings = [
            (part, name) for part in unique for name in part.arguments() if _is_plain_value(part, name)
        ]
        self._graphs: OrderedDict[Hashable, int | PassGraphs] = OrderedDict()

    def get_or_capture(self, kind: Hashable, capture: Callable[[], PassGraphs]) -> PassGraphs | None:
        """Return the graphs of a kind, captured by `capture` after WARMUP_PASSES passes; None if not captured."""
        if not self.is_usable:
            return None
        kind = kind, *(getattr(part, name) for part, name in self._user_settings)
        entry = self._graphs.pop(kind, 0)
        if entry == WARMUP_PASSES:
            try:
                entry = capture()
            except Exception as error:  # an ordinary pass raises the error again, or succeeds
                self.is_usable = False
                self._graphs.clear()
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                warnings.warn(f"CUDA graph capture failed; steps may be slower: {reason}", stacklevel=2)
                return None
        elif isinstance(entry, int):
            entry += 1
        self._graphs[kind] = entry
        if len(self._graphs) > MAX_CACHED_PASS_KINDS:
            self._graphs.popitem(last=False)
        return None if isinstance(entry, int) else entry


def _is_plain_value(part: Registered, name: str) -> bool:
    return isinstance(getattr(part, name, None), (int, float, str))


def _is_same_every_step(part: Registered) -> bool:
    packages = {cls.__module__.partition(".")[0] for cls in type(part).__mro__}
    return packages <= {"neondist", "abc", "builtins"} and not getattr(part, "step_dependent", False)
