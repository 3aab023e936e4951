"""Initial state of a run: weights of another run, the position of an earlier run, or random weights."""

import numpy as np
import pytest
from checkpoint_runs import make_experiment, make_layers, save_run

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, DataError

FROM_SCRATCH = "no earlier run has written a checkpoint: starting from scratch"


class StartRecorder(nd.Hook):
    """Record the state and the notes at the start, and stop there."""

    def before_run(self, run):
        self.state, self.notes, self.step = run.model.state(), run.start_messages, run.step
        run.stop = nd.train.Stop("seen enough")


def record_start(ranks=1, **arguments):
    def body(world):
        hook = StartRecorder()
        experiment = make_experiment(seed=2, layers=arguments.pop("layers", make_layers) if ranks == 1 else make_layers)
        experiment.run(nd.ProcessGrid(world), hooks=[hook], **arguments)
        return hook

    return loopback.run(ranks, body)


def test_init_from_loads_only_weights_and_statistics(tmp_path):
    written = save_run(tmp_path / "c.h5", 4)
    for hook in record_start(3, init_from=tmp_path / "c.h5"):
        assert hook.step == 0
        assert hook.notes == [f"weights from {tmp_path}/c.h5: 10 arrays loaded"]
        for name, array in hook.state.items():
            np.testing.assert_array_equal(array, written[f"model/{name}"])


def test_init_from_reports_missing_and_unused_arrays(tmp_path):
    written = save_run(tmp_path / "c.h5")

    def make_other_layers():
        return [
            nd.ConvLayerDist(3, 3, padding=1),
            nd.BatchNormLayerDist(),
            nd.ConvLayerDist(3, 2, name="new"),
            nd.FCLayerDist(4, name="fc1", bias=False),
        ]

    (hook,) = record_start(layers=make_other_layers, init_from=str(tmp_path / "c.h5"))
    assert hook.notes[0].endswith(
        "7 arrays loaded; not in the file: new/weights, new/bias; not in the model: fc1/bias,"
        " local_filtering1/bias, local_filtering1/weights"
    )
    np.testing.assert_array_equal(hook.state["conv1/weights"], written["model/conv1/weights"])
    assert np.abs(hook.state["new/weights"]).max() > 0


def test_arrays_of_another_shape_keep_initial_values(tmp_path):
    save_run(tmp_path / "c.h5")
    (hook,) = record_start(layers=lambda: [*make_layers()[:-1], nd.FCLayerDist(5)], init_from=tmp_path / "c.h5")
    assert "8 arrays loaded; shape mismatch: " in hook.notes[0]
    assert "fc1/weights (file [90, 4], model [90, 5])" in hook.notes[0]
    assert "fc1/bias (file [4], model [5])" in hook.notes[0]


def test_init_from_without_matching_arrays(tmp_path):
    save_run(tmp_path / "c.h5")
    with pytest.raises(DataError, match=r"c\.h5: does not fit the model: "):
        record_start(layers=lambda: [nd.FCLayerDist(4, name="other")], init_from=tmp_path / "c.h5")


def test_init_from_the_checkpoint_to_be_replaced(tmp_path):
    make_experiment(1).run(output=tmp_path, hooks=[])
    (hook,) = record_start(output=tmp_path, overwrite=True, init_from=tmp_path / "checkpoint.h5")
    assert "10 arrays loaded" in hook.notes[0]


def test_resume_excludes_init_from(tmp_path):
    with pytest.raises(ConfigError, match="pass only one of resume and init_from"):
        make_experiment().run(output=tmp_path, resume=True, init_from="c.h5")


def test_run_without_a_checkpoint_starts_from_scratch(tmp_path):
    make_experiment(1).run(output=tmp_path, hooks=[])
    for name in ("checkpoint.h5", "metrics.jsonl"):
        (tmp_path / name).unlink()
    (hook,) = record_start(output=tmp_path, resume=True)
    assert (hook.step, hook.notes) == (0, [FROM_SCRATCH])


def test_missing_checkpoint_of_a_trained_run(tmp_path):
    make_experiment(1).run(output=tmp_path, hooks=[])
    (tmp_path / "checkpoint.h5").unlink()
    with pytest.raises(DataError, match=r"checkpoint\.h5: no such file"):
        record_start(output=tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_text()
