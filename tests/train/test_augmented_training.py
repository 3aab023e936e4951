"""Training on augmented images: the same numbers on all grids, in strips, read ahead, and after a resume."""

import textwrap

import numpy as np
import pytest
from hdf5_toys import small_hdf5
from session_toys import experiment
from test_stop_resume import StopAt, numbers

import neondist as nd
from neondist.comm import loopback
from neondist.config import dump, load_experiment
from neondist.errors import ConfigError

MOVES = "!Flip {axes: [height, width]}, !Shift {max: 3}, !Elastic {displacement: 2, spacing: 5}"
VALUES = "!Brightness {amount: 0.3}, !Contrast {amount: 0.3, level: 0.1}, !Noise {sigma: 0.2}"


def steps():
    return [nd.Flip(["height", "width"]), nd.Shift(3), nd.Elastic(2, 5), nd.Noise(0.2)]


def run(ranks, grid=None, made=None, **options):
    def body(transport):
        one = made() if made else experiment(2, grid=grid, augment=steps())
        return one.run(one.open_grid(transport), **{"hooks": []} | options).history, one.model.state()

    return loopback.run(ranks, body)[0]


def check_alike(found, expected):
    for one, other in zip(found[0], expected[0], strict=True):
        losses = {name: value for name, value in other.items() if name.endswith(("loss", "error"))}
        assert {name: one[name] for name in losses} == pytest.approx(losses, rel=1e-9, abs=1e-12)
    for name, array in expected[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-8, atol=1e-10)


@pytest.mark.long
def test_every_grid_trains_alike_and_only_training_is_augmented():
    expected = run(1)
    plain = run(1, made=lambda: experiment(2))
    assert not np.allclose(plain[0][0]["train_loss"], expected[0][0]["train_loss"], rtol=1e-3)
    for ranks, grid in ((4, None), (3, None), (4, {"replicas": 2})):
        check_alike(run(ranks, grid), expected)
    still = run(1, made=lambda: experiment(2, optimizer=nd.SGD(1e-30), augment=steps()))
    assert still[0][0]["test_loss"] == run(1, made=lambda: experiment(2, optimizer=nd.SGD(1e-30)))[0][0]["test_loss"]
    assert still[0][0]["train_loss"] != still[0][1]["train_loss"], "every epoch has other images"


@pytest.mark.long
def test_a_resume_goes_on_with_the_same_images(tmp_path):
    expected = run(1)
    run(4, output=tmp_path, hooks=[StopAt(7)])
    check_alike(run(4, output=tmp_path, resume=True), expected)
    one = experiment(2, augment=steps())
    one.run(output=tmp_path, overwrite=True, hooks=[StopAt(3)])
    again = experiment(2, augment=steps())
    assert numbers(again.run(output=tmp_path, resume=True, hooks=[]).history) == numbers(expected[0])


@pytest.mark.long
def test_maps_in_a_file_read_ahead_or_strip_by_strip(tmp_path):
    small_hdf5(tmp_path / "x.h5", (13, 12, 2), maps=(13, 12))

    def made(**fields):
        layers = [nd.ConvLayerDist(4, 3, padding=1, activation=nd.ReLU()), nd.ConvLayerDist(3, 3, padding=1)]
        model = nd.ConvnetDist(layers, cost=nd.SoftmaxCrossEntropy(), dtype="float64", seed=2)
        data = nd.HDF5Dataset(tmp_path / "x.h5", ahead=fields.pop("ahead", True))
        return nd.FitExperiment(data, model, batch_size=6, epochs=2, augment=steps(), **fields)

    expected = run(1, made=lambda: made(ahead=False))
    for ranks, fields in ((1, {}), (4, {}), (2, {"grid": {"replicas": 2}}), (1, STREAMED), (2, STREAMED)):
        check_alike(run(ranks, made=lambda fields=fields: made(**fields)), expected)


STREAMED = {"memory": "1TiB", "strips": 4}
"""Whatever can goes in strips, although all would fit."""


def test_an_experiment_says_so_in_its_file(tmp_path):
    text = f"""
        !FitExperiment
        dataset: !Synthetic {{shape: [12, 12, 1], train: 12, test: 4}}
        augment: [!QuarterTurns {{}}, {MOVES}, {VALUES}]
        model: !ConvnetDist {{layers: [!FCLayerDist {{out_features: 4}}]}}
        batch_size: 4
        """
    path = tmp_path / "x.yaml"
    path.write_text(textwrap.dedent(text))
    made = load_experiment(path)
    assert len(made.augment) == 7
    again = dump(made)
    assert "!Elastic" in again
    first = made.run(hooks=[]).history
    path.write_text(again)
    assert numbers(load_experiment(path).run(hooks=[]).history) == numbers(first)
    path.write_text(again.replace("!QuarterTurns", "!QuarterTurn"))
    with pytest.raises(ConfigError, match=r"QuarterTurn.*did you mean"):
        load_experiment(path)
