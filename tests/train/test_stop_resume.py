"""Stop at any step, and resumption as if the run had not been interrupted."""

import numpy as np
import pytest
from toy_training import Recorder, make_experiment
from training_records import StopAtStep, read_metrics, strip_times

from neondist.comm import loopback
from neondist.errors import DataError
from neondist.optim import SGD, Adam, CosineDecay
from neondist.train import Hook, Stop


class StopAfterEpoch(Hook):
    def after_epoch(self, run):
        run.stop = Stop("an epoch is enough")


def train(ranks, grid=None, **arguments):
    """Train on virtual ranks; return rank 0's result and weights."""

    def body(transport):
        experiment = make_experiment(3, grid=grid, optimizer=OPTIMIZERS[arguments.get("rule", "SGD")]())
        options = {name: value for name, value in arguments.items() if name != "rule"}
        result = experiment.run(experiment.open_grid(transport), **{"hooks": []} | options)
        return result, experiment.model.state()

    return loopback.run(ranks, body)[0]


OPTIMIZERS = {"SGD": lambda: SGD(0.05, momentum=0.9), "Adam": lambda: Adam(0.01, schedule=CosineDecay(3))}


@pytest.mark.parametrize(
    ("ranks", "grid", "rule"), [(1, None, "SGD"), (1, None, "Adam"), (3, None, "Adam"), (4, {"replicas": 2}, "SGD")]
)
@pytest.mark.long
def test_stopped_and_resumed_run_is_bit_identical(tmp_path, ranks, grid, rule):
    expected, weights = train(ranks, grid, rule=rule)
    hook_lists = [[StopAtStep(2)], [StopAtStep(3, 5)], [StopAtStep(5)], [StopAfterEpoch()], [StopAtStep(13)], []]
    for attempt, stops in enumerate(hook_lists):  # within an epoch, at its last batch, between epochs
        result, state = train(ranks, grid, rule=rule, hooks=stops, output=tmp_path, resume=attempt > 0)
        assert (result.stop is None) == (stops == [])
    assert strip_times(result.history) == strip_times(expected.history)
    assert read_metrics(tmp_path) == result.history
    for name, array in weights.items():
        np.testing.assert_array_equal(state[name], array)


def test_stop_ends_the_run_with_a_reason():
    hook = Recorder()
    experiment = make_experiment(2)
    result = experiment.run(hooks=[StopAtStep(3), hook])
    assert hook.calls[-2:] == [("after_step", 0, 3), ("on_stop", 0, 3)]
    assert (result.stop.reason, result.stop.exit_code, result.history) == ("asked to", 75, [])


def test_resume_requires_the_same_seed_and_data(tmp_path):
    make_experiment(2).run(output=tmp_path, hooks=[StopAtStep(2)])
    with pytest.raises(DataError, match=r"checkpoint\.h5: was written with seed 0.*has 5.*seed: 0"):
        make_experiment(2, seed=5).run(output=tmp_path, resume=True, hooks=[])
    other = make_experiment(2)
    other.dataset.split_sizes["train"] = 44
    with pytest.raises(DataError, match="in the middle of an epoch of 45 samples, but the data set has 44"):
        other.run(output=tmp_path, resume=True, hooks=[])


def test_resume_in_another_dtype_says_so(tmp_path):
    class Messages(Hook):
        def before_run(self, run):
            texts.append([text for text in run.start_messages if "converted" in text])

    texts = []
    for step, dtype in enumerate(("float64", "float32", "float32"), start=2):
        make_experiment(dtype=dtype).run(output=tmp_path, resume="auto", hooks=[StopAtStep(step), Messages()])
    conversion = "the values of the checkpoint were converted from float64 to float32: results differ from those of an"
    assert texts == [[], [f"{conversion} uninterrupted run"], []]
