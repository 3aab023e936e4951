"""Work of a data set that goes on while the batch before it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """One call in a thread of its own; the thread ends with the call, so there is none to stop.

    libhdf5 lets one thread in at a time, but h5py lets go of Python's lock while it reads.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="neondist-read-ahead")
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
        """Wait for the end of the thread."""
        self._thread.join()
