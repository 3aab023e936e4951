"""A run that moves from 4 ranks to 6, to 1 and to 4 again, in the middle of epochs, has the curve of one that stays."""

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.session import Stop

TIMES = ("seconds", "samples_per_second", "bytes_sent")
PLACES = [(4, {}), (6, {"rows": 3}), (1, {}), (4, {"replicas": 2})]


class StopAfter(nd.Hook):
    """Stops after so many steps of whatever is trained."""

    joins_pretraining = True

    def __init__(self, steps):
        self.left = steps

    def after_step(self, run):
        self.left -= 1
        if not self.left:
            run.stop = Stop("the node is wanted")


def everything():
    return nd.ConvnetDist(
        [
            nd.ConvLayerDist(3, 3, padding=1, activation=nd.RectLin()),
            nd.BatchNormLayerDist(),
            nd.LocalFilteringLayerDist(3, 2),
            nd.DropoutLayerDist(0.2),
            nd.FCLayerDist(4),
        ],
        optimizer=nd.Adam(0.01, schedule=nd.CosineDecay(4)),
        dtype="float64",
        backend="numpy",
    )


def autoencoder():
    return nd.GBDist(
        [
            nd.LocalFilteringLayerDist(3, 3),
            nd.L2PoolingLayerDist(2, 1),
            nd.LCNLayerDist(3),
            nd.LocalFilteringLayerDist(2, 2),
            nd.FCLayerDist(4),
        ],
        optimizer=nd.SGD(0.05, 0.9),
        num_pretrain_epochs=2,
        dtype="float64",
        backend="numpy",
    )


def experiment(model, grid):
    data = nd.Synthetic((9, 8, 2), classes=4, train=25, test=7)
    return nd.FitExperiment(data, model(), batch_size=10, epochs=3, grid=grid, checkpoint={"every_epochs": 100})


def run(model, ranks, grid, **arguments):
    def body(world):
        made = experiment(model, grid)
        result = made.run(nd.ProcessGrid(world, **grid), **{"hooks": []} | arguments)
        return result, made.model.state()

    return loopback.run(ranks, body)[0]


def log(folder, name):
    import json

    lines = (folder / name).read_text().splitlines() if (folder / name).exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def close(found, expected):
    """Compare two logs: names, order and numbers."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for key, value in other.items():
            assert one[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), key


@pytest.mark.parametrize(("model", "steps"), [(everything, [2, 2, 3]), (autoencoder, [2, 5, 7])])
def test_moving_between_ranks(tmp_path, model, steps):
    still, moved = tmp_path / "still", tmp_path / "moved"
    _, expected = run(model, 4, {}, output=still)
    for at, (ranks, grid) in enumerate(PLACES):

        def hooks(at=at):
            return [StopAfter(steps[at])] if at < len(steps) else []

        def body(world, grid=grid, at=at, hooks=hooks):
            made = experiment(model, grid)
            result = made.run(nd.ProcessGrid(world, **grid), output=moved, resume=at > 0, hooks=hooks())
            return result, made.model.state()

        result, state = loopback.run(ranks, body)[0]
        assert (result.stop is None) == (at == len(steps))
    for name in ("metrics.jsonl", "pretrain.jsonl"):
        close(log(moved, name), log(still, name))
    assert len(log(moved, "metrics.jsonl")) == 3
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-9, atol=1e-12)
