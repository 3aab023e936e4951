"""Watchdog that ends a job if a rank hangs, and reports the state of that rank."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...comm import ProcessGrid, Transport
from ...runtime.observers.current_activity import CurrentActivity, innermost_calls
from ..state import TrainState
from .disk_activity import count_disk_bytes, is_process_stopped, list_file_states
from .hook import Hook


def end_job_of_all_ranks(world: Transport | None, grace_seconds: float) -> None:
    """End the job from a thread, after a grace period for reports of other ranks."""
    time.sleep(min(30.0, max(2.0, grace_seconds)))
    exit_timer = threading.Timer(5, os._exit, [1])  # in case the abort itself hangs
    exit_timer.daemon = True
    exit_timer.start()
    if world is not None and world.size > 1:
        world.abort(1)
    os._exit(1)


class Watchdog(Hook):
    """End the job if a rank makes no progress for too long, instead of hanging.

    Signs of progress are a pass that advances, disk traffic of a rank on this machine, files that change in the run's
    folder, and, outside runs, a new position in the code; a slow checkpoint is therefore not a hang. A thread polls
    these signs. The report names the exchange or reduction in which the rank waits, or the most recent calls. Time
    during which the process was stopped does not count.

    Parameters
    ----------
    timeout : float
        Seconds without progress after which the job ends.
    end : callable
        Called after the report with the world (None: MPI has not started) and a grace period in seconds. Default: end
        the job with exit code 1.
    report : callable
        Called with the text of the report. Default: write it to stderr.
    owns_process : bool
        Watch from the first `open` to the end of the process, instead of only during runs.
    rank, size : int
        Rank of this process and number of ranks, until a run sets them.
    folder : path, optional
        Output folder of the run.
    """

    runs_during_pretraining = True

    def __init__(
        self,
        timeout: float = 600.0,
        end: Callable[[Transport | None, float], None] = end_job_of_all_ranks,
        report: Callable[[str], None] | None = None,
        owns_process: bool = False,
        rank: int = 0,
        size: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.timeout, self.end = timeout, end
        self.report = report or _write_stderr
        self.owns_process, self.rank, self.size, self.folder = owns_process, rank, size, folder
        self.stop_event: threading.Event | None = None
        self.watched_thread_id = 0
        self.world: Transport | None = None
        self.local_pids: dict[int, int] = {}
        self.current_activity: CurrentActivity | None = None
        self.current_run: TrainState | None = None

    def open(self) -> None:
        """Start watching the calling thread, if `owns_process`."""
        if self.owns_process:
            self._start_watch_thread()

    def _start_watch_thread(self) -> None:
        if self.stop_event is None:
            self.stop_event, self.watched_thread_id = threading.Event(), threading.get_ident()
            threading.Thread(target=self._watch, args=(self.stop_event,), name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching, unless `owns_process`."""
        if not self.owns_process:
            self.stop_watching()

    def stop_watching(self) -> None:
        """Stop watching."""
        if self.stop_event is not None:
            self.stop_event.set()
            self.stop_event = None
        self._stop_observing()

    def set_ranks(self, world: Transport, hosts_and_pids: Sequence[tuple[str, int]], own_host: str) -> None:
        """Set the ranks, given the host and process ID of each, and this host's name."""
        self.world, self.rank, self.size = world, world.rank, world.size
        self.local_pids = {
            rank: pid for rank, (name, pid) in enumerate(hosts_and_pids) if name == own_host and rank != world.rank
        }

    def observe_grid(self, grid: ProcessGrid) -> None:
        """Observe the passes on a grid."""
        self._stop_observing()
        self.world, self.rank, self.size = grid.world, grid.rank, grid.size
        self.current_activity = CurrentActivity(grid)
        grid.observers.add(self.current_activity)

    def _stop_observing(self) -> None:
        if self.current_activity is not None:
            self.current_activity.grid.observers.remove(self.current_activity)
            self.current_activity = None

    def before_run(self, run: TrainState) -> None:
        """Watch the run."""
        self.observe_grid(run.grid)
        self.current_run = run
        self._start_watch_thread()

    def after_run(self, run: TrainState) -> None:
        """Return to the signs of progress outside runs."""
        self.current_run = None

    on_stop = after_run

    def _watch(self, stop_event: threading.Event) -> None:
        poll_seconds = min(5.0, self.timeout / 10)
        previous_activity: object = None
        idle_seconds, last_time = 0.0, time.monotonic()
        while not stop_event.wait(poll_seconds):
            now = time.monotonic()
            idle_seconds, last_time = idle_seconds + min(now - last_time, 2 * poll_seconds), now
            disk_traffic = count_disk_bytes([os.getpid(), *self.local_pids.values()])
            activity = (self._progress_marker(), disk_traffic, list_file_states(self.folder))
            if activity != previous_activity:
                previous_activity, idle_seconds = activity, 0.0
            elif idle_seconds > self.timeout:
                self.report(self._stall_report())
                return self.end(self.world, self.timeout / 4)

    def _progress_marker(self) -> tuple[int, str]:
        """Return the number of events in passes and, outside runs, the position in the code."""
        activity = self.current_activity
        position = innermost_calls(self.watched_thread_id) if self.current_run is None else ""
        return 0 if activity is None else activity.event_count, position

    def _stall_report(self) -> str:
        location = "outside steps" if self.current_run is None else f"step {self.current_run.step + 1}"
        headline = f"rank {self.rank} of {self.size}: no progress for {self.timeout:g} s (--stall-timeout), {location}"
        activity = self.current_activity
        activity_text = "" if activity is None else str(activity)
        lines = [f"{headline}: {activity_text}" if activity_text else headline]
        if activity is None or not activity.is_waiting:
            call_stack = innermost_calls(self.watched_thread_id) or "  none: the watched thread has ended"
            lines = [f"{lines[0]}; most recent call first:", call_stack]
        elif self.rank == 0:
            lines.append(
                "if all ranks wait, but in different layers, use --debug-halo to find the layer or scheme at fault"
            )
        lines += [
            f"rank {rank} of {self.size}: process {pid} is stopped (by SIGSTOP, a debugger or a terminal)"
            for rank, pid in self.local_pids.items()
            if is_process_stopped(pid)
        ]
        return "".join(line + "\n" for line in lines)


def _write_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
