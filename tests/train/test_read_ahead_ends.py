"""Cleanup of reader threads and open files at the end of a session, however it ends."""

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
    """A data set with reads slow enough for an abandoned thread to outlive the session."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for part, count in (("train", 12), ("test", 4)):
            file[f"{part}/images"] = rng.integers(0, 200, (count, 6, 5, 1)).astype("u1")
            file[f"{part}/labels"] = np.arange(count) % 3
    read = hdf5_tiles.HDF5Array.__getitem__

    def read_slowly(tiles, numbers):
        time.sleep(0.01)
        return read(tiles, numbers)

    monkeypatch.setattr(hdf5_tiles.HDF5Array, "__getitem__", read_slowly)
    for module in ("curves_picture", "tiles_picture"):  # slow, and tested elsewhere
        monkeypatch.setattr(f"neondist.train.callbacks.{module}.has_matplotlib", lambda: False)
    return tmp_path / "x.h5"


def make_experiment(path, epochs=2):
    model = nd.ConvnetDist([nd.ConvLayerDist(2, 3), nd.FCLayerDist(3)], backend="numpy")
    return nd.FitExperiment(nd.HDF5Dataset(path), model, batch_size=3, epochs=epochs)


class ActionAtStepTwo(nd.Hook):
    """Perform an action after the second step."""

    def __init__(self, action):
        self.action = action

    def after_step(self, run):
        if run.step == 2:
            self.action(run)


def fail(run):
    raise ZeroDivisionError


def interrupt(run):
    raise KeyboardInterrupt


def stop(run):
    run.stop = Stop("it is enough")


def send_signal(run):
    os.kill(os.getpid(), signal.SIGUSR1)


HOOKS_BY_END = {
    "the end": list,
    "an exception": lambda: [ActionAtStepTwo(fail)],
    "Ctrl-C": lambda: [ActionAtStepTwo(interrupt)],
    "a stop in the middle of an epoch": lambda: [ActionAtStepTwo(stop)],
    "a signal": lambda: [StopOnSignal(), ActionAtStepTwo(send_signal)],
    "the time limit": lambda: [TimeLimit(0.001)],
}


def check_no_leftovers(path):
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("neondist-read")] == []
    if sys.platform == "linux":
        assert str(path) not in [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]


@pytest.mark.parametrize("end", HOOKS_BY_END)
def test_training_leaves_no_threads_or_files(path, end):
    try:
        result = make_experiment(path).run(SERIAL, hooks=HOOKS_BY_END[end]())
    except (ZeroDivisionError, KeyboardInterrupt):
        result = None
    check_no_leftovers(path)
    assert result is None or (result.stop is None) == (end == "the end")


def test_error_on_one_rank_leaves_no_threads_or_files(path):
    def body(world):
        action = fail if world.rank == 1 else (lambda run: None)
        try:
            make_experiment(path).run(nd.ProcessGrid(world), hooks=[ActionAtStepTwo(action)])
        finally:
            finished.add(world.rank)

    finished = set()
    with pytest.raises(ZeroDivisionError):
        loopback.run(3, body)
    deadline = time.monotonic() + 60
    while len(finished) < 3 and time.monotonic() < deadline:  # the other ranks raise at their next communication
        time.sleep(0.001)
    check_no_leftovers(path)


def test_evaluation_and_prediction_leave_no_threads_or_files(path, tmp_path):
    make_experiment(path).run(SERIAL, tmp_path / "out", hooks=[])
    checkpoint = tmp_path / "out" / "checkpoint.h5"
    results = evaluate_checkpoint(make_experiment(path), checkpoint, SERIAL)
    check_no_leftovers(path)
    assert results["samples"] == 4
    assert predict(make_experiment(path), checkpoint, f"{path}:test/images", tmp_path / "y.npy", SERIAL) == (4, 3)
    check_no_leftovers(path)
    assert make_experiment(path).run(SERIAL, tmp_path / "out", resume=True, hooks=[]).stop is None
    check_no_leftovers(path)


def test_custom_loop_leaves_no_threads_or_files(path):
    data = nd.HDF5Dataset(path)
    data.open(SERIAL)
    data.close()  # before any read
    batches = data.train.batches([[0], [1], [2], [3]])
    next(batches)
    data.close()
    check_no_leftovers(path)
    assert len([x for x, _ in batches]) == 3  # a later read reopens the file
    unfinished = data.train.batches([[0], [1], [2]])
    next(unfinished)
    unfinished.close()
    data.close()
    check_no_leftovers(path)
