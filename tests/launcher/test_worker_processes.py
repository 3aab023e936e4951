"""Workers of an elastic job, as small processes: they end for other jobs, and more start where slots are free."""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from neondist.launcher import worker_processes
from neondist.launcher.job_nodes import JobNode, JobNodes
from neondist.launcher.scaling import Scaling
from neondist.launcher.slots import Demand, SlotTable
from neondist.launcher.worker_processes import TaskProgress, WorkerProcesses

WORKER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if sys.argv[1] == "stuck":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
sys.exit(int(sys.stdin.read() or 0))
"""


class Job:
    """Workers that run until `end`, and what the pool does with them."""

    def __init__(self, folder, demand, slots, kind="good"):
        self.slots, self.kind, self.events, self.lost, self.started = slots, kind, [], [], []
        self.progress, self.processes, self.places = TaskProgress(9, frozenset(range(9))), {}, {}
        self.table = SlotTable(demand, folder).__enter__()
        self.failed, self.hosts, self.deaf = [], {}, 0
        self.scaling = Scaling(self.table, self.listed, self.failed.append)
        nodes = JobNodes([JobNode()], self.table.take({"localhost": slots}))
        self.pool = WorkerProcesses(self.start, nodes, [], self.lose, self.scaling, lambda: self.progress, self.note)
        self.code, self.ended = None, False
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def listed(self):
        every = {"localhost": self.slots, **self.hosts}
        return {host: slots for host, slots in every.items() if host not in self.failed}

    def lose(self, at):
        """Take note of it; the first times services do not hear it."""
        self.lost.append(at)
        return len(self.lost) > self.deaf

    def watch(self):
        self.code = self.pool.watch()

    def start(self, at, host, again):
        words = [sys.executable, "-S", "-c", WORKER, self.kind if at else "good"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        self.started.append((at, again))
        self.places[at] = host
        self.processes[at] = process
        return process

    def note(self, event, **fields):
        self.events.append((event, fields.get("workers"), fields.get("reason")))

    def end(self):
        if self.ended:
            return
        self.ended = True
        self.progress = TaskProgress(0, self.progress.started)
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
        return sorted(at for at, process in self.processes.items() if process.poll() is None)

    def leave(self, at):
        """End a worker as ssh does whose host is gone."""
        with contextlib.suppress(BrokenPipeError):  # the supervisor may have ended it, for there are fewer slots
            self.processes[at].stdin.write("255")
            self.processes[at].stdin.close()
        self.processes[at].wait()

    def wait(self, workers):
        end = time.monotonic() + 10
        while self.running() != workers or self.table.workers != len(workers):
            assert time.monotonic() < end, (self.running(), self.table.workers, self.events)
            time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    jobs = []
    yield lambda *arguments: jobs.append(Job(tmp_path, *arguments)) or jobs[-1]
    for job in jobs:
        job.end()


def test_two_jobs_share_six_slots(start):
    first = start(Demand(1, 4), 6)
    first.wait([0, 1, 2, 3])
    second = start(Demand(1, 4), 6)
    assert second.started[0] == (0, False), "at once"
    first.wait([0, 1, 2])
    second.wait([0, 1, 2])
    assert first.lost == [3], "the last one, whose task others get"
    assert first.events == [("start", 4, None), ("scale", 3, "another job waits")]
    assert second.events == [("start", 2, None), ("scale", 3, "slots are free")]
    second.end()
    assert second.code == 0
    first.wait([0, 1, 2, 3])
    assert first.started[-1] == (3, True), "goes on in its folder"
    first.end()
    assert (first.code, first.pool.restarted) == (0, "0 workers started again")


def test_slots_of_a_list_that_changes(start):
    job = start(Demand(1, 3), 2)
    job.wait([0, 1])
    job.slots = 3
    job.wait([0, 1, 2])
    job.slots = 1
    job.wait([0])
    assert job.events[-1] == ("scale", 1, "there are fewer slots")
    job.slots = 0
    time.sleep(0.6)
    assert job.running() == [0], "never below the minimum"


def test_no_worker_is_started_without_a_task_for_it(start):
    job = start(Demand(1, 3), 1)
    job.progress = TaskProgress(0, frozenset({0}))
    job.slots = 3
    time.sleep(0.6)
    assert job.running() == [0]


def test_workers_that_have_not_begun_end_at_once_and_with_the_job(start):
    job = start(Demand(1, 3), 3, "stuck")
    job.progress = TaskProgress(0, frozenset({0, 1}))
    job.slots = 2
    job.wait([0, 1])
    assert job.processes[2].returncode == -signal.SIGKILL
    job.progress = TaskProgress(0, frozenset({0}))
    job.processes[0].stdin.close()
    job.thread.join(5)
    assert (job.code, job.processes[1].returncode) == (0, -signal.SIGKILL)
    assert job.events[-1] == ("scale", 0, "all tasks are done")


def test_a_worker_that_does_not_end_is_killed(start, monkeypatch):
    monkeypatch.setattr(worker_processes, "PATIENCE", 0.5)
    job = start(Demand(1, 2), 2, "stuck")
    job.slots = 1
    job.wait([0])
    assert job.processes[1].returncode == -signal.SIGKILL
    assert job.pool.restarted == "0 workers started again"


def test_a_killed_worker_keeps_its_slot_and_a_signal_ends_all(start):
    job = start(Demand(1, 3), 2)
    before = job.processes[1]
    before.kill()
    while job.processes[1] is before:
        time.sleep(0.02)
    before.wait()
    before.stdout.close()
    before.stdin.close()
    job.wait([0, 1])
    assert job.pool.restarted == "1 worker started again"
    job.slots = 3
    job.wait([0, 1, 2])
    job.pool.forward("SIGTERM")
    job.thread.join(5)
    assert (job.code, job.table.workers) == (75, 0)


def test_workers_of_hosts_that_are_gone_go_on_elsewhere_and_wait_for_hosts(start):
    job = start(Demand(2, 3), 2)
    job.wait([0, 1])
    job.hosts = {"b": 1}
    job.wait([0, 1, 2])
    assert job.places == {0: "localhost", 1: "localhost", 2: "b"}
    job.deaf = 2
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
    assert (job.places[2], job.started[-1]) == ("c", (2, True))
    job.hosts = {}
    for at in range(3):
        job.leave(at)
    job.wait([])
    assert job.thread.is_alive(), "waits"
    job.hosts = {"d": 2}
    job.wait([0, 1])
    assert job.events[-1] == ("scale", 2, "hosts are back")
    assert {job.places[0], job.places[1]} == {"d"}
    job.end()
    assert job.code == 0
