"""Undeclared messages of schemes and layers are rejected, and their source is named."""

import numpy as np
import pytest
from scheme_runs import run_on_ranks

import neondist as nd
from neondist.errors import PlanMismatchError
from neondist.layers import Reduction


class Twice(nd.schemes.ExchangePolicy):
    """Scheme that exchanges twice and declares one exchange."""

    def forward(self, halo):
        halo.exchange()
        halo.exchange()

    def backward(self, halo):
        halo.exchange()


class Halves(nd.schemes.ExchangePolicy):
    """Scheme that sends two bytes per element and declares eight."""

    def forward(self, halo):
        packed = halo.memory.get("packed") or halo.packed(dtype="f2")
        packed.start(halo.outgoing())
        halo.unpack(packed.wait())

    backward = forward


class Wider(nd.ConvLayer):
    """Layer with an undeclared array."""

    def adjust_for_dist(self):
        super().adjust_for_dist()
        self.extra = self.register_array(self.input_shape, nd.Window(5, padding=2))


class WiderDist(nd.Dist, Wider):
    pass


class Sums(nd.Layer):
    """Layer that reduces two values per sample and declares one."""

    def reductions_for(self, input_shape):
        return [Reduction("forward", "tiles", result_elements_per_sample=1)]

    def reduce(self, ctx, view):
        return np.ones((len(view), 2))

    def forward(self, ctx, view):
        return view

    def backward(self, ctx, dy):
        return dy


class SumsDist(nd.Dist, Sums):
    pass


def make_conv(scheme):
    return lambda: nd.ConvLayerDist(2, 3, padding=1, scheme=scheme)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            make_conv(Twice()),
            "Twice has exchanged 2 times in one call of forward, but its exchanges_per_call declares 1 to 1",
        ),
        (make_conv(Halves()), r"Halves sends messages of \[.*\] bytes in forward, but its message_bytes returns"),
        (lambda: WiderDist(2, 3, padding=1), r"layer 'wider1' \(WiderDist\): its arrays send messages of .* elements"),
        (SumsDist, r"layer 'sums1' \(SumsDist\): reduces 6 elements forward, but reductions_for declares 3"),
    ],
    ids=["exchanges", "bytes", "arrays", "reductions"],
)
def test_undeclared_messages_are_rejected(layer, message):
    def job(comm):
        model = nd.ConvnetDist([layer()], dtype="float64", cost=nd.SumSquared())
        model.build((8, 6, 2), 3, nd.ProcessGrid(comm, rows=2))
        model.fprop(model.scatter(np.ones((3, 8, 6, 2))))

    with pytest.raises(PlanMismatchError, match=message):
        run_on_ranks(2, job)
