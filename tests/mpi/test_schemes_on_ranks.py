"""Every scheme over real MPI, whose messages travel while a step goes on, sends what it does over virtual ranks."""

import numpy as np
import pytest
from mpi4py import MPI
from of_one import of_one
from support import worst

import neondist as nd
from neondist.comm import loopback, mpi
from neondist.halo import as_scheme, scheme_names
from neondist.halo.fusion import fusion_of

world = MPI.COMM_WORLD


def train(comm, scheme, steps=5):
    layers = [
        nd.ConvLayerDist(3, 5, padding=2, activation=nd.ReLU()),
        nd.MaxPoolingLayerDist(3, 2),
        nd.ConvLayerDist(4, 3) if fusion_of(as_scheme(scheme)) else nd.DeconvLayerDist(4, 3, 2),
        nd.FCLayerDist(10),
    ]
    model = nd.ConvnetDist(layers, scheme=scheme, seed=1, dtype="float64", backend="numpy")
    model.build((13, 10, 2), 4, nd.ProcessGrid(comm))
    rng = np.random.default_rng(2)
    losses = []
    for _ in range(steps):
        losses.append(model.train_batch(model.scatter(rng.normal(size=(4, 13, 10, 2))), rng.integers(0, 10, 4)))
    for layer in model.leaves:  # the next model may get the memory that this one's messages go to
        layer.settle()
    y = model.gather(model.fprop(model.scatter(rng.normal(size=(4, 13, 10, 2))), training=False))
    return {"y": y, "loss": np.array(losses), "sent": np.array(float(model.bytes_sent)), **model.state()}


@pytest.mark.parametrize("scheme", sorted(scheme_names()))
def test_a_scheme_does_what_it_does_over_virtual_ranks(scheme):
    expected = of_one(lambda: loopback.run(world.size, lambda comm: train(comm, scheme)))
    assert worst(train(mpi.MPITransport(world), scheme), expected[world.rank]) < 1e-10
