"""Training on augmented images: equal on all grids, in strips, with read-ahead, and after a resume."""

import textwrap

import numpy as np
import pytest
from small_hdf5 import write_hdf5
from toy_training import make_experiment
from training_records import StopAtStep, strip_times

import neondist as nd
from neondist.comm import loopback
from neondist.config import dump, load_experiment
from neondist.errors import ConfigError

MOVING_TRANSFORMS = "!Flip {axes: [height, width]}, !Shift {max: 3}, !Elastic {displacement: 2, spacing: 5}"
VALUE_TRANSFORMS = "!Brightness {amount: 0.3}, !Contrast {amount: 0.3, level: 0.1}, !Noise {sigma: 0.2}"


def make_augmentations():
    return [nd.Flip(["height", "width"]), nd.Shift(3), nd.Elastic(2, 5), nd.Noise(0.2)]


def train(ranks, grid=None, make=None, **options):
    def body(transport):
        experiment = make() if make else make_experiment(2, grid=grid, augment=make_augmentations())
        result = experiment.run(experiment.open_grid(transport), **{"hooks": []} | options)
        return result.history, experiment.model.state()

    return loopback.run(ranks, body)[0]


def check_runs_match(actual, expected):
    for record, reference in zip(actual[0], expected[0], strict=True):
        losses = {name: value for name, value in reference.items() if name.endswith(("loss", "error"))}
        assert {name: record[name] for name in losses} == pytest.approx(losses, rel=1e-9, abs=1e-12)
    for name, array in expected[1].items():
        np.testing.assert_allclose(actual[1][name], array, rtol=1e-8, atol=1e-10)


@pytest.mark.long
def test_all_grids_agree_and_only_training_is_augmented():
    expected = train(1)
    plain = train(1, make=lambda: make_experiment(2))
    assert not np.allclose(plain[0][0]["train_loss"], expected[0][0]["train_loss"], rtol=1e-3)
    for ranks, grid in ((4, None), (3, None), (4, {"replicas": 2})):
        check_runs_match(train(ranks, grid), expected)
    untrained = train(1, make=lambda: make_experiment(2, optimizer=nd.SGD(1e-30), augment=make_augmentations()))
    plain = train(1, make=lambda: make_experiment(2, optimizer=nd.SGD(1e-30)))
    assert untrained[0][0]["test_loss"] == plain[0][0]["test_loss"]
    assert untrained[0][0]["train_loss"] != untrained[0][1]["train_loss"], "every epoch has other images"


@pytest.mark.long
def test_resume_continues_with_the_same_images(tmp_path):
    expected = train(1)
    train(4, output=tmp_path, hooks=[StopAtStep(7)])
    check_runs_match(train(4, output=tmp_path, resume=True), expected)
    stopped = make_experiment(2, augment=make_augmentations())
    stopped.run(output=tmp_path, overwrite=True, hooks=[StopAtStep(3)])
    resumed = make_experiment(2, augment=make_augmentations())
    assert strip_times(resumed.run(output=tmp_path, resume=True, hooks=[]).history) == strip_times(expected[0])


@pytest.mark.long
def test_hdf5_maps_with_read_ahead_and_in_strips(tmp_path):
    write_hdf5(tmp_path / "x.h5", (13, 12, 2), maps=(13, 12))

    def make(**fields):
        layers = [nd.ConvLayerDist(4, 3, padding=1, activation=nd.ReLU()), nd.ConvLayerDist(3, 3, padding=1)]
        model = nd.ConvnetDist(layers, cost=nd.SoftmaxCrossEntropy(), dtype="float64", seed=2)
        data = nd.HDF5Dataset(tmp_path / "x.h5", ahead=fields.pop("ahead", True))
        return nd.FitExperiment(data, model, batch_size=6, epochs=2, augment=make_augmentations(), **fields)

    expected = train(1, make=lambda: make(ahead=False))
    for ranks, fields in (
        (1, {}),
        (4, {}),
        (2, {"grid": {"replicas": 2}}),
        (1, STREAMED_OPTIONS),
        (2, STREAMED_OPTIONS),
    ):
        check_runs_match(train(ranks, make=lambda fields=fields: make(**fields)), expected)


STREAMED_OPTIONS = {"memory": "1TiB", "strips": 4}
"""Stream all layers that can be streamed, although they fit in memory."""


def test_augmentation_round_trips_through_yaml(tmp_path):
    text = f"""
        !FitExperiment
        dataset: !Synthetic {{shape: [12, 12, 1], train: 12, test: 4}}
        augment: [!QuarterTurns {{}}, {MOVING_TRANSFORMS}, {VALUE_TRANSFORMS}]
        model: !ConvnetDist {{layers: [!FCLayerDist {{out_features: 4}}]}}
        batch_size: 4
        """
    path = tmp_path / "x.yaml"
    path.write_text(textwrap.dedent(text))
    experiment = load_experiment(path)
    assert len(experiment.augment) == 7
    dumped = dump(experiment)
    assert "!Elastic" in dumped
    first = experiment.run(hooks=[]).history
    path.write_text(dumped)
    assert strip_times(load_experiment(path).run(hooks=[]).history) == strip_times(first)
    path.write_text(dumped.replace("!QuarterTurns", "!QuarterTurn"))
    with pytest.raises(ConfigError, match=r"QuarterTurn.*did you mean"):
        load_experiment(path)
