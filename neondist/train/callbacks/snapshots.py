"""Snapshots in the memory of nodes: their schedule, and resumption from the newest one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ...comm import Transport, all_or_none
from ...errors import DataError, OutputError
from ...io.checkpoint import SnapshotStore
from ...io.files import append_text
from ...io.output import GENERATIONS
from ...io.run_event_log import format_event, read_run_key
from ...parallel import ControlFlag
from ...terminal.console import say
from ..state import TrainState
from .checkpoint import Checkpoint, read_checkpoint_step, restore_checkpoint
from .hook import Hook

MAX_SNAPSHOT_TIME_FRACTION = 0.02
"""Largest fraction of a run's time that automatic snapshots may take."""
_INITIAL_OVERHEAD_SECONDS, _INITIAL_BYTES_PER_SECOND = 0.01, 5e8
"""Initial estimates of a snapshot's fixed overhead in seconds, and of its throughput in bytes per second."""


def open_snapshot_store(folder: Path, world: Transport) -> SnapshotStore | None:
    """Return the snapshot store of a supervised run, otherwise None. Collective."""
    run_key = ""
    with all_or_none(world):
        if world.rank == 0:
            run_key = read_run_key(folder)
    run_key = world.bcast(run_key)
    return SnapshotStore(run_key, world) if run_key else None


class Snapshots(Hook):
    """Write snapshots between checkpoints.

    If shared memory has no space for them, checkpoints are written to disk at the same interval.

    Parameters
    ----------
    store : SnapshotStore
    interval : int, 'auto' or None
        Interval in steps; 'auto': as often as 2 % of the run time permits; None: never.
    checkpoint : Checkpoint
        Hook called before this one; steps for which it has written a checkpoint need no snapshot.
    clock : callable
        Clock in seconds; replaced in tests.
    """

    def __init__(
        self,
        store: SnapshotStore,
        interval: int | Literal["auto"] | None,
        checkpoint: Checkpoint,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store, self.interval, self.checkpoint, self.clock = store, interval, checkpoint, clock
        self.writes_to_disk = False
        self.start_time, self.total_snapshot_seconds, self.expected_snapshot_seconds = 0.0, 0.0, math.inf

    def before_run(self, run: TrainState) -> None:
        """Start measuring the time of the run."""
        parameter_bytes = run.model.whole_model.compiled.parameters.memory(run.grid.rank)
        self.start_time, self.total_snapshot_seconds = self.clock(), 0.0
        self.expected_snapshot_seconds = _INITIAL_OVERHEAD_SECONDS + parameter_bytes / _INITIAL_BYTES_PER_SECOND

    def after_step(self, run: TrainState) -> None:
        """Write a snapshot if one is due; rank 0 announces it one step ahead in the gradient reduction."""
        flags = run.model.sync.flags
        if self.interval == "auto":
            is_due = flags.count_ranks(ControlFlag.SNAPSHOT) > 0
        else:
            is_due = self.interval is not None and run.step % self.interval == 0
        if is_due and run.stop is None and not self.checkpoint.is_current_step_written(run):
            self.save(run)
        if self.interval == "auto" and run.is_first_rank:
            flags.own_flags[ControlFlag.SNAPSHOT] = self.is_snapshot_affordable

    @property
    def is_snapshot_affordable(self) -> bool:
        """Whether one more snapshot would stay within `MAX_SNAPSHOT_TIME_FRACTION`."""
        allowed_seconds = MAX_SNAPSHOT_TIME_FRACTION * (self.clock() - self.start_time)
        return self.total_snapshot_seconds + self.expected_snapshot_seconds <= allowed_seconds

    def save(self, run: TrainState) -> None:
        """Write a snapshot now. Collective."""
        start_time = self.clock()
        if not self.writes_to_disk:
            try:
                self.store.write(*self.checkpoint.collect_checkpoint_contents(run), run.step)
            except OutputError as error:
                self.writes_to_disk = True
                if run.is_first_rank:
                    reason = str(error).partition(";")[0]
                    say(
                        f"snapshots cannot be kept in memory ({reason}); checkpoints are written to disk at the same"
                        " interval instead"
                    )
                    _append_run_event(self.checkpoint.path.parent, "snapshots", what=f"on the disk: {reason}")
        if self.writes_to_disk:
            self.checkpoint.save(run)
        self.expected_snapshot_seconds = self.clock() - start_time
        self.total_snapshot_seconds += self.expected_snapshot_seconds

    def after_run(self, run: TrainState) -> None:
        """Remove the snapshots, since the checkpoint of the last step is on disk."""
        self.store.remove_all_snapshots()

    on_stop = after_run


def restore_newest_snapshot_or_checkpoint(path: Path, run: TrainState, store: SnapshotStore | None) -> None:
    """Restore `run` from the newest complete snapshot, or from the checkpoint if it is at least as new. Collective.

    Raises
    ------
    DataError
        On every rank, as in `restore_checkpoint`, if neither can be used.
    """
    snapshots = store.steps_and_node_ranks() if store is not None else []
    checkpoint_step = read_checkpoint_step(path, run.grid.world) if snapshots else -1
    for step, root in snapshots:
        if store is None or step <= checkpoint_step:
            break
        try:
            restore_checkpoint(store.path(step), run, root)
        except DataError as problem:
            run.start_messages.append(f"a snapshot is unusable: {problem}")
            continue
        _log_resume(path.parent, run, "a snapshot")
        return
    restore_checkpoint(path, run)
    _log_resume(path.parent, run, path.name)


def _log_resume(folder: Path, run: TrainState, source: str) -> None:
    if run.is_first_rank and (folder / GENERATIONS).exists():
        _append_run_event(folder, "resume", step=run.step, source=source)
    if source != "checkpoint.h5":
        run.start_messages.append(f"continuing at step {run.step}, from {source}")


def _append_run_event(folder: Path, event: str, **fields: object) -> None:
    with suppress(OutputError):  # the run continues without the entry
        append_text(folder / GENERATIONS, format_event(event, **fields))
