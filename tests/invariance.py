"""P-invariance: one job that runs on any grid and returns whole arrays, for virtual ranks and for MPI."""

from __future__ import annotations

import numpy as np

import neondist as nd


def layers(kind, dist):
    """The layers of a small network of each kind, serial or distributed."""

    def make(name, *args, **kwargs):
        return getattr(nd, f"{name}Layer{'Dist' if dist else ''}")(*args, **kwargs)

    if kind == "everything":
        return [
            make("Conv", 4, 5, padding=2, activation=nd.RectLin()),
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
    if kind == "global average":
        return [
            make("Conv", 6, (3, 4), stride=(2, 1), padding=((1, 0), (2, 1)), padding_mode="wrap"),
            make("Conv", 5, 3, padding=2, dilation=2, padding_mode="replicate", activation=nd.Tanh()),
            make("GlobalAvgPooling"),
            make("Dropout", 0.2),
            make("FC", 10, bias=False),
        ]
    if kind == "fully convolutional":
        return [
            make("Conv", 4, 3, padding=1, activation=nd.RectLin()),
            make("Conv", 10, 7, padding=3),
        ]
    return [make("FC", 20, activation=nd.RectLin()), make("Dropout"), make("FC", 10)]


KINDS = {
    "everything": (28, 27, 2),
    "global average": (7, 9, 2),
    "fully convolutional": (6, 5, 3),
    "perceptron": (7, 3, 1),
}


def train(kind, grid=None, batch=6, steps=4):
    """Outputs, input gradient, all gradients, losses and final state of a short run, as whole arrays."""
    dist, shape = grid is not None, KINDS[kind]
    cls = {(False, False): nd.Convnet, (False, True): nd.ConvnetDist, (True, False): nd.MLP, (True, True): nd.MLPDist}[
        kind == "perceptron", dist
    ]
    optimizer = nd.SGD(0.05, momentum=0.9, weight_decay=1e-3)
    model = cls(layers(kind, dist), optimizer=optimizer, seed=3, dtype="float64")
    model.build(shape, batch, grid)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(batch, *shape))
    y = model.fprop(model.scatter(x))
    whole = model.gather(y)
    found = {"y": whole, "dx": model.gather_input(model.bprop(model.scatter_output(rng.normal(size=whole.shape))))}
    for layer in model.layers:
        found |= {f"grad {layer.name}/{name}": array.copy() for name, array in layer.grads.items()}
    labels = rng.integers(0, 10, whole.shape[:-1])
    losses = [model.train_batch(model.scatter(x), labels) for _ in range(steps)]
    rest = batch - 1  # a last batch that does not fill the replicas evenly
    losses.append(model.train_batch(model.scatter(x[:rest]), labels[:rest], batch_size=rest))
    found["loss"] = np.array(losses)
    found["evaluated"] = model.gather(model.fprop(model.scatter(x), training=False))
    return found | {f"state {name}": array for name, array in model.state().items()}
