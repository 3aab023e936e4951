"""Border schemes over MPI, whose messages travel during a step, against virtual ranks."""

import numpy as np
import pytest
from common_checks import max_relative_difference
from mpi4py import MPI
from root_rank import compute_on_root

import neondist as nd
from neondist.comm import loopback, mpi
from neondist.halo import as_scheme, schemes_by_name
from neondist.halo.fusion import fusion_scheme_or_none

world = MPI.COMM_WORLD


def train(comm, scheme, steps=5):
    layers = [
        nd.ConvLayerDist(3, 5, padding=2, activation=nd.ReLU()),
        nd.MaxPoolingLayerDist(3, 2),
        nd.ConvLayerDist(4, 3) if fusion_scheme_or_none(as_scheme(scheme)) else nd.DeconvLayerDist(4, 3, 2),
        nd.FCLayerDist(10),
    ]
    model = nd.ConvnetDist(layers, scheme=scheme, seed=1, dtype="float64", backend="numpy")
    model.build((13, 10, 2), 4, nd.ProcessGrid(comm))
    rng = np.random.default_rng(2)
    losses = []
    for _ in range(steps):
        losses.append(model.train_batch(model.scatter(rng.normal(size=(4, 13, 10, 2))), rng.integers(0, 10, 4)))
    for layer in model.leaves:  # the next model may reuse the memory of pending messages
        layer.wait_for_messages()
    y = model.gather(model.fprop(model.scatter(rng.normal(size=(4, 13, 10, 2))), training=False))
    return {"y": y, "loss": np.array(losses), "sent": np.array(float(model.bytes_sent)), **model.state()}


@pytest.mark.parametrize("scheme", sorted(schemes_by_name()))
def test_scheme_matches_virtual_ranks(scheme):
    expected = compute_on_root(lambda: loopback.run(world.size, lambda comm: train(comm, scheme)))
    assert max_relative_difference(train(mpi.MPITransport(world), scheme), expected[world.rank]) < 1e-10
