"""Work of a data set that goes on while the batch before it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """One call in a thread of its own; the thread ends with the call, so there is none to stop.

    Whoever starts it waits for it, on every path: a thread that is in libhdf5 while the interpreter ends would keep
    h5py's lock, for which all that is left of h5py then waits, and the other ranks in MPI_Finalize for this one. It is
    no daemon, so that even where nobody has waited, the interpreter does before it ends.

    libhdf5 lets one thread in at a time, but h5py lets go of Python's lock while it reads.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="neondist-read-ahead", daemon=False)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Wait for the call; return its result, or raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self) -> None:
        """Wait for the end of the thread, if it has been started."""
        if self._thread.ident is not None:
            self._thread.join()


class AllAhead(Generic[T]):
    """The calls under way of one owner, who can wait for all of them."""

    def __init__(self) -> None:
        self._under_way: set[Ahead[T]] = set()

    def start(self, call: Callable[[], T]) -> Ahead[T]:
        """Return a call that has begun; it is noted before, so that nothing can come in between."""
        ahead = Ahead(call)
        self._under_way.add(ahead)
        ahead.start()
        return ahead

    def forget(self, ahead: Ahead[T]) -> None:
        """Wait for the end of a call, and note it no longer."""
        ahead.wait()
        self._under_way.discard(ahead)

    def wait(self) -> None:
        """Wait for the end of all calls."""
        for ahead in tuple(self._under_way):
            self.forget(ahead)
