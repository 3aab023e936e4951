"""Snapshots in the memory of nodes: what is written is what a run goes on from, whichever node is lost."""

import numpy as np
import pytest
from elastic_runs import everything

import neondist as nd
from neondist.comm import loopback
from neondist.io.checkpoint import SnapshotStore, snapshots
from neondist.io.generation_log import GenerationLog, read_events
from neondist.train.callbacks.checkpoint import Checkpoint
from neondist.train.callbacks.snapshots import SHARE, Snapshots

KEY = "0123456789abcdef" * 2
NODES = ["a", "a", "b", "b"]


@pytest.fixture
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(snapshots, "SHARED_MEMORY", folder)
    monkeypatch.setenv("NEONDIST_GENERATION", "1")  # a supervisor has written the log
    return folder


class Killed(Exception):
    pass


class KilledAfter(nd.Hook):
    """Ends a run after so many steps, as if it was killed."""

    def __init__(self, steps):
        self.left = steps

    def after_step(self, run):
        self.left -= 1
        if not self.left:
            raise Killed


class Nodes(Snapshots):
    """Snapshots of ranks on several nodes, after each step."""

    def __init__(self, world, folder):
        store = SnapshotStore(KEY, world, NODES[world.rank % len(NODES)])
        super().__init__(store, 1, Checkpoint(folder / "checkpoint.h5"))


def train(world, folder, hooks=(), **how):
    data = nd.Synthetic((9, 8, 2), classes=4, train=25, test=7)
    made = nd.FitExperiment(data, everything(), batch_size=10, epochs=3, checkpoint={"every_epochs": 100})
    made.run(nd.ProcessGrid(world), output=folder, hooks=list(hooks), **how)
    return made.model.state()


def killed(folder):
    """Train on two nodes with a snapshot after each step, up to a step in the middle of the second epoch."""
    folder.mkdir()
    GenerationLog(folder)
    log = folder / "generations.jsonl"
    log.write_text(log.read_text().split('"key"')[0] + f'"key": "{KEY}"}}\n')

    def job(world):
        with pytest.raises(Killed):
            train(world, folder, [Nodes(world, folder), KilledAfter(5)], resume="auto")

    loopback.run(4, job)


def resumed(folder, ranks, monkeypatch, nodes=NODES):
    """Go on, on the same nodes; return the whole arrays."""
    real = SnapshotStore.__init__

    def on_nodes(self, key, world, node=None):
        real(self, key, world, nodes[world.rank % len(nodes)])

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
def test_the_loss_of_nodes(lost, memory, tmp_path, monkeypatch, expected):
    patterns, source, step = LOSSES[lost]
    folder = tmp_path / "out"
    killed(folder)
    assert sorted(path.name for path in memory.glob("*/*.h5")) == ["a-0000000005.h5", "b-0000000005.h5"]
    for pattern in patterns:
        for path in memory.glob(f"*/{pattern}"):
            path.unlink()
    ranks = 4 if lost != "its buddy" else 2
    found = resumed(folder, ranks, monkeypatch)
    (event,) = [one for one in read_events(folder) if one["event"] == "resume"]
    assert (event["source"], event["step"]) == (source, step)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0 if ranks == 4 else 1e-10, atol=1e-13 * (ranks < 4))
    assert list(memory.iterdir()) == []


def test_a_damaged_snapshot_is_left(memory, tmp_path, monkeypatch, expected):
    folder = tmp_path / "out"
    killed(folder)
    for path in memory.glob("*/b-*"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    found = resumed(folder, 4, monkeypatch)
    assert [one["step"] for one in read_events(folder) if one["event"] == "resume"] == [5]
    assert all((found[name] == array).all() for name, array in expected.items())


def test_checkpoints_on_the_disk_where_there_is_no_room(memory, tmp_path, capsys):
    memory.rmdir()
    folder = tmp_path / "out"
    killed(folder)
    assert "no snapshots in memory, but checkpoints on disk at the same interval: " in capsys.readouterr().out
    found = loopback.run(1, lambda world: snapshots_step(folder, world))
    assert found == [5]


def snapshots_step(folder, world):
    from neondist.train.callbacks.checkpoint import step_of

    return step_of(folder / "checkpoint.h5", world)


def test_snapshots_take_their_share_of_the_time():
    now = [0.0]
    store = loopback.run(1, lambda world: SnapshotStore(KEY, world))[0]
    hook = Snapshots(store, "auto", Checkpoint(nd.__file__), clock=lambda: now[0])
    hook.cost, written = 0.05, 0
    for _ in range(10_000):
        now[0] += 0.01
        if hook.affordable:
            now[0] += hook.cost
            hook.spent += hook.cost
            written += 1
        assert hook.spent <= SHARE * now[0]
    assert written >= 0.95 * SHARE * 100 / 0.05
