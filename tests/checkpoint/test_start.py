"""Initial state of a run: another's weights, or an earlier run's position, or nothing yet."""

import numpy as np
import pytest
from checkpoint_toys import experiment, layers, save

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, DataError

ANEW = "no earlier run has written a checkpoint: starting from scratch"


class First(nd.Hook):
    """Keeps the state and the notes at the start, and stops there."""

    def before_run(self, run):
        self.state, self.notes, self.step = run.model.state(), run.notes, run.step
        run.stop = nd.train.Stop("seen enough")


def first(ranks=1, **arguments):
    def body(world):
        hook, made = First(), experiment(seed=2, layers=arguments.pop("layers", layers) if ranks == 1 else layers)
        made.run(nd.ProcessGrid(world), hooks=[hook], **arguments)
        return hook

    return loopback.run(ranks, body)


def test_init_from_takes_weights_and_statistics_alone(tmp_path):
    written = save(tmp_path / "c.h5", 4)
    for hook in first(3, init_from=tmp_path / "c.h5"):
        assert hook.step == 0
        assert hook.notes == [f"weights from {tmp_path}/c.h5: 10 arrays loaded"]
        for name, array in hook.state.items():
            np.testing.assert_array_equal(array, written[f"model/{name}"])


def test_init_from_another_network_says_what_was_missing_and_left_over(tmp_path):
    written = save(tmp_path / "c.h5")

    def other():
        return [
            nd.ConvLayerDist(3, 3, padding=1),
            nd.BatchNormLayerDist(),
            nd.ConvLayerDist(3, 2, name="new"),
            nd.FCLayerDist(4, name="fc1", bias=False),
        ]

    (hook,) = first(layers=other, init_from=str(tmp_path / "c.h5"))
    assert hook.notes[0].endswith(
        "7 arrays loaded; not in the file: new/weights, new/bias; left over in the file: fc1/bias,"
        " local_filtering1/bias, local_filtering1/weights"
    )
    np.testing.assert_array_equal(hook.state["conv1/weights"], written["model/conv1/weights"])
    assert np.abs(hook.state["new/weights"]).max() > 0


def test_arrays_of_another_shape_keep_their_first_values(tmp_path):
    save(tmp_path / "c.h5")
    (hook,) = first(layers=lambda: [*layers()[:-1], nd.FCLayerDist(5)], init_from=tmp_path / "c.h5")
    assert "8 arrays loaded; of another shape: " in hook.notes[0]
    assert "fc1/weights (file [90, 4], model [90, 5])" in hook.notes[0]
    assert "fc1/bias (file [4], model [5])" in hook.notes[0]


def test_nothing_to_take_is_an_error(tmp_path):
    save(tmp_path / "c.h5")
    with pytest.raises(DataError, match=r"c\.h5: does not fit the model: "):
        first(layers=lambda: [nd.FCLayerDist(4, name="other")], init_from=tmp_path / "c.h5")


def test_init_from_the_checkpoint_that_the_run_will_replace(tmp_path):
    experiment(1).run(output=tmp_path, hooks=[])
    (hook,) = first(output=tmp_path, overwrite=True, init_from=tmp_path / "checkpoint.h5")
    assert "10 arrays loaded" in hook.notes[0]


def test_resume_or_init_from(tmp_path):
    with pytest.raises(ConfigError, match="leave out --resume or --init-from"):
        experiment().run(output=tmp_path, resume=True, init_from="c.h5")


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(tmp_path):
    experiment(1).run(output=tmp_path, hooks=[])
    for name in ("checkpoint.h5", "metrics.jsonl"):
        (tmp_path / name).unlink()
    (hook,) = first(output=tmp_path, resume=True)
    assert (hook.step, hook.notes) == (0, [ANEW])


def test_a_lost_checkpoint_of_a_run_that_went_on_is_an_error(tmp_path):
    experiment(1).run(output=tmp_path, hooks=[])
    (tmp_path / "checkpoint.h5").unlink()
    with pytest.raises(DataError, match=r"checkpoint\.h5: no such file"):
        first(output=tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_text()
