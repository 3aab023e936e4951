"""generations.jsonl: the history of a supervised run or a job with servers, one JSON object per event.

Events of both: run (key), start, wait (what), end (code). Supervised runs: resume (step, source), loss (what, host),
hosts (added, removed), snapshots (what). Jobs with servers: slots, scale (workers), restart (worker, cause) and lost
(host).
"""

from __future__ import annotations

import json
import re
import secrets
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import OutputError
from .files import append_text, write_text
from .lock import FolderLock
from .output import GENERATIONS
from .regular_file import read_bytes

_MAX_EVENT_LOG_BYTES = 1 << 24


class RunEventLog:
    """Event log of a run, to which only this process appends, until `close`.

    Parameters
    ----------
    folder : Path
        Run folder.
    resumed : bool
        Whether to continue the existing log; otherwise it is replaced.

    Attributes
    ----------
    run_key : str
        Random key of the run, under which nodes store its snapshots.

    Raises
    ------
    OutputError
        If the log cannot be written, or another process supervises a run in the folder.
    """

    def __init__(self, folder: Path, resumed: bool = False) -> None:
        self.path = folder / GENERATIONS
        self._lock = FolderLock(folder, "-supervisor")  # the ranks lock the folder only once they have started
        self.run_key = read_run_key(folder) if resumed else ""
        if not self.run_key:
            self.run_key = secrets.token_hex(16)
            write_text(self.path, "")
            self.add("run", key=self.run_key)

    def add(self, event: str, **fields: Any) -> None:
        """Append an event."""
        append_text(self.path, format_event(event, **fields))

    def close(self) -> None:
        """Let other processes supervise runs in the folder."""
        self._lock.release()

    def log_event(self, event: str, **fields: Any) -> None:
        """Append an event, ignoring errors, so that the run continues."""
        with suppress(OutputError):
            self.add(event, **fields)


def format_event(event: str, **fields: Any) -> str:
    """Format an event as a line of the file."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "event": event, **fields}) + "\n"


def read_run_key(folder: Path) -> str:
    """Return the key of the run in a folder; '' if there is none."""
    run_keys = [str(one.get("key", "")) for one in read_events(folder) if one["event"] == "run"]
    return run_keys[-1] if run_keys and re.fullmatch("[0-9a-f]{32}", run_keys[-1]) else ""


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run, in order, without invalid lines."""
    path, events = folder / GENERATIONS, []
    if not path.is_file():
        return []
    for line in read_bytes(path, _MAX_EVENT_LOG_BYTES, folder).decode(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
    return events
