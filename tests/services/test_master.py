"""The master: tasks over gRPC, and the comparison of what servers have applied with what there is."""

from contextlib import closing

import pytest
from parameter_servers import Servers, arrays

import neondist as nd
from neondist.comm import SingleTransport
from neondist.errors import ServiceError
from neondist.services.master import Master
from neondist.services.message import Message
from neondist.services.progress import Credit, Credits
from neondist.services.state import UpdateRule
from neondist.services.worker_tasks import WorkerTasks

RECORDS, SIZE, PER_TASK, EPOCHS = 11, 2, 3, 2
FACTS = {"records": RECORDS, "batch_size": SIZE, "epochs": EPOCHS, "seed": 3}
ONCE = f"{RECORDS} records in each of {EPOCHS} epochs, each once"


class Worker:
    """A worker that pushes the same gradients for every minibatch."""

    def __init__(self, job, name, values):
        address = job.master_host.address
        self.tasks = job.stack.enter_context(closing(WorkerTasks(address, job.token, name, SingleTransport(), FACTS)))
        self.client, self.values = job.client(name), values
        self.client.initialize(values, nd.SGD(0.1), UpdateRule(sync=False))
        self.client.pull(arrays(0))

    def steps(self, epoch):
        """Yield before each push, and between push and credit, what comes next."""
        for task in self.tasks.of_epoch(epoch):
            for first, upto, numbers in task.minibatches(SIZE):
                self.tasks.begin(first, upto, len(numbers))
                yield "push", numbers
                result = self.client.push(self.values, self.tasks.samples, self.tasks.credit)
                self.tasks.updated = True
                yield "duplicate" if result.duplicate else "pushed", numbers
                if not self.tasks.finish_minibatch():
                    break


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.long
def test_what_a_lost_worker_has_pushed_is_applied_once(steps):
    """The first worker ends before or after a push; another one does the rest, and its duplicate is refused."""
    values = arrays(0)
    with Servers(2, minibatches_per_task=PER_TASK) as job:
        first, second = (Worker(job, name, values) for name in ("a", "b"))
        done = [next(found)[0] for found in [first.steps(0)] for _ in range(steps)]
        first.tasks.close()
        job.master.release("a")
        seen = [(what, numbers) for epoch in range(EPOCHS) for what, numbers in second.steps(epoch)]
        told = {job.master.check(one._state.samples, one._state.credits) for one in job.servers}
        versions = {one._state.version for one in job.servers}
    assert told == {ONCE}
    assert versions == {EPOCHS * 6}
    assert [what for what, _ in seen].count("duplicate") == (done[-1:] == ["pushed"])


def test_a_minibatch_whose_gradient_was_refused_is_handed_out_again():
    with Servers(1, minibatches_per_task=PER_TASK) as job:
        worker = Worker(job, "a", arrays(0))
        seen = []
        for what, numbers in worker.steps(0):
            if what != "push":
                seen.append(tuple(numbers))
                worker.tasks.refused = len(seen) == 1  # as a server would, of older values
        assert len(seen) == 7
        assert seen[0] in seen[1:]


def test_workers_must_train_on_the_same():
    master = Master()
    with pytest.raises(nd.ConfigError, match="report_training_params first"):
        master.get_task(Message({"worker": "a"}))
    master.report_training_params(Message(FACTS))
    with pytest.raises(nd.ConfigError, match="seed: 4, but other workers of the job have 3"):
        master.report_training_params(Message(FACTS | {"seed": 4}))


def test_a_worker_that_asks_again_gets_the_same_records():
    """The reply may have been lost."""
    master = Master(PER_TASK)
    master.report_training_params(Message(FACTS))
    first, again, other = (master.get_task(Message({"worker": name})) for name in "aab")
    assert first.array("indices", "int64", [6]).tolist() == again.array("indices", "int64", [6]).tolist()
    assert not master.applied(
        Message({"task_id": first.integer("task_id"), "upto": 2, "updated": True, "credit": [0, 0, 0]})
    ).flag("credited")
    assert other.integer("start") == 6


def served():
    """Return a master whose tasks are done, and the credits of all minibatches."""
    master, credits = Master(PER_TASK), Credits()
    master.report_training_params(Message(FACTS))
    while (reply := master.get_task(Message({"worker": "a"}))).text("type") == "TRAINING":
        told = {"task_id": reply.integer("task_id"), "err_message": ""}
        assert master.report_task_result(Message(told)).flag("credited")
        for at in range(-(-(reply.integer("end") - reply.integer("start")) // SIZE)):
            credits.add(Credit(reply.integer("epoch"), reply.integer("start") // (PER_TASK * SIZE), at))
    return master, credits


def test_records_that_were_applied_twice_or_never_are_found():
    master, credits = served()
    assert master.check(RECORDS * EPOCHS, credits) == ONCE
    with pytest.raises(ServiceError, match="has applied 24 records, 22 of them once"):
        master.check(RECORDS * EPOCHS + SIZE, credits)
    less = Credits()
    for credit in credits.to_list()[1:]:
        less.add(credit)
    with pytest.raises(ServiceError, match="has not applied 1 of 12 minibatches"):
        master.check(RECORDS * EPOCHS - SIZE, less)
