"""Step counts of the optimiser across resumes, with skipped steps or a restarted optimiser."""

import json

import numpy as np
import pytest
from checkpoint_runs import forge_checkpoint

import neondist as nd
from neondist.errors import DataError
from neondist.train import Hook


class CountingAdam(nd.Adam):
    """Adam that records the step count of every update."""

    def __init__(self, learning_rate=0.01):
        super().__init__(learning_rate)
        self.counts = []

    def update(self, params, grads, slots, step, scale=1.0, layout=None):
        if params.size and (not self.counts or self.counts[-1] != step):  # GB updates its parts separately
            self.counts.append(step)
        super().update(params, grads, slots, step, scale, layout)


class SpoilSample(Hook):
    """Make one training sample NaN."""

    def before_run(self, run):
        images = run.dataset.train.images
        run.dataset.train.images = lambda index, dtype: np.where(
            (np.asarray(index) == 3)[:, None, None, None], np.nan, images(index, dtype)
        )


def make_experiment(batch, epochs, gb=False, **fields):
    """Return an experiment of 16 samples; a GB trains its top layer alone in the first epoch."""
    if gb:
        layers = [nd.LocalFilteringLayer(3, 3), nd.L2PoolingLayer(2), nd.FCLayer(3)]
        model = nd.GB(layers, optimizer=CountingAdam(), num_pretrain_epochs=0, dtype="float64", backend="numpy")
    else:
        model = nd.Convnet([nd.FCLayer(3)], optimizer=CountingAdam(), dtype="float64", backend="numpy")
    data = nd.Synthetic((8, 7, 1), classes=3, train=16, test=2)
    return nd.FitExperiment(data, model, batch_size=batch, epochs=epochs, dist_flag=False, **fields)


def record_counts(folder, batch, epochs, resume=False, hooks=(), **fields):
    experiment = make_experiment(batch, epochs, **fields)
    experiment.run(output=folder, resume=resume, hooks=hooks)
    return experiment.model.optimizer.counts


@pytest.mark.parametrize("batch", [8, 2, 16])
def test_gb_resumes_with_other_batches(tmp_path, batch):
    """Two steps of the top layer, then two of all layers; the latter count continues with other batch sizes."""
    assert record_counts(tmp_path, 8, 2, gb=True) == [0, 1, 0, 1]
    steps = 2 * 16 // batch
    assert record_counts(tmp_path, batch, 4, resume=True, gb=True) == list(range(2, 2 + steps))


def test_gb_restarts_the_count_between_its_phases(tmp_path):
    assert record_counts(tmp_path, 8, 1, gb=True) == [0, 1]
    assert record_counts(tmp_path, 4, 3, resume=True, gb=True) == list(range(8))


def test_skipped_steps_stay_uncounted(tmp_path):
    """One step of four is skipped in every epoch."""
    fields = {"hooks": [SpoilSample()], "nonfinite": "skip"}
    expected = record_counts(None, 4, 4, **fields)
    assert expected == list(range(12))
    assert record_counts(tmp_path, 4, 2, **fields) + record_counts(tmp_path, 4, 4, resume=True, **fields) == expected


@pytest.mark.parametrize(("part", "total"), [("steps_without_optimizer", "step"), ("seen", "samples")])
def test_counts_cannot_exceed_their_totals(tmp_path, part, total):
    def increase_count(file):
        position = json.loads(file["position"][()])
        del file["position"]
        file["position"] = np.bytes_(json.dumps(position | {part: position[total] + 1}))

    record_counts(tmp_path, 8, 1)
    forge_checkpoint(tmp_path / "checkpoint.h5", increase_count).replace(tmp_path / "checkpoint.h5")
    with pytest.raises(DataError, match=rf"'{part}' \([0-9]+\) exceeds '{total}' \([0-9]+\)"):
        record_counts(tmp_path, 8, 2, resume=True)
