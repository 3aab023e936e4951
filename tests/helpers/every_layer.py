"""Network with every kind of layer, and results of its passes and training steps as global arrays."""

import numpy as np

import neondist as nd

SHAPE = (9, 7, 3)
BATCH_SIZES = (8, 5)


def make_every_layer(kind=""):
    """Return a layer of every kind, with class names that end in `kind`."""

    def make(name, *args, **kwargs):
        return getattr(nd, f"{name}Layer{kind}")(*args, **kwargs)

    tanh = nd.Tanh()
    return [
        make("Conv", 4, 3, padding=1, activation=nd.ReLU()),
        nd.Sum([[make("BatchNorm"), make("Conv", 4, 3, padding="same", activation=tanh)], [], make("LCN", 3)]),
        make("MaxPooling", 3, 1, padding=1),
        nd.Concat(
            [
                [make("GroupNorm", 2), make("Dropout", 0.3)],
                make("LRN", 3, alpha=0.5),
                [make("L2Pooling", 3, 1, padding=1)],
            ]
        ),
        make("Deconv", 4, 3, padding=1, activation=tanh),
        make("Upsample", 2),
        make("AvgPooling", 2),
        make("LCN", 3, min_deviation="mean"),
        make("Pad", 1),
        make("Crop", 1),
        make("Conv", 4, 3, scheme=nd.schemes.Halo(backward="gather"), padding=1),
        make("LocalFiltering", 4, 3, activation=nd.Logistic()),
        make("Activation", tanh),
        nd.Sum([[make("InstanceNorm")], []]),
        nd.Concat([[make("GlobalAvgPooling")], [make("FC", 5, activation=tanh), make("FC", 6, activation=tanh)]]),
        make("BatchNorm"),
        make("FC", 4),
    ]


def build_every_layer(kind="", grid=None, backend="numpy", batch=4, **options):
    """Return a built model with a layer of every kind."""
    model = (nd.ConvnetDist if kind else nd.Convnet)(
        make_every_layer(kind), dtype="float64", seed=3, backend=backend, **options
    )
    model.build(SHAPE, batch, grid)
    return model


def draw_arrays(model, seed):
    """Return images and a gradient of the output."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(4, *SHAPE)), rng.normal(size=(4, *model.output_shape))


def draw_batch(model, batch, seed):
    """Return images and labels."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(batch, *model.input_shape)), rng.integers(0, 4, batch)


def run_steps(model):
    """Return the losses, gradients and state of two steps of different sizes."""
    arrays = {}
    for step, batch in enumerate(BATCH_SIZES):
        x, labels = draw_batch(model, batch, step)
        arrays[f"loss {step}"] = np.array([model.train_batch(model.scatter(x), labels, batch)])
        arrays |= {f"{name} {step}": gradient for name, gradient in model.gradients().items()}
    return arrays | model.state()
