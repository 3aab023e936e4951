"""Snapshots in the memory of nodes: storage, and resumption after the loss of nodes."""

import re

import numpy as np
import pytest
from elastic_runs import make_convnet
from interruptions import Killed

import neondist as nd
from neondist.comm import loopback
from neondist.io.checkpoint import SnapshotStore, snapshots
from neondist.io.run_event_log import RunEventLog, read_events
from neondist.train.callbacks.checkpoint import Checkpoint
from neondist.train.callbacks.snapshots import MAX_SNAPSHOT_TIME_FRACTION, Snapshots

KEY = "0123456789abcdef" * 2
NODES = ["a", "a", "b", "b"]


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(snapshots, "SHARED_MEMORY", folder)
    monkeypatch.setenv("NEONDIST_GENERATION", "1")  # a supervisor has written the log
    return folder


class KillAfterSteps(nd.Hook):
    """Kill a run after a number of steps."""

    def __init__(self, steps):
        self.steps_left = steps

    def after_step(self, run):
        self.steps_left -= 1
        if not self.steps_left:
            raise Killed


class NodeSnapshots(Snapshots):
    """Snapshots of ranks on several nodes, after each step."""

    def __init__(self, world, folder):
        store = SnapshotStore(KEY, world, NODES[world.rank % len(NODES)])
        super().__init__(store, 1, Checkpoint(folder / "checkpoint.h5"))


def train(world, folder, hooks=(), **options):
    data = nd.Synthetic((9, 8, 2), classes=4, train=25, test=7)
    experiment = nd.FitExperiment(data, make_convnet(), batch_size=10, epochs=3, checkpoint={"every_epochs": 100})
    experiment.run(nd.ProcessGrid(world), output=folder, hooks=list(hooks), **options)
    return experiment.model.state()


def train_until_killed(folder):
    """Train on two nodes with a snapshot after each step, up to a step in the middle of the second epoch."""
    folder.mkdir()
    RunEventLog(folder)
    log = folder / "generations.jsonl"
    log.write_text(log.read_text().split('"key"')[0] + f'"key": "{KEY}"}}\n')

    def job(world):
        with pytest.raises(Killed):
            train(world, folder, [NodeSnapshots(world, folder), KillAfterSteps(5)], resume="auto")

    loopback.run(4, job)


def resume(folder, ranks, monkeypatch, nodes=NODES):
    """Resume on the same nodes; return the full arrays."""
    create = SnapshotStore.__init__

    def on_nodes(self, key, world, node=None):
        create(self, key, world, nodes[world.rank % len(nodes)])

    monkeypatch.setattr(SnapshotStore, "__init__", on_nodes)
    return loopback.run(ranks, lambda world: train(world, folder, resume=True))[0]


@pytest.fixture(scope="module")
def expected():
    return loopback.run(4, lambda world: train(world, None))[0]


LOSSES = {
    "nothing": ((), "a snapshot", 5),
    "the first node": (("a-*",), "a snapshot", 5),
    "its buddy": (("b-*",), "a snapshot", 5),
    "both": (("a-*", "b-*"), "checkpoint.h5", 0),
}


@pytest.mark.parametrize("lost", LOSSES)
@pytest.mark.long
def test_loss_of_nodes(lost, shared_memory, tmp_path, monkeypatch, expected):
    patterns, source, step = LOSSES[lost]
    folder = tmp_path / "out"
    train_until_killed(folder)
    assert sorted(path.name for path in shared_memory.glob("*/*.h5")) == ["a-0000000005.h5", "b-0000000005.h5"]
    for pattern in patterns:
        for path in shared_memory.glob(f"*/{pattern}"):
            path.unlink()
    ranks = 4 if lost != "its buddy" else 2
    state = resume(folder, ranks, monkeypatch)
    (event,) = [event for event in read_events(folder) if event["event"] == "resume"]
    assert (event["source"], event["step"]) == (source, step)
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=0 if ranks == 4 else 1e-10, atol=1e-13 * (ranks < 4))
    assert list(shared_memory.iterdir()) == []


def test_damaged_snapshot_is_ignored(shared_memory, tmp_path, monkeypatch, expected):
    folder = tmp_path / "out"
    train_until_killed(folder)
    for path in shared_memory.glob("*/b-*"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    state = resume(folder, 4, monkeypatch)
    assert [event["step"] for event in read_events(folder) if event["event"] == "resume"] == [5]
    assert all((state[name] == array).all() for name, array in expected.items())


def test_checkpoints_on_disk_without_shared_memory(shared_memory, tmp_path, capsys):
    shared_memory.rmdir()
    folder = tmp_path / "out"
    train_until_killed(folder)
    message = r"snapshots cannot be kept in memory \(.+\); checkpoints are written to disk at the same interval instead"
    assert re.search(message, capsys.readouterr().out)
    steps = loopback.run(1, lambda world: read_step(folder, world))
    assert steps == [5]


def read_step(folder, world):
    from neondist.train.callbacks.checkpoint import read_checkpoint_step

    return read_checkpoint_step(folder / "checkpoint.h5", world)


def test_snapshots_stay_within_their_share_of_time():
    now = [0.0]
    store = loopback.run(1, lambda world: SnapshotStore(KEY, world))[0]
    hook = Snapshots(store, "auto", Checkpoint(nd.__file__), clock=lambda: now[0])
    hook.expected_snapshot_seconds, written = 0.05, 0
    for _ in range(10_000):
        now[0] += 0.01
        if hook.is_snapshot_affordable:
            now[0] += hook.expected_snapshot_seconds
            hook.total_snapshot_seconds += hook.expected_snapshot_seconds
            written += 1
        assert hook.total_snapshot_seconds <= MAX_SNAPSHOT_TIME_FRACTION * now[0]
    assert written >= 0.95 * MAX_SNAPSHOT_TIME_FRACTION * 100 / 0.05
