"""A rank that does not come is reported, and the job ends."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
from session_toys import experiment

from neondist.comm import ProcessGrid, loopback
from neondist.data import Synthetic
from neondist.errors import ConfigError, RemoteError
from neondist.layers import ActivationLayerDist, ConvLayerDist, FCLayerDist, ReLU
from neondist.models import ConvnetDist
from neondist.train import Hook, Watchdog


class SleepsDist(ActivationLayerDist):
    """Tile 1 sleeps, at the third step, in fprop or bprop."""

    where, woken = "", None

    def forward(self, ctx, view):
        if ctx.step == 2 and self.where == "fprop" and self.context.grid.tile == 1:
            self.woken.wait(60)
        return super().forward(ctx, view)

    def backward(self, ctx, dy):
        if ctx.step == 2 and self.where == "bprop" and self.context.grid.tile == 1:
            self.woken.wait(60)
        return super().backward(ctx, dy)


class SleepingHook(Hook):
    def __init__(self, woken):
        self.woken = woken

    def after_step(self, run):
        if run.step == 2 and run.grid.rank == 1:
            self.woken.wait(60)


def reports(where):
    """Let a rank of three sleep; return what the ranks say, in rank order."""
    woken, told = threading.Event(), []

    def layers():
        sleeps = SleepsDist(ReLU(), name="sleeps")
        sleeps.where, sleeps.woken = where, woken
        return [ConvLayerDist(2, 3, name="one"), sleeps, ConvLayerDist(2, 3, name="two"), FCLayerDist(4, name="out")]

    def end(world, patience):
        deadline = time.monotonic() + 60
        while len(told) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        woken.set()
        world.world.fail()

    def body(transport):
        made = experiment(2, layers=layers)
        hooks = [Watchdog(1.0, end, told.append), *([SleepingHook(woken)] if where == "hook" else [])]
        made.run(ProcessGrid(transport, rows=3, cols=1), hooks=hooks)

    with pytest.raises((RemoteError, SystemExit)):
        loopback.run(3, body, at_once=3)  # one that sleeps keeps its turn
    return sorted(told)


def test_asleep_in_fprop():
    for rank, text in enumerate(told := reports("fprop")):
        assert text.startswith(
            f"rank {rank} of 3: no progress for 1 s (--stall-timeout), step 3: forward pass of layer"
        )
    assert "layer 'two': waits in its halo exchange for rank 1" in told[0]
    assert "layer 'sleeps': waits for no other rank, most recent call first:\n" in told[1]
    assert re.search(r'test_watchdog.py", line \d+ in forward$', told[1], re.M)
    assert "call first" not in told[0] + told[2]
    assert "layer 'two': waits in its halo exchange for rank" in told[2]


def test_asleep_in_bprop():
    told = reports("bprop")
    assert "step 3: backward pass of layer 'sleeps': waits for no other rank, most" in told[1]
    assert re.search(r'test_watchdog.py", line \d+ in backward$', told[1], re.M)
    assert re.search(
        "step 3: (backward pass of layer 'one': waits in|sum of gradients: waits in a sum over all 3)", told[0]
    )


def test_asleep_between_steps():
    told = reports("hook")
    assert "step 3, most recent call first:\n" in told[1]
    assert re.search(r'test_watchdog.py", line \d+ in after_step$', told[1], re.M)
    for rank in (0, 2):
        assert told[rank].startswith(
            f"rank {rank} of 3: no progress for 1 s (--stall-timeout), step 3: waits in a sum over all 3 ranks"
        )
        assert "call first" not in told[rank]


def test_a_run_that_goes_on_is_left_alone():
    told = []
    experiment(2).run(hooks=[Watchdog(60.0, lambda *_: told.append("end"), told.append)])
    assert told == []
    for thread in threading.enumerate():
        if thread.name == "watchdog":
            thread.join(60)
            assert not thread.is_alive()


class Ticks:
    """A clock that waiting moves on, for so many looks at it."""

    def __init__(self, looks):
        self.now, self.looks = 0.0, looks

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now, self.looks = self.now + seconds, self.looks - 1
        return self.looks < 0


class Work:
    """Something begins every so many seconds."""

    waits = False

    def __init__(self, ticks, every):
        self.ticks, self.every = ticks, every

    @property
    def begun(self):
        return int(self.ticks.now // self.every)


@pytest.mark.parametrize(("every", "end"), [(8, None), (13, 12), (1000, 12)])
def test_patience_begins_anew_with_all_progress(monkeypatch, every, end):
    """A batch passes every so many seconds; after more than 10 without one, the end comes."""
    ticks, told = Ticks(looks=300), []
    for name, value in ("time", ticks), ("moved", lambda peers: 0), ("written", lambda folder: 0):
        monkeypatch.setattr(f"neondist.train.callbacks.watchdog.{name}", value)
    dog = Watchdog(10.0, lambda *_: told.append(ticks.now), told.append)
    dog.run, dog.work = SimpleNamespace(step=6), Work(ticks, every)
    dog._watch(ticks)
    assert told[1:] == ([] if end is None else [pytest.approx(end)])
    assert [text.partition("(")[0] for text in told[:1]] == ["rank 0 of 1: no progress for 10 s "] * (end is not None)


class SlowDisk(Hook):
    """Writes for longer than the watchdog's patience, a few bytes at a time."""

    def __init__(self, path):
        self.path = path

    def after_step(self, run):
        if run.step == 2:
            with self.path.open("w") as file:
                for _ in range(12):
                    time.sleep(0.25)
                    print("bytes", file=file, flush=True)


