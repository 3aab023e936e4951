"""The tables of a task queue, in SQLite."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from ..errors import ConfigError

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tasks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, epoch INTEGER NOT NULL, start INTEGER NOT NULL,
    stop INTEGER NOT NULL, applied INTEGER NOT NULL, state TEXT NOT NULL, worker TEXT, deadline REAL
);
CREATE INDEX IF NOT EXISTS by_state ON tasks (state, kind, epoch, start);
CREATE TABLE IF NOT EXISTS failures (
    kind TEXT, record INTEGER, failures INTEGER NOT NULL, error TEXT NOT NULL, PRIMARY KEY (kind, record)
);
CREATE TABLE IF NOT EXISTS skipped (record INTEGER PRIMARY KEY, error TEXT NOT NULL);
"""
_COLUMNS = "id, kind, epoch, start, stop, applied, state, worker"
_PATIENCE = 30.0
"""seconds to wait for the transaction of another process"""


class Piece(NamedTuple):
    """A row of the table of tasks. States: todo, doing, done, failed, and parted (the rest is in other rows)."""

    id: int
    kind: str
    epoch: int
    start: int
    end: int
    applied: int
    state: str
    worker: str | None


class Database:
    """Tasks by state, failures by record, and the facts of the queue.

    Parameters
    ----------
    path : path
    facts : mapping
        What must be the same whenever the file is opened.
    """

    def __init__(self, path: Path, facts: Mapping[str, int]) -> None:
        self.path, self._lock = path, RLock()
        try:
            self._base = sqlite3.connect(path, _PATIENCE, isolation_level=None, check_same_thread=False)
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = NORMAL")
            self._base.executescript(_TABLES)
            with self.transaction():
                self._settle(facts)
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: cannot be used as a task queue ({error}); name another file") from error

    def _settle(self, facts: Mapping[str, int]) -> None:
        known = self._fact("facts")
        if known is None:
            self._base.execute("INSERT INTO facts VALUES ('facts', ?)", (json.dumps(dict(facts)),))
            return
        before = json.loads(known)
        for name, value in facts.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{self.path}: was made with {name} {before.get(name)}, not {value}; open it with the same value,"
                    " or name another file"
                )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Let the block change all or nothing, alone among all threads and processes."""
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._base.close()

    def note(self, name: str, value: str) -> None:
        """Keep a text."""
        self._base.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (f"note {name}", value))

    def noted(self, name: str) -> str | None:
        """Return a text that `note` has kept."""
        return self._fact(f"note {name}")

    # Tasks.

    def add_round(self, kind: str, epoch: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Add the tasks of a round."""
        self._add(kind, epoch, ranges)
        self._base.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (f"rounds {kind}", str(epoch + 1)))

    def rounds(self, kind: str) -> int:
        """Return how many rounds of a kind have begun."""
        return int(self._fact(f"rounds {kind}") or 0)

    def first_todo(self, kind: str) -> Piece | None:
        """Return the first task to hand out."""
        return self._one("state = 'todo' AND kind = ? ORDER BY epoch, start LIMIT 1", kind)

    def leased(self, task_id: int) -> Piece | None:
        """Return a task that is in progress, or done under this very lease."""
        return self._one("id = ? AND state IN ('doing', 'done')", task_id)

    def held(self, kind: str | None = None, worker: str | None = None, before: float | None = None) -> list[Piece]:
        """Return tasks in progress: of a kind, of a worker, or whose lease has ended at a time."""
        given = {"kind = ?": kind, "worker = ?": worker, "deadline < ?": before}
        known = {test: value for test, value in given.items() if value is not None}
        return self._all(" AND ".join(["state = 'doing'", *known]) + " ORDER BY id", *known.values())

    def pieces(self, kind: str, epoch: int) -> list[Piece]:
        """Return the tasks of a round that are to be done."""
        return self._all("kind = ? AND epoch = ? AND state = 'todo' ORDER BY start", kind, epoch)

    def lease(self, task_id: int, worker: str, deadline: float) -> None:
        """Give a task to a worker."""
        change = "UPDATE tasks SET state = 'doing', worker = ?, deadline = ? WHERE id = ?"
        self._base.execute(change, (worker, deadline, task_id))

    def credit(self, task_id: int, applied: int, deadline: float) -> None:
        """Record how far a task is, and extend its lease; at its end it is done."""
        change = "UPDATE tasks SET applied = ?1, deadline = ?2, state = iif(?1 = stop, 'done', state) WHERE id = ?3"
        self._base.execute(change, (applied, deadline, task_id))

    def split(self, piece: Piece, ranges: Sequence[tuple[int, int]]) -> None:
        """Reissue ranges of a task, under other ids; without ranges it is done."""
        self._base.execute(
            "UPDATE tasks SET state = ?, worker = NULL WHERE id = ?", ("parted" if ranges else "done", piece.id)
        )
        self._add(piece.kind, piece.epoch, ranges)

    def end_failed(self, piece: Piece) -> None:
        """Close a task that cannot be done."""
        self._base.execute("UPDATE tasks SET state = 'failed' WHERE id = ?", (piece.id,))

    def end_round(self, kind: str) -> None:
        """Close what is left of a kind's tasks."""
        self._base.execute("DELETE FROM tasks WHERE kind = ?", (kind,))

    def clear(self, kind: str) -> None:
        """Forget the tasks of a kind, and its rounds; ids go on."""
        self.end_round(kind)
        self._base.execute("DELETE FROM facts WHERE name = ?", (f"rounds {kind}",))

    def counts(self, kind: str) -> dict[str, int]:
        """Return the numbers of tasks by state."""
        found = dict.fromkeys(("todo", "doing", "done", "failed"), 0)
        rows = self._base.execute("SELECT state, count(*) FROM tasks WHERE kind = ? GROUP BY state", (kind,))
        return found | {state: count for state, count in rows if state in found}

    # Failures.

    def fail(self, kind: str, record: int, error: str) -> int:
        """Count a failure of a record and return how many there are."""
        change = (
            "INSERT INTO failures VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE SET failures = failures + 1,"
            " error = excluded.error RETURNING failures"
        )
        return int(self._base.execute(change, (kind, record, error)).fetchone()[0])

    def skip(self, record: int, error: str) -> None:
        """Leave a record out from now on."""
        self._base.execute("INSERT OR REPLACE INTO skipped VALUES (?, ?)", (record, error))

    def skipped(self) -> list[tuple[int, str]]:
        """Return the records that are left out, and why."""
        with self._lock:
            return list(self._base.execute("SELECT record, error FROM skipped ORDER BY record"))

    def _add(self, kind: str, epoch: int, ranges: Sequence[tuple[int, int]]) -> None:
        rows = [(kind, epoch, start, end, start) for start, end in ranges]
        self._base.executemany(
            "INSERT INTO tasks (kind, epoch, start, stop, applied, state) VALUES (?, ?, ?, ?, ?, 'todo')", rows
        )

    def _fact(self, name: str) -> str | None:
        row = self._base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _one(self, where: str, *values: object) -> Piece | None:
        return next(iter(self._all(where, *values)), None)

    def _all(self, where: str, *values: object) -> list[Piece]:
        rows = self._base.execute(f"SELECT {_COLUMNS} FROM tasks WHERE {where}", values)
        return [Piece(*row) for row in rows]


def read_note(path: Path, name: str) -> str | None:
    """Return a text that is kept in a file; None if there is not a file, or no such text."""
    if not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(path, _PATIENCE)) as base:
            row = base.execute("SELECT value FROM facts WHERE name = ?", (f"note {name}",)).fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot be used as a task queue ({error}); name another file") from error
    return None if row is None else str(row[0])
