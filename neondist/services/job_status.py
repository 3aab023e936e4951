"""status.json: status of a job with servers, written by its master and shown by `neondist top`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..io.checkpoint.texts import parse_json, require_json_integer, require_json_type
from ..io.files import write_text
from ..io.regular_file import read_bytes

STATUS_FILE = "status.json"
_MAX_STATUS_BYTES = 16 << 20
TASK_STATES = "todo", "doing", "done", "failed"


@dataclass(frozen=True)
class ServerStatus:
    """Status of a server: numbers of updates, samples, parameter bytes, table rows and rejected gradients."""

    version: int
    samples: int
    bytes: int
    rows: int
    rejected: int

    @classmethod
    def from_reply(cls, reply: Mapping[str, Any]) -> ServerStatus:
        """Parse the status from a reply to a `status` request."""
        rows = sum(require_json_type("rows", reply.get("rows"), dict).values())
        return cls(reply["version"], round(reply["samples"]), reply["bytes"], rows, reply["rejected"])


@dataclass(frozen=True)
class JobStatus:
    """Status of a job.

    Attributes
    ----------
    time : float
        Time of the status, in seconds since 1970.
    samples_per_second : float
        Throughput of all workers over the last ten seconds.
    tasks : dict of str to int
        Number of tasks by state.
    workers : dict of str to int
        Number of steps of each current worker.
    servers : list of ServerStatus
    ended : bool
        Whether all tasks are done, and their results are saved in a checkpoint of the servers.
    """

    time: float
    samples_per_second: float
    tasks: dict[str, int]
    workers: dict[str, int]
    servers: list[ServerStatus]
    ended: bool = False

    def write(self, folder: Path) -> None:
        """Write the status to the folder of the servers' checkpoints; OutputError on failure."""
        write_text(folder / STATUS_FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> JobStatus:
        """Return the newest status written by a master.

        Raises
        ------
        DataError
            The file is missing or damaged.
        """
        path = folder / STATUS_FILE
        if not path.is_file():
            raise DataError(
                f"{path}: no such file; `neondist top` shows runs with parameter servers, once their training has begun"
            )
        try:
            status = parse_json(read_bytes(path, _MAX_STATUS_BYTES, folder).decode(), dict)
            tasks, workers = (require_json_type(name, status.get(name), dict) for name in ("tasks", "workers"))
            fields = ServerStatus.__dataclass_fields__
            servers = [
                ServerStatus(**{name: require_json_integer(name, server.get(name)) for name in fields})
                for value in require_json_type("servers", status.get("servers"), list)
                for server in [require_json_type("a server", value, dict)]
            ]
            return cls(
                float(status["time"]),
                float(status["samples_per_second"]),
                {name: require_json_integer(name, tasks.get(name)) for name in TASK_STATES},
                {str(name): require_json_integer(name, steps) for name, steps in workers.items()},
                servers,
                bool(status["ended"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: is not a valid job status ({error}); wait for the master to rewrite it") from None
