"""Subclass of an activation with a fused implementation."""

import numpy as np

import neondist as nd


class DoubledReLU(nd.ReLU):
    def fprop(self, z):
        return 2 * super().fprop(z)

    def bprop(self, y, dy):
        return 2 * super().bprop(y, dy)


def test_overridden_methods_are_used():
    x = np.random.default_rng(0).normal(size=(2, 6, 5, 2))
    results = []
    for activation in (nd.ReLU(), DoubledReLU()):
        model = nd.Convnet([nd.ConvLayer(3, 3, activation=activation)], dtype="float64")
        model.build(x.shape[1:], len(x))
        y = model.fprop(x)
        results.append((y, model.bprop(np.ones_like(y))))
    for plain, doubled in zip(*results, strict=True):
        np.testing.assert_allclose(doubled, 2 * plain)
