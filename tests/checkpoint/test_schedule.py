"""Times at which checkpoints are written."""

import pytest
from checkpoint_toys import experiment

import neondist as nd
from neondist.errors import ConfigError
from neondist.train.callbacks import checkpoint as module


def written(monkeypatch, tmp_path, clock=None, **fields):
    """Where a run of 3 epochs of 3 steps writes checkpoints: (epoch, step)."""
    places = []
    monkeypatch.setattr(
        module, "write", lambda path, pieces, texts, world, keep, step: places.append((run[0].epoch, step))
    )
    run = []
    if clock is not None:
        monkeypatch.setattr(module.time, "monotonic", clock)

    class Keep(nd.Hook):
        def before_run(self, started):
            run.append(started)

    experiment(3, checkpoint=fields).run(output=tmp_path, hooks=[Keep()])
    return places


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
    assert written(monkeypatch, tmp_path, **fields) == [(0, 0), *expected]


def test_minutes(monkeypatch, tmp_path):
    ticks = iter(range(0, 10_000, 20))  # each look at the clock comes 20 s after the last
    places = written(monkeypatch, tmp_path, clock=lambda: next(ticks), every_minutes=1)
    assert places[:2] == [(0, 0), (0, 3)]
    assert len(places) in (4, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every_steps": 0}, "checkpoint: every_steps: 0 is invalid"),
        ({"every_minutes": 0}, "checkpoint: every_minutes: 0 is invalid"),
        ({"keep": "all"}, "checkpoint.keep: expected a number, an integer or null, got the text 'all'"),
        ({"every_step": 5}, "unknown key 'every_step'; did you mean 'every_steps'"),
        ("always", "checkpoint: expected a mapping"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(ConfigError, match=message):
        experiment(checkpoint=fields)


def test_the_last_state_is_written_once(tmp_path):
    class Lower(nd.Hook):
        def after_epoch(self, run):
            run.epochs = 1

    def inode():
        return (tmp_path / "checkpoint.h5").stat().st_ino

    experiment(3, checkpoint={"every_steps": 100}).run(output=tmp_path, hooks=[Lower()])
    first = inode()
    experiment(1, checkpoint={"every_steps": 100}).run(output=tmp_path, resume=True, hooks=[])
    assert inode() == first
