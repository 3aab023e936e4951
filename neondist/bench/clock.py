"""Where the seconds of a model's steps go: by layer and by kind of work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..comm import Exchange, Message, ProcessGrid, Transport
    from ..models import Model

KINDS = ("forward", "backward", "exchange", "wait")
REST = "cost and rest"


class Clock:
    """Charges time to the innermost function at work that it knows.

    It wraps methods of single objects. While `running` is False they run as they are.

    Attributes
    ----------
    seconds : dict of (row, kind) to float
        Rows are layers' names, 'update', 'sum of gradients' and REST; kinds are KINDS. 'exchange' is copying and
        folding on this rank, 'wait' is time inside MPI: messages, and waiting for ranks that are late.
    """

    def __init__(self) -> None:
        self.running = False
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._stack: list[tuple[str, str]] = []
        self._mark = 0.0

    def watch_messages(self, grid: ProcessGrid) -> None:
        """Count what the grid's transports do as 'wait'; call it before a model is built, which plans its messages."""
        for transport in {id(t): t for t in (grid.world, grid.tile_comm, grid.replica_comm)}.values():
            self._watch_transport(transport)

    def watch_model(self, model: Model) -> None:
        """Count what a built model does, by layer."""
        for layer in model.leaves:
            self._wrap(layer, "fprop", str(layer.name), "forward")
            self._wrap(layer, "bprop", str(layer.name), "backward")
            for array in layer.arrays:
                self._wrap(array, "get_fprop_view", str(layer.name), "exchange")
                self._wrap(array, "get_bprop_view", str(layer.name), "exchange")
        self._wrap(model, "train_batch", REST, "forward")
        self._wrap(model.cost, "gradient", REST, "backward")
        self._wrap(model.parameters, "sum_gradients", "sum of gradients", "backward")
        self._wrap(model.optimizer, "update", "update", "backward")

    def _watch_transport(self, transport: Transport) -> None:
        plan = transport.exchange

        def exchange(sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
            made = plan(sends, receives)
            for method in ("start", "finish"):  # of `run` too; gradients' halos go home with these alone
                self._wrap(made, method, None, "wait")
            return made

        transport.exchange = exchange  # type: ignore[method-assign]
        self._wrap(transport, "allreduce", None, "wait")

    def _wrap(self, owner: Any, name: str, row: str | None, kind: str) -> None:
        """Charge a method's time to a row, or to the row at work."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.running:
                return method(*args, **kwargs)
            self._charge()
            self._stack.append((row or (self._stack[-1][0] if self._stack else REST), kind))
            try:
                return method(*args, **kwargs)
            finally:
                self._charge()
                self._stack.pop()

        setattr(owner, name, timed)

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._mark
        self._mark = now
