"""--debug-halo: a right model gives the same bits; a wrong layer, scheme or exchange is found."""

import threading

import numpy as np
import pytest
from invariance import train
from numpy.lib.stride_tricks import as_strided

import neondist as nd
from neondist.comm import DebugTransport, Message, SingleTransport, loopback
from neondist.errors import HaloError, NonFiniteError


def same_bits(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(other[name], array)


@pytest.mark.parametrize("kind", ["everything", "unshared", "segmentation", "normalisation"])
def test_a_right_model_gives_the_same_bits(kind):
    plain = loopback.run(4, lambda comm: train(kind, nd.ProcessGrid(comm)))
    debug = loopback.run(4, lambda comm: train(kind, nd.ProcessGrid(DebugTransport(comm))))
    for one, other in zip(plain, debug, strict=True):
        same_bits(one, other)


SCHEMES = [nd.Stale, nd.HaloOneway, nd.Tower, nd.Quantised]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_right_schemes_give_the_same_bits(scheme):
    def job(comm):
        return step(model([nd.ConvLayerDist(3, 5, padding=2), nd.ConvLayerDist(2, 3, padding=1)], comm, scheme()), 3)

    plain = loopback.run(4, job)
    same_bits(plain[0], loopback.run(4, lambda comm: job(DebugTransport(comm)))[0])


def model(layers, comm, scheme="halo"):
    made = nd.ConvnetDist([*layers, nd.FCLayerDist(3)], dtype="float64", backend="numpy", scheme=scheme)
    made.build((9, 8, 2), 4, nd.ProcessGrid(comm))
    return made


def step(made, steps=2):
    rng = np.random.default_rng(0)
    x, targets = rng.normal(size=(4, 9, 8, 2)), rng.integers(0, 3, 4)
    for _ in range(steps):
        made.train_batch(made.scatter(x), targets)
    return made.state()


class LooksTooFarDist(nd.AvgPoolingLayerDist):
    """Says 3 x 3 and looks at 3 x 4."""

    def forward(self, view):
        samples, rows, cols, channels = view.shape
        wider = as_strided(view, (samples, rows, cols + 1, channels), view.strides)
        return super().forward(view) + 0 * wider[:, 1:-1, 3:]

    def backward(self, dy):
        return super().backward(dy)


class WritesIntoItsViewDist(nd.AvgPoolingLayerDist):
    """Its result is right, but the view belongs to others too."""

    def forward(self, view):
        y = super().forward(view)
        view[:, -1] += 1
        return y

    def backward(self, dy):
        return super().backward(dy)


def outcome(layer, debug, ranks=4):
    def job(comm):
        step(model([nd.ConvLayerDist(2, 3, padding=1), layer(3, 1, 1, name="mine")], debug(comm)))

    try:
        loopback.run(ranks, job, timeout=10)
    except Exception as error:
        return error
    return None


def test_a_layer_that_looks_beyond_its_view():
    assert outcome(LooksTooFarDist, lambda comm: comm) is None
    error = outcome(LooksTooFarDist, DebugTransport)
    assert isinstance(error, NonFiniteError)
    assert "the output of layer 'mine'" in str(error)


def test_a_layer_that_writes_into_its_view():
    assert outcome(WritesIntoItsViewDist, lambda comm: comm) is None
    error = outcome(WritesIntoItsViewDist, DebugTransport)
    assert isinstance(error, HaloError)
    assert "was written to between fprop and bprop" in str(error)


@pytest.mark.parametrize("end", ["send", "receive"])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_writing_into_a_buffer_under_way(end, dtype):
    """By a thread that knows nothing of the exchange; with one message each way, of cells inside larger arrays."""

    def job(comm, debug):
        arrays = {name: np.ones((4, 4), dtype) for name in ("send", "receive")}
        box = (slice(1, 3), slice(0, 2))
        messages = [[Message(1 - comm.rank, arrays[name], box)] for name in ("send", "receive")]
        exchange = debug(comm).exchange(*messages)
        exchange.start()
        if comm.rank == 0:
            thread = threading.Thread(target=lambda: arrays[end].__setitem__((2, 1), 7))
            thread.start()
            thread.join()
        exchange.finish()
        return arrays["receive"]

    loopback.run(2, lambda comm: job(comm, lambda c: c))
    what = "on their way to rank 1" if end == "send" else "that rank 1 was sending to"
    with pytest.raises(HaloError, match=f"rank 0 of 2: cells {what} were written to between start and finish"):
        loopback.run(2, lambda comm: job(comm, DebugTransport))


def test_the_whole_world_may_be_one_rank():
    grid = nd.ProcessGrid(DebugTransport(SingleTransport()))
    assert grid.tiles.debug
    assert not nd.ProcessGrid.serial().tiles.debug
    window = nd.Window(3, padding=1, fill=2.5)
    debug, plain = (nd.GlobalArray(g, (1, 4, 5, 1), window) for g in (grid, nd.ProcessGrid.serial()))
    x = np.ones((1, 4, 5, 1), np.float32)
    np.testing.assert_array_equal(debug.get_fprop_view(x), plain.get_fprop_view(x))
