"""Slots shared by jobs: the computation of shares, and files of jobs that start, end and are killed."""

import shutil
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neondist.errors import LaunchError
from neondist.launcher.slots import SharedSlotTable, WorkerBounds, fair_shares, shared_slots_folder

BOUNDS = st.builds(
    lambda low, extra, width: WorkerBounds(low, low + extra, width),
    st.integers(1, 5),
    st.integers(0, 8),
    st.integers(1, 3),
)


@given(st.integers(0, 40), st.lists(BOUNDS, max_size=6))
def test_shares_are_bounded_and_fair(slots, jobs):
    shares = fair_shares(slots, jobs)
    used = sum(share * bounds.slots_per_worker for share, bounds in zip(shares, jobs, strict=True))
    assert used <= slots
    admitted = [(share, bounds) for share, bounds in zip(shares, jobs, strict=True) if share]
    assert all(bounds.min_workers <= share <= bounds.max_workers for share, bounds in admitted)
    assert [share > 0 for share in shares] == [i < len(admitted) for i in range(len(jobs))], "admission is in order"
    if len(admitted) < len(jobs):
        least = sum(bounds.min_workers * bounds.slots_per_worker for bounds in jobs[: len(admitted) + 1])
        assert least > slots, "the minimum of the first waiting job would fit"
    for share, bounds in admitted:
        assert share == bounds.max_workers or bounds.slots_per_worker > slots - used, "free slots could serve a job"
        for (
            other_share,
            other_bounds,
        ) in admitted:  # a job above its minimum got its last worker while it had no larger share
            if (
                share < bounds.max_workers
                and bounds.slots_per_worker <= other_bounds.slots_per_worker
                and other_share > other_bounds.min_workers
            ):
                assert (other_share - 1) * other_bounds.slots_per_worker <= share * bounds.slots_per_worker


@pytest.mark.parametrize(
    ("slots", "jobs", "expected"),
    [
        (6, [(1, 4), (1, 4)], [3, 3]),
        (6, [(1, 4), (4, 4)], [2, 4]),
        (6, [(4, 4), (4, 4)], [4, 0]),
        (6, [(4, 4), (4, 4), (1, 2)], [4, 0, 0]),
        (6, [(1, 2), (1, 9)], [2, 4]),
        (7, [(1, 9), (1, 9), (1, 9)], [3, 2, 2]),
        (6, [(1, 9, 2), (1, 9)], [2, 2]),
    ],
)
def test_shares(slots, jobs, expected):
    assert fair_shares(slots, [WorkerBounds(*bounds) for bounds in jobs]) == expected


def test_jobs_share_and_return_slots(tmp_path):
    hosts = {"localhost": 6}
    with SharedSlotTable(WorkerBounds(1, 4), tmp_path) as first:
        assert first.take_slots(hosts) == ["localhost"] * 4
        assert first.take_slots(hosts) == []
        with SharedSlotTable(WorkerBounds(1, 4), tmp_path) as second:
            assert first.surplus_workers(hosts) == 1
            assert second.take_slots(hosts) == ["localhost"] * 2, "slots that are free now"
            assert second.take_slots(hosts) == []
            first.free_worker_slots("localhost")
            assert (first.surplus_workers(hosts), first.take_slots(hosts)) == (0, [])
            assert second.take_slots(hosts) == ["localhost"]
            with SharedSlotTable(WorkerBounds(4, 4), tmp_path) as third:
                assert (first.surplus_workers(hosts), second.surplus_workers(hosts)) == (2, 2)
                first.free_worker_slots("localhost")
                assert third.take_slots(hosts) == [], "the full minimum, or nothing"
                users = third.describe_slot_usage(hosts)
                assert "5 of 6 slots are in use by 2 other jobs, and at least 4 are needed" in users
            first.free_worker_slots("localhost", is_job_ending=True)
            assert (first.bounds, first.take_slots(hosts)) == (WorkerBounds(1, 1), [])
        assert first.take_slots(hosts) == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_workers_fill_hosts_in_order(tmp_path):
    with SharedSlotTable(WorkerBounds(1, 9, 2), tmp_path) as table:
        assert table.take_slots({"a": 3, "b": 5}) == ["a", "b", "b"]
        assert table.take_slots({"a": 3, "b": 5}) == []
        table.free_worker_slots("a")
        assert table.take_slots({"b": 5}) == [], "the host is not listed any more"
        assert table.take_slots({"b": 6}) == ["b"]


def test_removed_folder_leaves_a_job_unchanged(tmp_path):
    (tmp_path / "slots").mkdir()
    with SharedSlotTable(WorkerBounds(1, 2), tmp_path / "slots") as table:
        assert table.take_slots({"localhost": 2}) == ["localhost"] * 2
        shutil.rmtree(tmp_path / "slots")
        table.free_worker_slots("localhost")
        assert (table.workers, table.take_slots({"localhost": 2}), table.surplus_workers({"localhost": 0})) == (
            1,
            [],
            0,
        )
        expected = "the use of the 2 slots cannot be read now; at least 1 must be free"
        assert table.describe_slot_usage({"localhost": 2}) == expected


JOB_SCRIPT = """
import sys, time
from pathlib import Path
from neondist.launcher.slots import WorkerBounds, SharedSlotTable
with SharedSlotTable(WorkerBounds(2, 2), Path(sys.argv[1])) as table:
    print(table.take_slots({"localhost": 2}), flush=True)
    time.sleep(60)
"""


def test_slots_of_a_killed_job_are_free(tmp_path):
    with subprocess.Popen([sys.executable, "-c", JOB_SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "['localhost', 'localhost']\n"
        with SharedSlotTable(WorkerBounds(1, 2), tmp_path) as table:
            assert table.take_slots({"localhost": 2}) == []
            job.send_signal(signal.SIGKILL)
            job.wait()
            assert table.take_slots({"localhost": 2}) == ["localhost"] * 2
            assert len(list(tmp_path.glob("job-*"))) == 1


def test_damaged_entries_and_dead_jobs_are_ignored(tmp_path):
    (tmp_path / "job-1-dead.json").write_text('{"order": 1, "low": 6, "high": 6, "width": 1, "held": {"localhost": 6}}')
    (tmp_path / "job-2-dead.json").write_text("{")
    with SharedSlotTable(WorkerBounds(1, 2), tmp_path) as table, SharedSlotTable(WorkerBounds(1, 2), tmp_path) as other:
        other._own_path.write_text('{"order": true, "held": []}')
        assert table.take_slots({"localhost": 3}) == ["localhost"] * 2
        assert len(list(tmp_path.glob("job-*"))) == 2


def test_folder_belongs_to_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert shared_slots_folder() == tmp_path / "neondist/slots"
    assert shared_slots_folder().stat().st_mode & 0o777 == 0o700
    (tmp_path / "neondist/slots").chmod(0o777)
    with pytest.raises(LaunchError, match="it is not private to you; remove it, or set XDG_RUNTIME_DIR"):
        shared_slots_folder()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert shared_slots_folder().parent.parent == tmp_path
    (folder := shared_slots_folder()).rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="it is not private to you"):
        shared_slots_folder()
