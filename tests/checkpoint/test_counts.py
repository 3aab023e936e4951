"""Steps counted by the optimiser, where some were skipped, or the optimiser started over: a resume keeps it."""

import json

import numpy as np
import pytest
from checkpoint_toys import forged

import neondist as nd
from neondist.errors import DataError
from neondist.train import Hook


class Counting(nd.Adam):
    """Writes down the count of every update."""

    def __init__(self, learning_rate=0.01):
        super().__init__(learning_rate)
        self.counts = []

    def update(self, params, grads, slots, step, scale=1.0, layout=None):
        if params.size and (not self.counts or self.counts[-1] != step):  # GB updates a part after the other
            self.counts.append(step)
        super().update(params, grads, slots, step, scale, layout)


class Spoil(Hook):
    """Make one training sample NaN."""

    def before_run(self, run):
        images = run.dataset.train.images
        run.dataset.train.images = lambda index, dtype: np.where(
            (np.asarray(index) == 3)[:, None, None, None], np.nan, images(index, dtype)
        )


def experiment(batch, epochs, gb=False, **fields):
    """16 samples; one epoch for the top of a GB alone."""
    if gb:
        layers = [nd.LocalFilteringLayer(3, 3), nd.L2PoolingLayer(2), nd.FCLayer(3)]
        model = nd.GB(layers, optimizer=Counting(), num_pretrain_epochs=0, dtype="float64", backend="numpy")
    else:
        model = nd.Convnet([nd.FCLayer(3)], optimizer=Counting(), dtype="float64", backend="numpy")
    data = nd.Synthetic((8, 7, 1), classes=3, train=16, test=2)
    return nd.FitExperiment(data, model, batch_size=batch, epochs=epochs, dist_flag=False, **fields)


def counts(folder, batch, epochs, resume=False, hooks=(), **more):
    made = experiment(batch, epochs, **more)
    made.run(output=folder, resume=resume, hooks=hooks)
    return made.model.optimizer.counts


@pytest.mark.parametrize("second", [8, 2, 16])
def test_gb_goes_on_with_other_batches(tmp_path, second):
    """Two steps of the top, then two of all; the count of all goes on, however many steps an epoch has by now."""
    assert counts(tmp_path, 8, 2, gb=True) == [0, 1, 0, 1]
    steps = 2 * 16 // second
    assert counts(tmp_path, second, 4, resume=True, gb=True) == list(range(2, 2 + steps))


def test_gb_begins_anew_where_it_was_stopped_between_the_two(tmp_path):
    assert counts(tmp_path, 8, 1, gb=True) == [0, 1]
    assert counts(tmp_path, 4, 3, resume=True, gb=True) == list(range(8))


def test_skipped_steps_stay_uncounted(tmp_path):
    """One step of four is skipped in every epoch."""
    fields = {"hooks": [Spoil()], "nonfinite": "skip"}
    whole = counts(None, 4, 4, **fields)
    assert whole == list(range(12))
    assert counts(tmp_path, 4, 2, **fields) + counts(tmp_path, 4, 4, resume=True, **fields) == whole


def test_more_uncounted_than_done_cannot_be(tmp_path):
    def change(file):
        position = json.loads(file["position"][()])
        del file["position"]
        file["position"] = np.bytes_(json.dumps(position | {"uncounted": position["step"] + 1}))

    counts(tmp_path, 8, 1)
    forged(tmp_path / "checkpoint.h5", change).replace(tmp_path / "checkpoint.h5")
    with pytest.raises(DataError, match="'uncounted' exceeds 'step'"):
        counts(tmp_path, 8, 2, resume=True)


@pytest.mark.parametrize("gb", [False, True])
def test_files_of_version_0_1_do_not_say_it(tmp_path, gb):
    def forget(file):
        position = json.loads(file["position"][()])
        del position["uncounted"], file["position"]
        file["position"] = np.bytes_(json.dumps(position))

    counts(tmp_path, 8, 2, gb=gb)
    forged(tmp_path / "checkpoint.h5", forget).replace(tmp_path / "checkpoint.h5")
    assert counts(tmp_path, 4, 3, resume=True, gb=gb) == list(range(2 if gb else 4, 6 if gb else 8))
