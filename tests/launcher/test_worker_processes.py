"""Workers of an elastic job as small processes: they end for other jobs, and more start on free slots."""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from neondist.launcher import worker_processes
from neondist.launcher.job_nodes import JobNode, JobNodes
from neondist.launcher.scaling import ElasticSlots
from neondist.launcher.slots import SharedSlotTable, WorkerBounds
from neondist.launcher.worker_processes import TaskProgress, WorkerProcesses

WORKER_SCRIPT = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if sys.argv[1] == "stuck":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
sys.exit(int(sys.stdin.read() or 0))
"""


class FakeJob:
    """Workers that run until `end`, and the pool that manages them."""

    def __init__(self, folder, bounds, slots, kind="good"):
        self.slots, self.kind, self.events, self.lost, self.started = slots, kind, [], [], []
        self.progress, self.processes, self.host_of_worker = TaskProgress(9, frozenset(range(9))), {}, {}
        self.table = SharedSlotTable(bounds, folder).__enter__()
        self.failed, self.hosts, self.missed_reports = [], {}, 0
        self.scaling = ElasticSlots(self.table, self.list_hosts, self.failed.append)
        nodes = JobNodes([JobNode()], self.table.take_slots({"localhost": slots}))
        self.pool = WorkerProcesses(self.start, nodes, [], self.lose, self.scaling, lambda: self.progress, self.note)
        self.code, self.ended = None, False
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def list_hosts(self):
        hosts = {"localhost": self.slots, **self.hosts}
        return {host: slots for host, slots in hosts.items() if host not in self.failed}

    def lose(self, index):
        """Record a lost worker; the services miss the first reports."""
        self.lost.append(index)
        return len(self.lost) > self.missed_reports

    def watch(self):
        self.code = self.pool.watch_workers()

    def start(self, index, host, restarted):
        words = [sys.executable, "-S", "-c", WORKER_SCRIPT, self.kind if index else "good"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        self.started.append((index, restarted))
        self.host_of_worker[index] = host
        self.processes[index] = process
        return process

    def note(self, event, **fields):
        self.events.append((event, fields.get("workers"), fields.get("reason")))

    def end(self):
        if self.ended:
            return
        self.ended = True
        self.progress = TaskProgress(0, self.progress.started_workers)
        for process in self.processes.values():
            if process.poll() is None:
                process.stdin.close()
        self.thread.join(5)
        self.table.__exit__()
        for process in self.processes.values():
            process.kill()
            process.wait()
            process.stdout.close()
            process.stdin.close()

    def running(self):
        return sorted(index for index, process in self.processes.items() if process.poll() is None)

    def leave(self, index):
        """End a worker as ssh does after the loss of its host."""
        with contextlib.suppress(BrokenPipeError):  # the supervisor may have ended it, as there are fewer slots
            self.processes[index].stdin.write("255")
            self.processes[index].stdin.close()
        self.processes[index].wait()

    def wait(self, workers):
        end = time.monotonic() + 10
        while self.running() != workers or self.table.workers != len(workers):
            assert time.monotonic() < end, (self.running(), self.table.workers, self.events)
            time.sleep(0.02)


@pytest.fixture
def start_job(tmp_path):
    jobs = []
    yield lambda *arguments: jobs.append(FakeJob(tmp_path, *arguments)) or jobs[-1]
    for job in jobs:
        job.end()


def test_two_jobs_share_six_slots(start_job):
    first = start_job(WorkerBounds(1, 4), 6)
    first.wait([0, 1, 2, 3])
    second = start_job(WorkerBounds(1, 4), 6)
    assert second.started[0] == (0, False), "second job starts at once"
    first.wait([0, 1, 2])
    second.wait([0, 1, 2])
    assert first.lost == [3], "the task of the last worker goes to others"
    assert first.events == [("start", 4, None), ("scale", 3, "another job is waiting")]
    assert second.events == [("start", 2, None), ("scale", 3, "slots are free")]
    second.end()
    assert second.code == 0
    first.wait([0, 1, 2, 3])
    assert first.started[-1] == (3, True), "worker continues in its folder"
    first.end()
    assert (first.code, first.pool.restart_summary) == (0, "0 workers restarted")


def test_changing_numbers_of_slots(start_job):
    job = start_job(WorkerBounds(1, 3), 2)
    job.wait([0, 1])
    job.slots = 3
    job.wait([0, 1, 2])
    job.slots = 1
    job.wait([0])
    assert job.events[-1] == ("scale", 1, "there are fewer slots")
    job.slots = 0
    time.sleep(0.6)
    assert job.running() == [0], "the minimum is kept"


def test_workers_need_tasks(start_job):
    job = start_job(WorkerBounds(1, 3), 1)
    job.progress = TaskProgress(0, frozenset({0}))
    job.slots = 3
    time.sleep(0.6)
    assert job.running() == [0]


def test_workers_that_have_not_started_are_killed(start_job):
    job = start_job(WorkerBounds(1, 3), 3, "stuck")
    job.progress = TaskProgress(0, frozenset({0, 1}))
    job.slots = 2
    job.wait([0, 1])
    assert job.processes[2].returncode == -signal.SIGKILL
    job.progress = TaskProgress(0, frozenset({0}))
    job.processes[0].stdin.close()
    job.thread.join(5)
    assert (job.code, job.processes[1].returncode) == (0, -signal.SIGKILL)
    assert job.events[-1] == ("scale", 0, "all tasks are done")


def test_unresponsive_worker_is_killed(start_job, monkeypatch):
    monkeypatch.setattr(worker_processes, "RELEASE_TIMEOUT", 0.5)
    job = start_job(WorkerBounds(1, 2), 2, "stuck")
    job.slots = 1
    job.wait([0])
    assert job.processes[1].returncode == -signal.SIGKILL
    assert job.pool.restart_summary == "0 workers restarted"


def test_killed_worker_keeps_its_slot_and_a_signal_ends_all(start_job):
    job = start_job(WorkerBounds(1, 3), 2)
    before = job.processes[1]
    before.kill()
    while job.processes[1] is before:
        time.sleep(0.02)
    before.wait()
    before.stdout.close()
    before.stdin.close()
    job.wait([0, 1])
    assert job.pool.restart_summary == "1 worker restarted"
    job.slots = 3
    job.wait([0, 1, 2])
    job.pool.forward_signal("SIGTERM")
    job.thread.join(5)
    assert (job.code, job.table.workers) == (75, 0)


def test_workers_of_lost_hosts_move_or_wait_for_hosts(start_job):
    job = start_job(WorkerBounds(2, 3), 2)
    job.wait([0, 1])
    job.hosts = {"b": 1}
    job.wait([0, 1, 2])
    assert job.host_of_worker == {0: "localhost", 1: "localhost", 2: "b"}
    job.missed_reports = 2
    job.leave(2)
    job.wait([0, 1])
    end = time.monotonic() + 10
    while job.lost != [2, 2, 2]:
        assert time.monotonic() < end, job.lost
        time.sleep(0.02)
    assert job.failed == ["b"]
    assert job.events[-1] == ("scale", 2, "b cannot be reached")
    job.hosts = {"b": 1, "c": 2}
    job.wait([0, 1, 2])
    assert (job.host_of_worker[2], job.started[-1]) == ("c", (2, True))
    job.hosts = {}
    for index in range(3):
        job.leave(index)
    job.wait([])
    assert job.thread.is_alive(), "job waits for hosts"
    job.hosts = {"d": 2}
    job.wait([0, 1])
    assert job.events[-1] == ("scale", 2, "hosts are back")
    assert {job.host_of_worker[0], job.host_of_worker[1]} == {"d"}
    job.end()
    assert job.code == 0
