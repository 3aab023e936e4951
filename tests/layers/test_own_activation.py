"""A subclass of an activation that has a fast way of its own."""

import numpy as np

import neondist as nd


class Doubled(nd.ReLU):
    def fprop(self, z):
        return 2 * super().fprop(z)

    def bprop(self, y, dy):
        return 2 * super().bprop(y, dy)


def test_what_a_subclass_computes_is_what_counts():
    x = np.random.default_rng(0).normal(size=(2, 6, 5, 2))
    found = []
    for activation in (nd.ReLU(), Doubled()):
        model = nd.Convnet([nd.ConvLayer(3, 3, activation=activation)], dtype="float64")
        model.build(x.shape[1:], len(x))
        y = model.fprop(x)
        found.append((y, model.bprop(np.ones_like(y))))
    for plain, doubled in zip(*found, strict=True):
        np.testing.assert_allclose(doubled, 2 * plain)
