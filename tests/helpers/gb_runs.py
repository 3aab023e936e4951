"""The sparse autoencoder on any grid: one job that returns whole arrays, for virtual ranks and for MPI."""

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


def gb_of(kind, dist, **more):
    """A small GB of two stages and an FC top."""

    def make(name, *args, **kwargs):
        return getattr(nd, f"{name}Layer{'Dist' if dist else ''}")(*args, **kwargs)

    how = dict(KINDS[kind])
    if "activation" in how:
        how["activation"] = how["activation"]()
    layers = [
        make("LocalFiltering", 4, 3, 1 if kind == "volume" else 2, **how),
        make("L2Pooling", 2, 1),
        make("LCN", 3),
        make("LocalFiltering", 3, 2, 1),  # nothing pools it
        make("FC", 6, activation=nd.ReLU()),
        make("FC", 4),
    ]
    settings = {"seed": 3, "backend": "numpy", "dtype": "float64", "orthonormal": kind == "orthonormal"} | more
    settings.setdefault("optimizer", nd.Adam(0.01, weight_decay=1e-3))
    return getattr(nd, "GBDist" if dist else "GB")(layers, **settings)


def built(kind, grid=None, batch=6, **more):
    """The same, built, and the tile of a batch of noise."""
    model, shape = gb_of(kind, grid is not None, **more), SHAPES.get(kind, SHAPE)
    model.build(shape, batch, grid)
    return model, model.scatter(np.random.default_rng(5).normal(size=(batch, *shape)))


def pretrain_steps(kind, grid=None, batch=6, steps=3, **more):
    """Costs, reconstructions and gradients of a few steps on every stage, then supervised losses and the state."""
    model, x = built(kind, grid, batch, **more)
    found = {}
    for stage in model.stages:
        stage.begin_epoch(0)
        found[f"{stage.name} cost"] = np.array([stage.train_batch(x, None, batch) for _ in range(steps)])
        y = stage.fprop(x)
        found[f"{stage.name} reconstruction"] = stage.output.gather(y.residual + y.x)
        stage.cost_and_gradient(x, 1 / batch)
        found[f"{stage.name} gradient"] = model.gradients()[f"{stage.name}/weights"]
    labels = np.arange(batch) % 4
    losses = []
    for epoch in range(3):
        model.begin_epoch(epoch)
        losses += [model.train_batch(x, labels, batch) for _ in range(2)]
    return found | {"loss": np.array(losses)} | {f"state {name}": array for name, array in model.state().items()}


def pretrain_and_fit(grid=None):
    """What a user's run of pretraining and training says: costs, reconstruction errors, test losses and errors."""
    data = nd.Synthetic((12, 10, 1), classes=4, train=24, test=10, noise=0.3)
    grid = grid or nd.ProcessGrid.serial()
    model = gb_of("unshared", dist=True, num_pretrain_epochs=2, num_initial_epochs=1)
    data.open(grid)
    model.build(data.sample_shape, 8, grid)
    first = nd.pretrain(model, data, 8)
    keys = ("test_loss", "reconstruction_error")
    found = {"pretraining": np.array([[record[key] for key in keys] for record in first])}
    then = nd.fit(model, data, epochs=3, batch_size=8)
    return found | {
        key: np.array([record[key] for record in then]) for key in ("train_loss", "test_loss", "test_error")
    }
