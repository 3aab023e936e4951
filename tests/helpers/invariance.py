"""Training job for tests of P-invariance: runs on any grid of virtual or MPI ranks and returns full arrays."""

from __future__ import annotations

import numpy as np
from availability import make_backend

import neondist as nd


def make_mixed(make):
    return [
        make("Conv", 4, 5, padding=2, activation=nd.ReLU()),
        make("BatchNorm"),
        make("MaxPooling", 3, stride=2, padding=1),
        make("Conv", 6, 3, stride=2, padding="same", padding_mode="reflect", groups=2),
        make("Dropout", 0.3),
        make("AvgPooling", 3, 1, 1, count_include_pad=False),
        make("L2Pooling", 2, 1),
        make("Activation", nd.Logistic()),
        make("FC", 12, activation=nd.Tanh()),
        make("BatchNorm"),
        make("FC", 10),
    ]


def make_global_average(make):
    return [
        make("Conv", 6, (3, 4), stride=(2, 1), padding=((1, 0), (2, 1)), padding_mode="wrap"),
        make("Conv", 5, 3, padding=2, dilation=2, padding_mode="replicate", activation=nd.Tanh()),
        make("GlobalAvgPooling"),
        make("Dropout", 0.2),
        make("FC", 10, bias=False),
    ]


def make_fully_convolutional(make):
    return [make("Conv", 4, 3, padding=1, activation=nd.ReLU()), make("Conv", 10, 7, padding=3)]


def make_perceptron(make):
    return [make("FC", 20, activation=nd.ReLU()), make("Dropout"), make("FC", 10)]


def make_unshared(make):
    return [
        make("LocalFiltering", 4, 3, 2, padding=1, bias=True, activation=nd.Tanh()),
        make("L2Pooling", 2, 1),
        make("LocalFiltering", 3, (2, 3)),
        make("FC", 10),
    ]


def make_segmentation(make):
    """Return a small U-Net with all containers, upsampling, padding and cropping."""

    def block(channels):
        return [make("Conv", channels, 3, padding=1, activation=nd.ReLU()), make("BatchNorm")]

    deep = [
        make("MaxPooling", 2),
        nd.Sum([block(6), [make("Conv", 6, 1)]]),
        nd.Sum([block(6), []]),
        make("Deconv", 4, 3, stride=2, padding=1, output_padding=(0, 1), groups=2, activation=nd.ReLU()),
        make("Pad", ((1, 2), (0, 0)), mode="reflect"),
        make("Crop", ((0, 1), (0, 0))),
    ]
    return [
        *block(4),
        nd.Concat([deep, [], [make("Upsample", 2, "bilinear"), make("AvgPooling", 3, 2, 1)]]),
        make("Upsample", (2, 3)),
        make("Conv", 10, 3, stride=(2, 3), padding=1),
        make("Pad", 1, fill=2.0),
        make("Crop", ((1, 1), (2, 0))),
    ]


def make_series(make):
    return [
        make("Conv", 4, 5, stride=2, padding=2, padding_mode="wrap", activation=nd.Tanh()),
        make("MaxPooling", 3, 2, 1),
        make("Deconv", 6, 4, stride=2, padding=1, activation=nd.ReLU()),
        make("BatchNorm"),
        make("AvgPooling", 2),
        make("GlobalAvgPooling"),
        make("FC", 10),
    ]


def make_volume(make):
    return [
        make("Conv", 4, 3, padding=1, activation=nd.ReLU()),
        make("BatchNorm"),
        make("MaxPooling", 2),
        make("Upsample", 2, "bilinear"),
        make("Deconv", 4, 2, stride=2),
        make("AvgPooling", 2),
        make("L2Pooling", 2, 1),
        make("FC", 10),
    ]


def make_normalisation(make):
    return [
        make("LCN", 5, halo="twice"),
        make("Conv", 6, 3, stride=2, padding=1, activation=nd.Tanh()),
        make("GroupNorm", 3),
        make("LRN", 3, alpha=0.5),
        make("LCN", 3, window="uniform", padding_mode="reflect", min_deviation="mean", halo="wide"),
        make("Conv", 4, 2, bias=False),  # the next layer removes any bias
        make("InstanceNorm", affine=True),
        make("LCN", 7, min_deviation="mean"),
        make("FC", 12),
        make("GroupNorm", 4),
        make("FC", 10),
    ]


def make_normalised_volume(make):
    return [
        make("LCN", (3, 1, 3), window="uniform", padding_mode="reflect", halo="wide"),
        make("Conv", 10, 2, activation=nd.Tanh()),
        make("InstanceNorm"),
        make("LCN", 3, min_deviation=0.3, halo="twice"),
        make("GroupNorm", 5),
    ]


KINDS = {
    "everything": ((28, 27, 2), make_mixed),
    "global average": ((7, 9, 2), make_global_average),
    "fully convolutional": ((6, 5, 3), make_fully_convolutional),
    "perceptron": ((7, 3, 1), make_perceptron),
    "unshared": ((9, 8, 2), make_unshared),
    "segmentation": ((9, 10, 2), make_segmentation),
    "series": ((23, 2), make_series),
    "volume": ((5, 6, 7, 1), make_volume),
    "normalisation": ((11, 10, 2), make_normalisation),
    "normalised volume": ((4, 5, 6, 1), make_normalised_volume),
}
COSTS = {"segmentation": nd.Dice}
MODELS = {"perceptron": nd.MLP}


def make_model(kind, dist, backend="numpy"):
    """Return a small network of this kind, serial or distributed."""

    def make(name, *args, **kwargs):
        return getattr(nd, f"{name}Layer{'Dist' if dist else ''}")(*args, **kwargs)

    serial = MODELS.get(kind, nd.Convnet)
    model_class = getattr(nd, f"{serial.__name__}Dist") if dist else serial
    optimizer = nd.SGD(0.05, momentum=0.9, weight_decay=1e-3)
    cost = COSTS.get(kind, nd.CrossEntropy)()
    return model_class(
        KINDS[kind][1](make), cost=cost, optimizer=optimizer, seed=3, backend=make_backend(backend), dtype="float64"
    )


def train(kind, grid=None, batch=6, steps=4, backend="numpy", after_build=None):
    """Train briefly; return outputs, gradients, losses and the final state as full arrays."""
    model, shape = make_model(kind, grid is not None, backend), KINDS[kind][0]
    model.build(shape, batch, grid)
    if after_build:
        after_build(model)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(batch, *shape))
    y = model.fprop(model.scatter(x))
    outputs = model.gather(y)
    results = {
        "y": outputs,
        "dx": model.gather_input(model.bprop(model.scatter_output(rng.normal(size=outputs.shape)))),
    }
    results |= {f"grad {name}": array for name, array in model.gradients().items()}
    labels = rng.integers(0, 10, outputs.shape[:-1])
    losses = [model.train_batch(model.scatter(x), labels) for _ in range(steps)]
    rest = batch - 1  # a last batch that is uneven over the replicas
    losses.append(model.train_batch(model.scatter(x[:rest]), labels[:rest], batch_size=rest))
    results["loss"] = np.array(losses)
    results["evaluated"] = model.gather(model.fprop(model.scatter(x), training=False))
    return results | {f"state {name}": array for name, array in model.state().items()}