def test_a_slow_checkpoint_is_left_alone(tmp_path):
    told = []
    hooks = [Watchdog(2.0, lambda *_: told.append("end"), told.append, folder=tmp_path), SlowDisk(tmp_path / "slow")]
    experiment(1).run(hooks=hooks)
    assert told == []


DIFFERENCES = {
    "seed": ({"seed": 3}, "rank 0 has seed: 0.*, but rank 2 has seed: 3"),
    "batch_size": ({"batch_size": 9}, "rank 0 has batch_size: 10.*, but rank 2 has batch_size: 9"),
    "layers": (
        {"layers": lambda: [ConvLayerDist(3, 5, padding=1), FCLayerDist(4)]},
        r"rank 0 has 'conv1': ConvLayerDist .*rank 2 has 'conv1': ConvLayerDist",
    ),
    "scheme": (
        {"model": lambda layers, **more: ConvnetDist(layers, scheme="tower", **more)},
        "rank 0 has scheme of 'conv1': halo, but rank 2 has scheme of 'conv1': tower",
    ),
    "samples": (
        {"dataset": lambda: Synthetic((13, 11, 2), classes=4, train=44, test=13)},
        "rank 0 has dataset: Synthetic .*train: 45, .*, but rank 2 has dataset: Synthetic .*train: 44, ",
    ),
    "checkpoint": ({"checkpoint": {"every_steps": 2}}, "rank 0 has .* rank 2 has .*every_steps=2"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_disagree(name):
    fields, message = DIFFERENCES[name]

    def body(transport):
        made = experiment(1, **(fields if transport.rank == 2 else {}))
        with pytest.raises(ConfigError, match=rf"the ranks disagree: {message}.*start all ranks with") as caught:
            made.run(made.open_grid(transport), hooks=[])
        return str(caught.value), caught.value.agreed

    assert len(set(loopback.run(3, body))) == 1


def test_ranks_that_ask_for_other_grids():
    def body(transport):
        made = experiment(1, **({"grid": {"rows": 1}} if transport.rank == 2 else {}))
        with pytest.raises(
            ConfigError, match="rank 2: rows is 1, but None on rank 0; all ranks must make the same call"
        ):
            made.open_grid(transport)

    loopback.run(3, body)
