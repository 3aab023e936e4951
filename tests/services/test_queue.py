"""Task queue: order, leases, credit, failures, and random histories of all of them."""

import random
import sqlite3

import numpy as np
import pytest
from queue_histories import run_history

import neondist as nd


class Clock:
    """Clock set by tests."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make_queue(tmp_path, clock):
    queues = []

    def create_queue(records=10, records_per_task=3, **options):
        queues.append(nd.TaskQueue(tmp_path / "q.sqlite", records, records_per_task, clock=clock, **options))
        return queues[-1]

    yield create_queue
    for queue in queues:
        queue.close()


def take_ranges(queue):
    ranges = []
    while (task := queue.get("w")) not in (None, nd.WAIT):
        ranges.append((task.start, task.end))
    return ranges


def test_tasks_cover_the_records_in_order(make_queue):
    assert take_ranges(make_queue()) == [(0, 3), (3, 6), (6, 9), (9, 10)]


@pytest.mark.parametrize("workers", range(1, 8))
def test_order_depends_on_the_seed_alone(make_queue, workers):
    queue, assigned, busy = make_queue(23, 4, epochs=3, seed=5), [], []
    rng = random.Random(workers)
    while True:
        task = queue.get(f"w{rng.randrange(workers)}") if len(busy) < workers else nd.WAIT
        if task is None:
            break
        if task is not nd.WAIT:
            assigned.append(task.indices)
            busy.append(task.id)
        if busy and (task is nd.WAIT or rng.random() < 0.5):
            queue.report(busy.pop(rng.randrange(len(busy))))
    expected = [np.random.Generator(np.random.PCG64([5, epoch])).permutation(23) for epoch in range(3)]
    np.testing.assert_array_equal(np.concatenate(assigned), np.concatenate(expected))


def test_order_without_shuffling(make_queue):
    assert make_queue(shuffle=False).get("w").indices.tolist() == [0, 1, 2]


def test_workers_wait_for_the_last_task(make_queue):
    queue = make_queue(3, 3)
    task = queue.get("a")
    assert queue.get("b") is nd.WAIT
    assert queue.counts() == {"todo": 0, "doing": 1, "done": 0, "failed": 0}
    assert queue.report(task.id)
    assert queue.get("b") is None
    assert queue.counts() == {"todo": 0, "doing": 0, "done": 1, "failed": 0}


def test_expired_lease_returns_unapplied_records(make_queue, clock):
    queue = make_queue(lease=5.0)
    task = queue.get("a")
    assert queue.applied(task.id, 2)
    clock.now = 4.0
    queue.heartbeat("a")
    clock.now = 9.0
    assert queue.applied(task.id, 2)
    clock.now = 14.1
    assert not queue.applied(task.id, 3)
    remainder = queue.get("b")
    assert (remainder.start, remainder.end) == (2, 3)
    assert remainder.id != task.id
    assert not queue.report(task.id)
    np.testing.assert_array_equal(remainder.indices, task.indices[2:])


def test_clock_that_is_set_back_does_not_extend_leases(make_queue, clock):
    clock.now = 3600.0
    queue = make_queue(3, 3, lease=5.0)
    queue.get("a")
    clock.now = 3599.0
    assert queue.get("b") is nd.WAIT
    clock.now = 10.0
    assert queue.get("b") not in (None, nd.WAIT)
    assert queue.get("c") is nd.WAIT


def test_lost_worker_keeps_its_credit(make_queue):
    queue = make_queue(3, 3)
    queue.applied(queue.get("a").id, 1)
    queue.lost("a")
    assert (queue.get("b").start, queue.counts()["doing"]) == (1, 1)


@pytest.mark.parametrize("worker", [0, "0"])
def test_worker_is_text_or_an_index(make_queue, worker):
    queue = make_queue(3, 3)
    queue.applied(queue.get(worker).id, 1)
    queue.heartbeat(worker)
    queue.lost(worker)
    assert (queue.get("b").start, queue.counts()["doing"]) == (1, 1)


def test_reopened_queue_resumes(make_queue):
    queue = make_queue()
    queue.report(queue.get("a").id)
    task = queue.get("a")
    queue.close()
    queue = make_queue()
    assert queue.applied(task.id, 6)
    assert queue.get("b").start == 6
    assert queue.counts() == {"todo": 1, "doing": 1, "done": 2, "failed": 0}


def test_other_arguments_for_the_same_path_are_rejected(make_queue):
    make_queue().close()
    with pytest.raises(nd.ConfigError, match="created with records 10, not 11; use"):
        make_queue(11)


def test_files_other_than_databases_are_rejected(tmp_path):
    (tmp_path / "q.sqlite").write_text("digits" * 100)
    with pytest.raises(nd.ConfigError, match=r"q\.sqlite: cannot be used as a task queue"):
        nd.TaskQueue(tmp_path / "q.sqlite", 3, 3)


def test_third_failure_names_file_and_record(make_queue):
    queue = make_queue(4, 4, source="digits.csv", shuffle=False)
    for _ in range(2):
        queue.report(queue.get("a").id, ok=False, error="no number", record=2)
    queue.report(queue.get("a").id, ok=False, error="another", record=1)
    with pytest.raises(nd.ConfigError, match=r"digits\.csv: record 2 has failed 3 times.*: no number"):
        queue.report(queue.get("a").id, ok=False, error="no number", record=2)
    assert queue.counts()["failed"] == 1
    queue.close()
    with pytest.raises(nd.ConfigError, match="record 2"):
        make_queue(4, 4, shuffle=False).get("b")


def test_bad_records_can_be_skipped(make_queue):
    queue = make_queue(4, 4, epochs=2, retries=1, shuffle=False, skip_bad_records=True)
    task = queue.get("a")
    queue.applied(task.id, 2)
    queue.report(task.id, ok=False, error="no number", record=3)
    task = queue.get("a")
    assert (task.start, task.indices.tolist()) == (2, [2])
    queue.report(task.id)
    task = queue.get("a")
    assert task.indices.tolist() == [0, 1, 2]
    assert [(first, upto, list(indices)) for first, upto, indices in task.minibatches(2)] == [
        (0, 2, [0, 1]),
        (2, 4, [2]),
    ]
    assert queue.skipped == [(3, "no number")]


def test_evaluation_and_prediction_have_separate_rounds(make_queue):
    queue = make_queue(4, 2)
    assert queue.get("a").kind == "training"
    for kind in ("evaluation", "prediction"):
        tasks = [queue.get("a", kind=kind) for _ in range(2)]
        assert [task.indices.tolist() for task in tasks] == [[0, 1], [2, 3]]
        assert queue.get("b", kind=kind) is nd.WAIT
        for task in tasks:
            queue.report(task.id)
        assert queue.get("b", kind=kind) is None
    queue.start_round("evaluation", records=3)
    task = queue.get("a", kind="evaluation")
    assert (task.epoch, task.start, task.end) == (1, 0, 2)


def test_restored_weights_revoke_credits(make_queue):
    queue = make_queue(6, 3, epochs=2)
    tasks = [queue.get("a") for _ in range(3)]
    for task in tasks:
        queue.report(task.id)
    queue.restore([(0, 0, 2), (0, 3, 6)])
    assert not queue.applied(tasks[0].id, 3)
    assert take_ranges(queue) == [(2, 3), (0, 3), (3, 6)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda queue: queue.get("a", kind="trainig"), "kind"),
        (lambda queue: queue.applied(queue.get("a").id, 4), "upto: 4 is outside task 1; expected 0 to 3"),
        (lambda queue: queue.report(queue.get("a").id, False, record=99), "record: 99"),
    ],
)
def test_invalid_arguments_are_rejected(make_queue, call, message):
    with pytest.raises(nd.ConfigError, match=message):
        call(make_queue())


@pytest.mark.parametrize("field", ["records", "records_per_task", "epochs", "lease", "retries"])
def test_numbers_out_of_range_are_rejected(tmp_path, field):
    with pytest.raises(nd.ConfigError, match=field):
        nd.TaskQueue(tmp_path / "q.sqlite", **{"records": 3, "records_per_task": 3, field: 0})


@pytest.mark.parametrize("call", [
    lambda queue: queue.get("w"), lambda queue: queue.heartbeat("w"), lambda queue: queue.lost("w"),
    lambda queue: queue.applied(1, 1), lambda queue: queue.report(1), lambda queue: queue.counts(),
    lambda queue: queue.skipped, lambda queue: queue.restore([]), lambda queue: queue.start_round("evaluation"),
])  # fmt: skip
def test_calls_after_close_are_rejected(make_queue, call):
    queue = make_queue()
    queue.close()
    with pytest.raises(nd.ConfigError, match=r"q\.sqlite: the queue is closed"):
        call(queue)
    queue.close()


def test_texts_that_are_not_utf8(make_queue):
    """Accept names and errors with paths whose bytes are not UTF-8."""
    queue = make_queue(shuffle=False, retries=2, source="data\udcff.csv", skip_bad_records=True)
    for _ in range(2):
        queue.report(queue.get("worker \udcff").id, ok=False, error="\udcff.png: truncated", record=0)
    assert [error for _, error in queue.skipped] == ["\\udcff.png: truncated"]
    queue.get("worker \udcff")
    queue.lost("worker \udcff")
    assert queue.counts()["doing"] == 0
    queue.store_note("path", "\udcff")


def test_database_uses_write_ahead_logging(make_queue, tmp_path):
    make_queue().get("a")
    with sqlite3.connect(tmp_path / "q.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.long
def test_every_record_is_applied_once_per_epoch(tmp_path, seed):
    run_history(seed, tmp_path)


def test_full_disk_is_reported_and_the_queue_continues(tmp_path):
    queue = nd.TaskQueue(tmp_path / "tasks.sqlite", 5000, 1)
    connection = queue._database._connection
    connection.execute("PRAGMA max_page_count = 1")  # the current size: as on a full disk
    problem = r"tasks.sqlite: cannot be written \(database or disk is full\); free disk space"
    with pytest.raises(nd.OutputError, match=problem):
        queue.get("a")
    with pytest.raises(nd.OutputError, match=problem):
        queue.store_note("note", "x" * 100_000)
    connection.execute("PRAGMA max_page_count = 1000")
    assert queue.get("a").start == 0
    queue.close()
