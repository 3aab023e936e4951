"""Sparse autoencoder on any grid of virtual or MPI ranks, with results as full arrays."""

from __future__ import annotations

import numpy as np

import neondist as nd

SHAPE = (11, 10, 2)
KINDS = {
    "unshared": {},
    "padded": {"padding": ((2, 1), (0, 3)), "bias": True, "activation": nd.Tanh},
    "blocks": {"shared": (2, 3)},
    "shared": {"shared": True},
    "orthonormal": {},
    "series": {},
    "volume": {},
}
SHAPES = {"series": (23, 2), "volume": (5, 6, 7, 1)}


def make_gb(kind, dist, **overrides):
    """Return a small GB with two stages and fully connected layers on top."""

    def make(name, *args, **kwargs):
        return getattr(nd, f"{name}Layer{'Dist' if dist else ''}")(*args, **kwargs)

    options = dict(KINDS[kind])
    if "activation" in options:
        options["activation"] = options["activation"]()
    layers = [
        make("LocalFiltering", 4, 3, 1 if kind == "volume" else 2, **options),
        make("L2Pooling", 2, 1),
        make("LCN", 3),
        make("LocalFiltering", 3, 2, 1),  # without pooling
        make("FC", 6, activation=nd.ReLU()),
        make("FC", 4),
    ]
    settings = {"seed": 3, "backend": "numpy", "dtype": "float64", "orthonormal": kind == "orthonormal"} | overrides
    settings.setdefault("optimizer", nd.Adam(0.01, weight_decay=1e-3))
    return getattr(nd, "GBDist" if dist else "GB")(layers, **settings)


def build_gb(kind, grid=None, batch=6, **overrides):
    """Return a built model and the tile of a random batch."""
    model, shape = make_gb(kind, grid is not None, **overrides), SHAPES.get(kind, SHAPE)
    model.build(shape, batch, grid)
    return model, model.scatter(np.random.default_rng(5).normal(size=(batch, *shape)))


def run_pretraining_steps(kind, grid=None, batch=6, steps=3, **overrides):
    """Return costs, reconstructions and gradients of a few steps of every stage, supervised losses and the state."""
    model, x = build_gb(kind, grid, batch, **overrides)
    results = {}
    for stage in model.stages:
        stage.begin_epoch(0)
        results[f"{stage.name} cost"] = np.array([stage.train_batch(x, None, batch) for _ in range(steps)])
        y = stage.fprop(x)
        results[f"{stage.name} reconstruction"] = stage.output.gather(y.residual + y.x)
        stage.compute_cost_and_gradient(x, 1 / batch)
        results[f"{stage.name} gradient"] = model.gradients()[f"{stage.name}/weights"]
    labels = np.arange(batch) % 4
    losses = []
    for epoch in range(3):
        model.begin_epoch(epoch)
        losses += [model.train_batch(x, labels, batch) for _ in range(2)]
    return results | {"loss": np.array(losses)} | {f"state {name}": array for name, array in model.state().items()}


def pretrain_and_fit(grid=None):
    """Return the logged values of pretraining and training: costs, reconstruction errors, losses and errors."""
    data = nd.Synthetic((12, 10, 1), classes=4, train=24, test=10, noise=0.3)
    grid = grid or nd.ProcessGrid.serial()
    model = make_gb("unshared", dist=True, num_pretrain_epochs=2, num_initial_epochs=1)
    data.open(grid)
    model.build(data.sample_shape, 8, grid)
    pretraining = nd.pretrain(model, data, 8)
    keys = ("test_loss", "reconstruction_error")
    results = {"pretraining": np.array([[record[key] for key in keys] for record in pretraining])}
    history = nd.fit(model, data, epochs=3, batch_size=8)
    return results | {
        key: np.array([record[key] for record in history]) for key in ("train_loss", "test_loss", "test_error")
    }
