"""Normalisation of a single value per channel, whose variance is 0."""

import numpy as np
import pytest

import neondist as nd
from neondist.errors import ShapeError

HEADS = {"vector": lambda: nd.FCLayerDist(4), "cell": lambda: nd.ConvLayerDist(4, 4)}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_norm_rejects_a_single_value_per_channel(head, ranks, replicas, accumulate):
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 2)).astype("float32")

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas)
        layers = [HEADS[head](), nd.BatchNormLayerDist(), nd.FCLayerDist(3)]
        model = nd.ConvnetDist(layers, accumulate=accumulate, seed=1)
        model.build((4, 4, 2), batch_size=2, grid=grid)
        assert np.isfinite(model.train_batch(model.scatter(images), np.zeros(2, int)))
        tile = model.scatter(images)[: 1 - grid.replica]
        model.fprop(tile, training=False, batch_size=1)
        with pytest.raises(ShapeError, match=r"layer 'batch_norm1': .* at least 2 samples"):
            model.train_batch(tile, np.zeros(1, int), batch_size=1)

    nd.loopback.run(ranks, body)


def test_instance_norm_rejects_a_single_cell():
    layers = [nd.ConvLayer(4, 4), nd.InstanceNormLayer()]
    with pytest.raises(ShapeError, match=r"layer 1 'instance_norm1' .*single cell"):
        nd.Convnet(layers).build((4, 4, 2), batch_size=2)
