"""Master: tasks over gRPC, and the check of records that servers have applied."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from parameter_servers import Servers, draw_arrays

import neondist as nd
from neondist.comm import SingleTransport
from neondist.errors import ServiceError
from neondist.services.master import Master
from neondist.services.master_client import MasterClient
from neondist.services.message import Message
from neondist.services.progress import AppliedMinibatches, MinibatchId
from neondist.services.state import SyncPolicy
from neondist.train.callbacks.master_statistics import JobStatisticsHook
from neondist.train.state import EpochRecord

RECORDS, BATCH_SIZE, RECORDS_PER_TASK, EPOCHS = 11, 2, 3, 2
QUEUE_PARAMETERS = {"records": RECORDS, "batch_size": BATCH_SIZE, "epochs": EPOCHS, "seed": 3}
APPLIED_ONCE_TEXT = f"{RECORDS} records in each of {EPOCHS} epochs, each once"


class Worker:
    """Worker that pushes the same gradients for every minibatch."""

    def __init__(self, job, name, values):
        address = job.master_host.address
        self.master_client = job.stack.enter_context(
            closing(MasterClient(address, job.token, name, SingleTransport(), QUEUE_PARAMETERS))
        )
        self.client, self.values = job.client(name), values
        self.client.push_initial_values(values, nd.SGD(0.1), SyncPolicy(sync=False))
        self.client.pull(draw_arrays(0))

    def steps(self, epoch):
        """Yield a stage and the records of a minibatch, before each push and between push and credit."""
        for task in self.master_client.tasks_through_epoch(epoch):
            for first, upto, numbers in task.minibatches(BATCH_SIZE):
                self.master_client.begin_minibatch(first, upto, len(numbers))
                yield "push", numbers
                result = self.client.push(self.values, self.master_client.samples, self.master_client.minibatch)
                self.master_client.was_pushed = True
                yield "duplicate" if result.duplicate else "pushed", numbers
                if not self.master_client.finish_minibatch():
                    break


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.long
def test_pushes_of_a_lost_worker_are_applied_once(steps):
    """Lose a worker before or after a push; a second one continues, and its duplicate is rejected."""
    values = draw_arrays(0)
    with Servers(2, minibatches_per_task=RECORDS_PER_TASK) as job:
        first, second = (Worker(job, name, values) for name in ("a", "b"))
        stages = [next(iterator)[0] for iterator in [first.steps(0)] for _ in range(steps)]
        first.master_client.close()
        job.master.requeue_task_of("a")
        events = [(stage, numbers) for epoch in range(EPOCHS) for stage, numbers in second.steps(epoch)]
        summaries = {
            job.master.verify_applied_gradients(server._state.samples, server._state.applied_minibatches)
            for server in job.servers
        }
        versions = {server._state.version for server in job.servers}
    assert summaries == {APPLIED_ONCE_TEXT}
    assert versions == {EPOCHS * 6}
    assert [stage for stage, _ in events].count("duplicate") == (stages[-1:] == ["pushed"])


def test_rejected_minibatch_is_assigned_again():
    with Servers(1, minibatches_per_task=RECORDS_PER_TASK) as job:
        worker = Worker(job, "a", draw_arrays(0))
        assigned = []
        for stage, numbers in worker.steps(0):
            if stage != "push":
                assigned.append(tuple(numbers))
                worker.master_client.was_rejected = len(assigned) == 1  # as by a server with newer values
        assert len(assigned) == 7
        assert assigned[0] in assigned[1:]


def test_training_loss_of_all_workers():
    """Record the loss of all workers if the first one has trained no minibatch of the epoch."""
    master = Master()
    master.report_training_params(Message(QUEUE_PARAMETERS))
    for worker, losses in (("b", (3.0, -1.0, None)), ("c", (5.0,))):
        task = master.get_task(Message({"worker": worker})).fields
        for index, loss in enumerate(losses):
            fields = {"task_id": task["task_id"], "upto": task["start"] + 1, "updated": True}
            fields |= {"credit": [0, task["start"], index]}
            fields |= {} if loss is None else {"loss": loss, "samples": index + 1}
            master.credit_records(Message(fields))
        expired = Message({**fields, "task_id": 999, "loss": 1e9, "samples": 1})
        assert not master.credit_records(expired).flag("credited")
    assert (master.mean_training_loss(0), master.mean_training_loss(1)) == ((3 - 2 + 5) / 4, None)
    for own, total, expected in ((math.nan, 1.5, 1.5), (2.0, 1.5, 2.0), (math.nan, None, math.nan)):
        run = SimpleNamespace(
            epoch=3,
            is_first_rank=True,
            grid=SimpleNamespace(world=SingleTransport()),
            history=[EpochRecord(train_loss=own)],
        )
        hook, epochs = JobStatisticsHook(None), []
        hook._fetch_job_statistics = lambda epoch, total=total, epochs=epochs: (
            epochs.append(epoch) or {"train_loss": total}
        )
        hook.after_epoch(run)
        np.testing.assert_equal(run.history[0], {"train_loss": expected, "job": {"train_loss": total}})
        assert epochs == [2]


@pytest.mark.parametrize("seed", range(3))
def test_training_loss_survives_restarts(tmp_path, seed):
    """Restart the master, or restore older servers, between minibatches: each counts once in the mean of its epoch."""
    rng, losses = np.random.default_rng(seed), {}
    parameters = {"records": 10, "batch_size": 2, "epochs": 1, "seed": 0}
    master = Master(path=tmp_path / "tasks.sqlite", minibatches_per_task=2)
    master.report_training_params(Message(parameters))
    master.reset_tasks(AppliedMinibatches(), ["a"])
    while not master.all_tasks_done():
        task = master.get_task(Message({"worker": "w"})).fields
        start = task["start"]
        key, loss = [0, start // 4, start % 4 // 2], rng.normal()
        fields = {"task_id": task["task_id"], "upto": start + 2, "updated": True, "credit": key}
        assert master.credit_records(Message({**fields, "loss": loss, "samples": 2})).flag("credited")
        losses[tuple(key)] = loss
        event = rng.integers(4)
        if event == 0:
            master.close()
            master = Master(path=tmp_path / "tasks.sqlite", minibatches_per_task=2)
            master.servers_match_queue = True
        elif event == 1 and len(losses) < 5:
            master.reset_tasks(AppliedMinibatches(), ["b"])
    assert len(losses) == 5
    assert master.mean_training_loss(0) == pytest.approx(np.mean([*losses.values()]), rel=1e-12)
    master.close()


def test_workers_must_agree_on_the_data():
    master = Master()
    with pytest.raises(nd.ConfigError, match="report_training_params first"):
        master.get_task(Message({"worker": "a"}))
    master.report_training_params(Message(QUEUE_PARAMETERS))
    with pytest.raises(nd.ConfigError, match="seed: 4, but 3 on other workers or in the run to resume; use"):
        master.report_training_params(Message(QUEUE_PARAMETERS | {"seed": 4}))


def test_epochs_are_added_while_other_threads_read_the_queue(tmp_path):
    with closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        master.report_training_params(Message(QUEUE_PARAMETERS))
        reading, added = threading.Event(), threading.Event()

        def read():
            reads = 0
            while not added.is_set():
                master.all_tasks_done()
                assert master.read_matching_incarnations() is None
                reads += 1
                reading.set()
            return reads

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(read)
            assert reading.wait(20)
            for epochs in range(EPOCHS + 1, EPOCHS + 50):
                master.report_training_params(Message(QUEUE_PARAMETERS | {"epochs": epochs}))
            added.set()
            assert future.result(20)
    with closing(Master(path=tmp_path / "tasks.sqlite")) as master:
        assert master._parameters["epochs"] == EPOCHS + 49


def test_repeated_requests_return_the_same_records():
    """Request a task again, as after a lost reply."""
    master = Master(RECORDS_PER_TASK)
    master.report_training_params(Message(QUEUE_PARAMETERS))
    first, repeated, second = (master.get_task(Message({"worker": name})) for name in "aab")
    assert first.array("indices", "int64", [6]).tolist() == repeated.array("indices", "int64", [6]).tolist()
    assert not master.credit_records(
        Message({"task_id": first.integer("task_id"), "upto": 2, "updated": True, "credit": [0, 0, 0]})
    ).flag("credited")
    assert second.integer("start") == 6


def finish_tasks():
    """Return a master without remaining tasks, and the credits of all minibatches."""
    master, credits = Master(RECORDS_PER_TASK), AppliedMinibatches()
    master.report_training_params(Message(QUEUE_PARAMETERS))
    while (reply := master.get_task(Message({"worker": "a"}))).text("type") == "TRAINING":
        result = {"task_id": reply.integer("task_id"), "err_message": ""}
        assert master.report_task_result(Message(result)).flag("credited")
        for minibatch in range(-(-(reply.integer("end") - reply.integer("start")) // BATCH_SIZE)):
            credits.add(
                MinibatchId(
                    reply.integer("epoch"), reply.integer("start") // (RECORDS_PER_TASK * BATCH_SIZE), minibatch
                )
            )
    return master, credits


def test_records_applied_twice_or_never_are_detected():
    master, credits = finish_tasks()
    assert master.verify_applied_gradients(RECORDS * EPOCHS, credits) == APPLIED_ONCE_TEXT
    with pytest.raises(ServiceError, match="has applied 24 records, but 22 were expected"):
        master.verify_applied_gradients(RECORDS * EPOCHS + BATCH_SIZE, credits)
    incomplete = AppliedMinibatches()
    for credit in credits.to_list()[1:]:
        incomplete.add(credit)
    with pytest.raises(ServiceError, match="lacks 1 of 12 minibatches"):
        master.verify_applied_gradients(RECORDS * EPOCHS - BATCH_SIZE, incomplete)
