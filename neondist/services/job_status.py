"""status.json: the state of a job with servers, which its master writes and `neondist top` shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..io.checkpoint.texts import of_kind, plain_json, whole
from ..io.files import write_text
from ..io.regular_file import read_bytes

NAME = "status.json"
_MOST_BYTES = 16 << 20
TASKS = "todo", "doing", "done", "failed"


@dataclass(frozen=True)
class ServerStatus:
    """The state of one server: updates, samples in them, bytes of parameters, rows of tables, and refused gradients."""

    version: int
    samples: int
    bytes: int
    rows: int
    refused: int

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> ServerStatus:
        """Return that of a reply to `status`."""
        rows = sum(of_kind("rows", reply.get("rows"), dict).values())
        return cls(reply["version"], round(reply["samples"]), reply["bytes"], rows, reply["refused"])


@dataclass(frozen=True)
class JobStatus:
    """The state of a job.

    Attributes
    ----------
    time : float
        When it was so, in seconds since 1970.
    samples_per_second : float
        Of all workers, over the last ten seconds.
    tasks : dict of str to int
        Number of tasks by state.
    workers : dict of str to int
        Steps of each worker that is there.
    servers : list of ServerStatus
    ended : bool
        Whether all tasks are done, and in a checkpoint of the servers.
    """

    time: float
    samples_per_second: float
    tasks: dict[str, int]
    workers: dict[str, int]
    servers: list[ServerStatus]
    ended: bool = False

    def write(self, folder: Path) -> None:
        """Write it into the folder of the servers' checkpoints; OutputError if that fails."""
        write_text(folder / NAME, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> JobStatus:
        """Return the newest state that a master has written.

        Raises
        ------
        DataError
            There is none, or the file is damaged.
        """
        path = folder / NAME
        if not path.is_file():
            raise DataError(
                f"{path}: no such file; `neondist top` shows runs with parameter servers, once their training has begun"
            )
        try:
            found = plain_json(read_bytes(path, _MOST_BYTES, folder).decode(), dict)
            tasks, workers = (of_kind(name, found.get(name), dict) for name in ("tasks", "workers"))
            fields = ServerStatus.__dataclass_fields__
            servers = [
                ServerStatus(**{name: whole(name, of_kind("a server", one, dict).get(name)) for name in fields})
                for one in of_kind("servers", found.get("servers"), list)
            ]
            return cls(
                float(found["time"]),
                float(found["samples_per_second"]),
                {name: whole(name, tasks.get(name)) for name in TASKS},
                {str(name): whole(name, steps) for name, steps in workers.items()},
                servers,
                bool(found["ended"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: is not the state of a job ({error}); wait for its master to rewrite it") from None
