"""A run that stops at any step goes on from there as if nothing had happened."""

import json

import numpy as np
import pytest
from session_toys import Recorder, experiment

from neondist.comm import loopback
from neondist.errors import DataError
from neondist.optim import SGD, Adam, CosineDecay
from neondist.train import Hook, Stop

TIMES = ("seconds", "samples_per_second")


class StopAt(Hook):
    def __init__(self, *steps):
        self.steps = steps

    def after_step(self, run):
        if run.step in self.steps:
            run.stop = Stop("asked to", 75)


class StopAfterEpoch(Hook):
    def after_epoch(self, run):
        run.stop = Stop("an epoch is enough")


def numbers(history):
    return [{k: v for k, v in record.items() if k not in TIMES} for record in history]


def lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def run(ranks, grid=None, **arguments):
    """Run on virtual ranks; return rank 0's result and weights."""

    def body(transport):
        made = experiment(3, grid=grid, optimizer=optimizers[arguments.get("rule", "SGD")]())
        options = {name: value for name, value in arguments.items() if name != "rule"}
        result = made.run(made.open_grid(transport), **{"hooks": []} | options)
        return result, made.model.state()

    return loopback.run(ranks, body)[0]


optimizers = {"SGD": lambda: SGD(0.05, momentum=0.9), "Adam": lambda: Adam(0.01, schedule=CosineDecay(3))}


@pytest.mark.parametrize(
    ("ranks", "grid", "rule"), [(1, None, "SGD"), (1, None, "Adam"), (3, None, "Adam"), (4, {"replicas": 2}, "SGD")]
)
@pytest.mark.long
def test_stopping_anywhere_changes_no_bit(tmp_path, ranks, grid, rule):
    expected, weights = run(ranks, grid, rule=rule)
    hooks = [[StopAt(2)], [StopAt(3, 5)], [StopAt(5)], [StopAfterEpoch()], [StopAt(13)], []]
    for at, each in enumerate(hooks):  # in the middle, once more, at the last batch of an epoch, between epochs
        result, state = run(ranks, grid, rule=rule, hooks=each, output=tmp_path, resume=at > 0)
        assert (result.stop is None) == (each == [])
    assert numbers(result.history) == numbers(expected.history)
    assert lines(tmp_path) == result.history
    for name, array in weights.items():
        np.testing.assert_array_equal(state[name], array)


def test_stopping_ends_the_run_at_that_step_and_says_why():
    hook = Recorder()
    made = experiment(2)
    result = made.run(hooks=[StopAt(3), hook])
    assert hook.calls[-2:] == [("after_step", 0, 3), ("on_stop", 0, 3)]
    assert (result.stop.reason, result.stop.code, result.history) == ("asked to", 75, [])


def test_a_run_goes_on_with_its_own_seed_and_data(tmp_path):
    experiment(2).run(output=tmp_path, hooks=[StopAt(2)])
    with pytest.raises(DataError, match=r"checkpoint\.h5: was written with seed 0.*has 5.*seed: 0"):
        experiment(2, seed=5).run(output=tmp_path, resume=True, hooks=[])
    other = experiment(2)
    other.dataset.counts["train"] = 44
    with pytest.raises(DataError, match="in the middle of an epoch of 45 samples, but the data set has 44"):
        other.run(output=tmp_path, resume=True, hooks=[])
