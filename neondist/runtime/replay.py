"""CUDA graphs of training passes: the host launches two graphs instead of hundreds of kernels."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from ..backends import Kernels
from ..registry import Registered

WARMUP_PASSES = 2  # ordinary passes before capture of a kind, to compile and select kernels and allocate memory
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
        captured_pass, self._forward = kernels.capture_graph(lambda: forward(self._x))
        try:
            self._output, self._dy = captured_pass.output, kernels.xp.zeros_like(captured_pass.output)
            _, self._backward = kernels.capture_graph(lambda: backward(captured_pass, self._dy), self._forward)
        finally:
            captured_pass.close()

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
    components : iterable of Registered
        Objects whose code a pass runs: layers, activations, border schemes. Graphs are not used if such code is
        user-defined or depends on the step number, because kernel launches may then differ between passes.
    """

    def __init__(self, kernels: Kernels, components: Iterable[Registered]) -> None:
        unique_components = list({id(part): part for part in components}.values())
        self.is_usable = kernels.supports_capture and all(map(_is_same_every_step, unique_components))
        #: (component, attribute name) of numbers and strings, which users may assign between steps
        self._user_settings = [
            (part, name) for part in unique_components for name in part.arguments() if _is_plain_value(part, name)
        ]
        self._graphs: OrderedDict[Hashable, int | PassGraphs] = OrderedDict()

    def get_or_capture(self, pass_kind: Hashable, capture: Callable[[], PassGraphs]) -> PassGraphs | None:
        """Return the graphs of a kind, captured by `capture` after WARMUP_PASSES passes; None if not captured."""
        if not self.is_usable:
            return None
        pass_kind = pass_kind, *(getattr(component, name) for component, name in self._user_settings)
        cached = self._graphs.pop(pass_kind, 0)
        if cached == WARMUP_PASSES:
            try:
                cached = capture()
            except Exception as error:  # an ordinary pass raises the error again, or succeeds
                self.is_usable = False
                self._graphs.clear()
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                warnings.warn(f"CUDA graph capture failed; steps may be slower: {reason}", stacklevel=2)
                return None
        elif isinstance(cached, int):
            cached += 1
        self._graphs[pass_kind] = cached
        if len(self._graphs) > MAX_CACHED_PASS_KINDS:
            self._graphs.popitem(last=False)
        return None if isinstance(cached, int) else cached


def _is_plain_value(component: Registered, name: str) -> bool:
    return isinstance(getattr(component, name, None), (int, float, str))


def _is_same_every_step(component: Registered) -> bool:
    packages = {cls.__module__.partition(".")[0] for cls in type(component).__mro__}
    return packages <= {"neondist", "abc", "builtins"} and not getattr(component, "step_dependent", False)
