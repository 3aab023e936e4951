"""However a session with data on the disk ends, no thread that reads and no open file is left when it returns."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.data.datasets import hdf5_tiles
from neondist.train import Stop, StopOnSignal, TimeLimit, evaluate_checkpoint, predict

SERIAL = nd.ProcessGrid.serial()


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A data set whose reads take so long that a thread nobody waits for is still there afterwards."""
    draw = np.random.default_rng(0)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for part, count in (("train", 12), ("test", 4)):
            file[f"{part}/images"] = draw.integers(0, 200, (count, 6, 5, 1)).astype("u1")
            file[f"{part}/labels"] = np.arange(count) % 3
    read = hdf5_tiles.HDF5Tiles.__getitem__

    def slowly(tiles, numbers):
        time.sleep(0.01)
        return read(tiles, numbers)

    monkeypatch.setattr(hdf5_tiles.HDF5Tiles, "__getitem__", slowly)
    for module in ("curves", "tiles_picture"):  # they have tests of their own, and take seconds
        monkeypatch.setattr(f"neondist.train.callbacks.{module}.can_draw", lambda: False)
    return tmp_path / "x.h5"


def experiment(path, epochs=2):
    model = nd.ConvnetDist([nd.ConvLayerDist(2, 3), nd.FCLayerDist(3)], backend="numpy")
    return nd.FitExperiment(nd.HDF5Dataset(path), model, batch_size=3, epochs=epochs)


class At(nd.Hook):
    """Does something after the second step."""

    def __init__(self, action):
        self.action = action

    def after_step(self, run):
        if run.step == 2:
            self.action(run)


def fails(run):
    raise ZeroDivisionError


def interrupts(run):
    raise KeyboardInterrupt


def stops(run):
    run.stop = Stop("it is enough")


def kills(run):
    os.kill(os.getpid(), signal.SIGUSR1)


ENDS = {
    "the end": list,
    "an exception": lambda: [At(fails)],
    "Ctrl-C": lambda: [At(interrupts)],
    "a stop in the middle of an epoch": lambda: [At(stops)],
    "a signal": lambda: [StopOnSignal(), At(kills)],
    "the time limit": lambda: [TimeLimit(0.001)],
}


def nothing_is_left(path):
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("neondist-read")] == []
    if sys.platform == "linux":
        assert str(path) not in [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]


@pytest.mark.parametrize("end", ENDS)
def test_training(path, end):
    try:
        result = experiment(path).run(SERIAL, hooks=ENDS[end]())
    except (ZeroDivisionError, KeyboardInterrupt):
        result = None
    nothing_is_left(path)
    assert result is None or (result.stop is None) == (end == "the end")


def test_an_error_of_one_rank_alone(path):
    def body(world):
        action = fails if world.rank == 1 else (lambda run: None)
        try:
            experiment(path).run(nd.ProcessGrid(world), hooks=[At(action)])
        finally:
            done.add(world.rank)

    done = set()
    with pytest.raises(ZeroDivisionError):
        loopback.run(3, body)
    end = time.monotonic() + 60
    while len(done) < 3 and time.monotonic() < end:  # the others learn of it where they wait
        time.sleep(0.001)
    nothing_is_left(path)


def test_evaluation_prediction_and_a_run_that_has_nothing_to_do(path, tmp_path):
    experiment(path).run(SERIAL, tmp_path / "out", hooks=[])
    checkpoint = tmp_path / "out" / "checkpoint.h5"
    found = evaluate_checkpoint(experiment(path), checkpoint, SERIAL)
    nothing_is_left(path)
    assert found["samples"] == 4
    assert predict(experiment(path), checkpoint, f"{path}:test/images", tmp_path / "y.npy", SERIAL) == (4, 3)
    nothing_is_left(path)
    assert experiment(path).run(SERIAL, tmp_path / "out", resume=True, hooks=[]).stop is None
    nothing_is_left(path)


def test_a_loop_of_ones_own(path):
    data = nd.HDF5Dataset(path)
    data.open(SERIAL)
    data.close()  # nothing has been read
    batches = data.train.batches([[0], [1], [2], [3]])
    next(batches)
    data.close()
    nothing_is_left(path)
    assert len([x for x, _ in batches]) == 3  # what is read later opens the file again
    unfinished = data.train.batches([[0], [1], [2]])
    next(unfinished)
    unfinished.close()
    data.close()
    nothing_is_left(path)
