"""Checkpoint schedules."""

from types import SimpleNamespace

import pytest
from checkpoint_runs import make_experiment

import neondist as nd
from neondist.errors import ConfigError
from neondist.train.callbacks import checkpoint as module


def record_checkpoints(monkeypatch, tmp_path, clock=None, **fields):
    """Return the (epoch, step) of each checkpoint of a run of 3 epochs of 3 steps."""
    positions = []
    monkeypatch.setattr(
        module,
        "write_checkpoint",
        lambda path, pieces, texts, world, keep, step: positions.append((run[0].epoch, step)),
    )
    run = []
    if clock is not None:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))  # other threads keep the real clock

    class RunRecorder(nd.Hook):
        def before_run(self, started):
            run.append(started)

    make_experiment(3, checkpoint=fields).run(output=tmp_path, hooks=[RunRecorder()])
    return positions


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [(1, 3), (2, 6), (3, 9)]),
        ({"keep": 2}, [(1, 3), (2, 6), (3, 9)]),
        ({"every_epochs": 2}, [(2, 6), (3, 9)]),
        ({"every_steps": 4}, [(1, 4), (2, 8), (3, 9)]),
        ({"every_steps": 100}, [(3, 9)]),
        ({"every_steps": 3, "every_epochs": 1}, [(1, 3), (2, 6), (3, 9)]),
        ({"every_steps": 2, "every_epochs": 3}, [(0, 2), (1, 4), (1, 6), (2, 8), (3, 9)]),
    ],
)
def test_steps_and_epochs(monkeypatch, tmp_path, fields, expected):
    assert record_checkpoints(monkeypatch, tmp_path, **fields) == [(0, 0), *expected]


def test_minutes(monkeypatch, tmp_path):
    ticks = iter(range(0, 10_000, 20))  # the clock advances by 20 s per reading
    positions = record_checkpoints(monkeypatch, tmp_path, clock=lambda: next(ticks), every_minutes=1)
    assert positions == [(0, 0), (0, 3), (1, 6), (2, 9), (3, 9)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every_steps": 0}, "checkpoint: every_steps: expected an integer of at least 1 or null, got 0"),
        ({"every_minutes": 0}, "checkpoint: every_minutes: expected a number above 0 or null, got 0"),
        ({"keep": "all"}, "checkpoint.keep: expected a number, an integer or null, got the text 'all'"),
        ({"every_step": 5}, "unknown key 'every_step'; did you mean 'every_steps'"),
        ("always", "checkpoint: expected a mapping"),
    ],
)
def test_invalid_schedules(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_experiment(checkpoint=fields)


def test_last_state_is_written_once(tmp_path):
    class EndAfterFirstEpoch(nd.Hook):
        def after_epoch(self, run):
            run.epochs = 1

    def read_inode():
        return (tmp_path / "checkpoint.h5").stat().st_ino

    make_experiment(3, checkpoint={"every_steps": 100}).run(output=tmp_path, hooks=[EndAfterFirstEpoch()])
    first = read_inode()
    make_experiment(1, checkpoint={"every_steps": 100}).run(output=tmp_path, resume=True, hooks=[])
    assert read_inode() == first
