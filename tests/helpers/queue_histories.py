"""Random histories of a task queue, its workers and the weights that they update."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import neondist as nd


@dataclass
class Weights:
    """Number of updates of the weights by each record, and the minibatches that were applied."""

    counts: dict = field(default_factory=dict)
    applied: set = field(default_factory=set)

    def push(self, task, first, stop, records):
        """Apply a minibatch once; return whether it was the first time."""
        key = task.epoch, first, stop
        if key in self.applied:
            return False
        self.applied.add(key)
        for record in map(int, records):
            self.counts[task.epoch, record] = self.counts.get((task.epoch, record), 0) + 1
        return True

    def copy(self):
        return Weights(dict(self.counts), set(self.applied))


class Worker:
    """Worker that can be suspended between any two of its calls."""

    def __init__(self, name):
        self.name, self.task, self.remaining, self.unreported_stop = name, None, [], None

    def take(self, queue, batch):
        """Request a task; return whether the queue has no more work."""
        self.task = queue.get(self.name)
        if self.task is nd.WAIT or self.task is None:
            done, self.task = self.task is None, None
            return done
        self.remaining, self.unreported_stop = list(self.task.minibatches(batch)), None
        return False

    def step(self, queue, weights, batch, bad, rng):
        """Make the next call; return whether the queue has no more work."""
        if self.task is None:
            return self.take(queue, batch)
        if self.unreported_stop is not None:
            if not queue.applied(self.task.id, self.unreported_stop):
                self.task = None
            self.unreported_stop = None
        elif self.remaining:
            first, stop, records = self.remaining.pop(0)
            if unreadable := bad & {int(record) for record in records}:
                queue.report(self.task.id, ok=False, error="unreadable", record=min(unreadable))
                self.task = None
            else:
                weights.push(self.task, first, stop, records)
                self.unreported_stop = stop
        else:
            queue.report(self.task.id)
            if rng.random() < 0.2:
                queue.report(self.task.id)
            self.task = None
        return False


def run_history(seed: int, folder: Path) -> dict:
    """Run a history to its end; AssertionError unless each record is applied once per epoch."""
    rng = random.Random(seed)
    records, per_task, epochs = rng.randint(1, 30), rng.randint(1, 9), rng.randint(1, 3)
    batch, clock = rng.randint(1, per_task), [0.0]
    bad = set(rng.sample(range(records), min(records, rng.choice([0, 0, 1, 2]))))
    path = folder / f"{seed}.sqlite"

    def open_queue():
        return nd.TaskQueue(
            path, records, per_task, epochs, seed, rng_shuffle, 10.0, 3, lambda: clock[0], skip_bad_records=True
        )

    rng_shuffle = rng.random() < 0.8
    queue, weights, saved = open_queue(), Weights(), Weights()
    workers = [Worker(f"w{number}") for number in range(rng.randint(1, 7))]
    suspended, events = [], {"lost": 0, "reopened": 0, "restored": 0, "expired": 0, "late": 0}
    for _ in range(rng.randint(5, 120)):
        event, worker = rng.random(), rng.choice(workers)
        clock[0] += rng.random()
        if event < 0.05:  # killed, detected or not
            if rng.random() < 0.5:
                queue.lost(worker.name)
            workers[workers.index(worker)] = Worker(f"{worker.name}'")
            events["lost"] += 1
        elif event < 0.08:  # suspended until its leases expire, perhaps forever
            suspended.append(worker)
            workers[workers.index(worker)] = Worker(f"{worker.name}+")
            clock[0] += 11
            events["expired"] += 1
        elif event < 0.12 and suspended:
            resumed = suspended.pop()
            for _ in range(rng.randint(1, 6)):
                resumed.step(queue, weights, batch, bad, rng)
            if resumed.task is not None:
                workers.append(resumed)
            events["late"] += 1
        elif event < 0.15:
            queue.close()
            queue = open_queue()
            events["reopened"] += 1
        elif event < 0.17:
            saved = weights.copy()
        elif event < 0.18:  # the servers are lost and restored from their checkpoint
            weights = saved.copy()
            queue.restore(weights.applied)
            events["restored"] += 1
        elif event < 0.22:
            queue.heartbeat(worker.name)
        else:
            worker.step(queue, weights, batch, bad, rng)
    for worker in workers:
        queue.lost(worker.name)
    last_worker, clock[0] = Worker("last"), clock[0] + 11
    for _ in range(20 * records * epochs + 1000):
        if last_worker.step(queue, weights, batch, bad, rng):
            break
    else:
        raise AssertionError("the queue did not finish")
    skipped = {record for record, _ in queue.skipped}
    assert skipped <= bad
    expected = {(epoch, record): 1 for epoch in range(epochs) for record in range(records) if record not in bad}
    assert weights.counts == expected, f"history {seed}"
    counts = queue.counts()
    assert (counts["todo"], counts["doing"], counts["failed"]) == (0, 0, 0)
    queue.close()
    return events
