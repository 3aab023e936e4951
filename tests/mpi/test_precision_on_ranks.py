"""Precision over MPI: 16-bit halos match those of virtual ranks, and all ranks skip a step that overflows on one."""

import numpy as np
from common_checks import max_relative_difference
from mpi4py import MPI
from root_rank import compute_on_root

import neondist as nd
from neondist.comm import loopback, mpi

world = MPI.COMM_WORLD


class Spike(nd.Activation):
    """Identity whose gradient overflows float16 if `large` is set."""

    large = False

    def fprop(self, z):
        return z

    def bprop(self, y, dy):
        return dy * np.float32(1e12) if self.large else dy


def train(comm):
    layers = [nd.ConvLayerDist(4, 3, padding=1), nd.ConvLayerDist(3, 3, activation=Spike()), nd.FCLayerDist(5)]
    model = nd.ConvnetDist(layers, precision="float16", backend="numpy")
    model.build((13, 10, 2), 4, nd.ProcessGrid(comm))
    rng, losses = np.random.default_rng(2), []
    for number in range(3):
        layers[1].activation.large = number == 1 and model.grid.rank == model.grid.size - 1
        losses.append(model.train_batch(model.scatter(rng.normal(size=(4, 13, 10, 2))), rng.integers(0, 5, 4)))
    assert np.isnan(losses).tolist() == [False, True, False]
    assert model.loss_scaler.scale == 2.0**15
    assert model.bytes_sent == 3 * model.compiled.bytes(model.grid.rank)
    return {"loss": np.array(losses[::2]), "sent": np.array(float(model.bytes_sent)), **model.state()}


def test_skipped_step_and_narrow_halos():
    expected = compute_on_root(lambda: loopback.run(world.size, train))
    assert max_relative_difference(train(mpi.MPITransport(world)), expected[world.rank]) < 1e-5
