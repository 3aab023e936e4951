"""A rank whose launcher was killed ends itself: MPI would let it compute on until it talks to another rank."""

from __future__ import annotations

import os
import threading
import time


def end_with_parent(seconds: float = 1.0) -> None:
    """From now on, end this process soon after the process that has started it; looks every so many seconds."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=look, name="end_with_parent", daemon=True).start()
