"""SQLite tables of a task queue."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from ..errors import ConfigError, OutputError

_SCHEMA = """
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
CREATE TABLE IF NOT EXISTS losses (
    epoch INTEGER, task INTEGER, minibatch INTEGER, loss REAL NOT NULL, samples INTEGER NOT NULL,
    PRIMARY KEY (epoch, task, minibatch)
);
"""
_TASK_COLUMNS = "id, kind, epoch, start, stop, applied, state, worker"
_LOCK_TIMEOUT = 30.0
"""seconds to wait for the transaction of another process"""


def _to_utf8(text: str) -> str:
    """Return a text that SQLite can store: bytes of paths that are not UTF-8 are escaped."""
    return text.encode(errors="backslashreplace").decode()


class TaskRow(NamedTuple):
    """Row of the table of tasks. States: todo, doing, done, failed, and reissued (continued in other rows)."""

    id: int
    kind: str
    epoch: int
    start_record: int
    end_record: int
    applied_until: int
    state: str
    worker: str | None


class TaskDatabase:
    """Database of a task queue: tasks by state, failures by record, and the settings of the queue.

    Parameters
    ----------
    path : path
    queue_parameters : mapping
        Parameters that must be the same whenever the file is opened.

    Attributes
    ----------
    losses : LossTable
    """

    def __init__(self, path: Path, queue_parameters: Mapping[str, int]) -> None:
        self.path, self._lock = path, RLock()
        try:
            self._connection = sqlite3.connect(path, _LOCK_TIMEOUT, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(_SCHEMA)
            self.losses = LossTable(self._connection)
            with self.transaction():
                self._check_queue_parameters(queue_parameters)
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: cannot be used as a task queue ({error}); specify another file") from error

    def _check_queue_parameters(self, parameters: Mapping[str, int]) -> None:
        stored_text = self._read_fact("facts")
        if stored_text is None:
            self._connection.execute("INSERT INTO facts VALUES ('facts', ?)", (json.dumps(dict(parameters)),))
            return
        stored = json.loads(stored_text)
        for name, value in parameters.items():
            if stored.get(name) != value:
                raise ConfigError(
                    f"{self.path}: was created with {name} {stored.get(name)}, not {value}; use the same value,"
                    " or specify another file"
                )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as a transaction, exclusive among all threads and processes."""
        with self._lock, self._convert_file_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite may have rolled back after a disk error
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _convert_file_errors(self) -> Iterator[None]:
        """Convert errors of the file, such as a full disk, into OutputError; ConfigError if it is closed."""
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise ConfigError(f"{self.path}: the queue is closed; call close() last, or open the file again") from error
        except sqlite3.OperationalError as error:
            raise OutputError(
                f"{self.path}: cannot be written ({error}); free disk space or check permissions, then resume the job"
            ) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def store_note(self, name: str, value: str) -> None:
        """Store a text under a name, beside the tasks."""
        with self._lock, self._convert_file_errors():
            self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (f"note {name}", _to_utf8(value)))

    def load_note(self, name: str) -> str | None:
        """Return a text stored by `store_note`; None if there is none."""
        return self._read_fact(f"note {name}")

    # Tasks.

    def add_round(self, kind: str, epoch: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Add the tasks of a round."""
        self._insert_tasks(kind, epoch, ranges)
        self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (f"rounds {kind}", str(epoch + 1)))

    def count_begun_rounds(self, kind: str) -> int:
        """Return the number of rounds of a kind that have begun."""
        return int(self._read_fact(f"rounds {kind}") or 0)

    def first_unassigned_task(self, kind: str) -> TaskRow | None:
        """Return the first unassigned task."""
        return self._select_first_task("state = 'todo' AND kind = ? ORDER BY epoch, start LIMIT 1", kind)

    def find_leased_task(self, task_id: int) -> TaskRow | None:
        """Return a task that is in progress or done; None otherwise, such as after its lease has expired."""
        return self._select_first_task("id = ? AND state IN ('doing', 'done')", task_id)

    def running_tasks(
        self,
        kind: str | None = None,
        worker: str | None = None,
        expired_before: float | None = None,
        expiring_after: float | None = None,
    ) -> list[TaskRow]:
        """Return tasks in progress, optionally filtered by kind, by worker, or by the end of their leases."""
        leases = {"deadline < ?": expired_before, "deadline > ?": expiring_after}
        filters = {"kind = ?": kind, "worker = ?": worker and _to_utf8(worker), **leases}
        active = {test: value for test, value in filters.items() if value is not None}
        return self._select_tasks(" AND ".join(["state = 'doing'", *active]) + " ORDER BY id", *active.values())

    def unassigned_tasks(self, kind: str, epoch: int) -> list[TaskRow]:
        """Return the unassigned tasks of a round."""
        return self._select_tasks("kind = ? AND epoch = ? AND state = 'todo' ORDER BY start", kind, epoch)

    def lease_task(self, task_id: int, worker: str, deadline: float) -> None:
        """Lease a task to a worker."""
        statement = "UPDATE tasks SET state = 'doing', worker = ?, deadline = ? WHERE id = ?"
        self._connection.execute(statement, (_to_utf8(worker), deadline, task_id))

    def record_progress(self, task_id: int, applied_until: int, deadline: float) -> None:
        """Record the progress of a task and extend its lease; the task is done once it is fully applied."""
        statement = "UPDATE tasks SET applied = ?1, deadline = ?2, state = iif(?1 = stop, 'done', state) WHERE id = ?3"
        self._connection.execute(statement, (applied_until, deadline, task_id))

    def reissue_ranges(self, task: TaskRow, ranges: Sequence[tuple[int, int]]) -> None:
        """Reissue ranges of a task under new ids; without ranges, mark the task as done."""
        self._connection.execute(
            "UPDATE tasks SET state = ?, worker = NULL WHERE id = ?", ("reissued" if ranges else "done", task.id)
        )
        self._insert_tasks(task.kind, task.epoch, ranges)

    def mark_failed(self, task: TaskRow) -> None:
        """Mark a task as failed."""
        self._connection.execute("UPDATE tasks SET state = 'failed' WHERE id = ?", (task.id,))

    def delete_tasks(self, kind: str) -> None:
        """Delete the tasks of a kind."""
        self._connection.execute("DELETE FROM tasks WHERE kind = ?", (kind,))

    def delete_tasks_and_rounds(self, kind: str) -> None:
        """Delete the tasks and rounds of a kind; ids are not reused."""
        self.delete_tasks(kind)
        self._connection.execute("DELETE FROM facts WHERE name = ?", (f"rounds {kind}",))

    def count_by_state(self, kind: str) -> dict[str, int]:
        """Return the number of tasks in each state except 'reissued'."""
        counts = dict.fromkeys(("todo", "doing", "done", "failed"), 0)
        rows = self._connection.execute("SELECT state, count(*) FROM tasks WHERE kind = ? GROUP BY state", (kind,))
        return counts | {state: count for state, count in rows if state in counts}

    # Failures.

    def record_failure_and_count(self, kind: str, record: int, error: str) -> int:
        """Record a failure of a record; return how often this record has failed."""
        statement = (
            "INSERT INTO failures VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE SET failures = failures + 1,"
            " error = excluded.error RETURNING failures"
        )
        return int(self._connection.execute(statement, (kind, record, _to_utf8(error))).fetchone()[0])

    def skip_record(self, record: int, error: str) -> None:
        """Skip a record from now on."""
        self._connection.execute("INSERT OR REPLACE INTO skipped VALUES (?, ?)", (record, _to_utf8(error)))

    def skipped_records(self) -> list[tuple[int, str]]:
        """Return the skipped records, with reasons."""
        with self._lock, self._convert_file_errors():
            return list(self._connection.execute("SELECT record, error FROM skipped ORDER BY record"))

    def _insert_tasks(self, kind: str, epoch: int, ranges: Sequence[tuple[int, int]]) -> None:
        rows = [(kind, epoch, start, end, start) for start, end in ranges]
        self._connection.executemany(
            "INSERT INTO tasks (kind, epoch, start, stop, applied, state) VALUES (?, ?, ?, ?, ?, 'todo')", rows
        )

    def _read_fact(self, name: str) -> str | None:
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _select_first_task(self, where: str, *values: object) -> TaskRow | None:
        return next(iter(self._select_tasks(where, *values)), None)

    def _select_tasks(self, where: str, *values: object) -> list[TaskRow]:
        rows = self._connection.execute(f"SELECT {_TASK_COLUMNS} FROM tasks WHERE {where}", values)
        return [TaskRow(*row) for row in rows]


class LossTable:
    """Mean losses of minibatches in the database of a task queue."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def record(self, epoch: int, task: int, minibatch: int, loss: float, samples: int) -> None:
        """Record the mean loss of a minibatch, replacing its earlier loss."""
        values = epoch, task, minibatch, loss, samples
        self._connection.execute("INSERT OR REPLACE INTO losses VALUES (?, ?, ?, ?, ?)", values)

    def mean(self, epoch: int) -> float | None:
        """Return the mean loss over the recorded samples of an epoch; None if there are none."""
        statement = "SELECT sum(loss * samples) / sum(samples) FROM losses WHERE epoch = ?"
        mean: float | None = self._connection.execute(statement, (epoch,)).fetchone()[0]
        return mean


def read_note(path: Path, name: str) -> str | None:
    """Return a text stored by `store_note`; None if the file or the text does not exist."""
    rows = _execute_on_note(path, "SELECT value FROM facts", name)
    return str(rows[0][0]) if rows else None


def delete_note(path: Path, name: str) -> None:
    """Delete a text stored by `store_note`, if it exists."""
    _execute_on_note(path, "DELETE FROM facts", name)


def _execute_on_note(path: Path, statement: str, name: str) -> list[tuple[str]]:
    if not path.is_file():
        return []
    try:
        with closing(sqlite3.connect(path, _LOCK_TIMEOUT)) as connection, connection:
            return connection.execute(f"{statement} WHERE name = ?", (f"note {name}",)).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot be used as a task queue ({error}); specify another file") from error
