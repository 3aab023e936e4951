"""Predictions and evaluations of a small U-Net on images of any size, on virtual ranks."""

import numpy as np

import neondist as nd
from neondist.comm import ProcessGrid, loopback
from neondist.train import evaluate_files, predict


def make_unet(norm=nd.BatchNormLayerDist):
    """Return layers that pool, upsample by a deconvolution, and concatenate a skip connection."""

    def conv(channels):
        return [nd.ConvLayerDist(channels, 3, padding=1), norm(), nd.ActivationLayerDist(nd.ReLU())]

    inner = [nd.MaxPoolingLayerDist(2), *conv(4), nd.DeconvLayerDist(3, 4, 2, 1)]
    return [*conv(3), nd.Concat([inner, []]), nd.ConvLayerDist(3, 3, padding=1)]


class LabelledCells(nd.Synthetic):
    """Synthetic images with a label for each cell; raw values are 2 x + 1, where x is the normalised value."""

    def open_splits(self, grid):
        tile = grid.tile_box(self.sample_shape[:-1]).shape
        return tuple(
            nd.Split(
                2 * split.images(range(len(split)), "float64") + 1,
                np.broadcast_to(split.labels[:, None, None], (len(split), *tile)),
                mean=0.5,
                std=1,
                scale=2,
            )
            for split in super().open_splits(grid)
        )


def make_experiment(layers=make_unet, **options):
    return nd.FitExperiment(
        dataset=LabelledCells((12, 8, 2), classes=3, train=4, test=2),
        model=nd.ConvnetDist(layers(), dtype="float64", backend="numpy", seed=3, **options),
        batch_size=4,
        epochs=1,
    )


def predict_on_ranks(ranks, folder, target, source="x.npy", make=make_experiment, **options):
    """Predict on virtual ranks; return the shape of the outputs."""

    def body(world):
        return predict(make(), folder / "net.h5", folder / source, target, ProcessGrid(world), **options)

    (shape,) = set(loopback.run(ranks, body))
    return shape


def evaluate_on_ranks(folder, labels, ranks, block, make=make_experiment):
    """Evaluate on virtual ranks; return the results, which all ranks share."""

    def body(world):
        return evaluate_files(make(), folder / "net.h5", folder / "x.npy", labels, ProcessGrid(world), block)

    results = loopback.run(ranks, body)
    assert all(result == results[0] for result in results)
    return results[0]
