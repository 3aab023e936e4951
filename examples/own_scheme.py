"""A custom border scheme: halos in half precision. Run: python examples/own_scheme.py"""

# begin scheme
from math import prod

import numpy as np

import neondist as nd


class HalfHalo(nd.schemes.ExchangePolicy):
    """Exchange of cells and gradients as 16-bit floating-point numbers."""

    formula = "2 bytes per element of an exact halo, each way"

    def forward(self, halo):
        if "packed" not in halo.memory:  # once per layer, direction and batch size
            halo.memory["packed"] = halo.packed(dtype=np.float16)
        packed = halo.memory["packed"]
        packed.start(halo.outgoing())
        halo.unpack(packed.wait())

    backward = forward

    def message_bytes(self, num_elements, itemsize, direction):
        return 2 * num_elements


# end scheme


def main(ranks=4):
    layers = [nd.ConvLayerDist(4, 5, padding=2), nd.MaxPoolingLayerDist(3, 2), nd.FCLayerDist(3)]
    shape, images = (12, 10, 2), np.random.default_rng(0).normal(size=(3, 12, 10, 2))

    def job(comm, scheme):
        model = nd.ConvnetDist(
            [layer.distributed_counterpart() for layer in layers], scheme=scheme, dtype="float64", backend="numpy"
        )
        model.build(shape, 3, nd.ProcessGrid(comm))
        y = model.gather(model.fprop(model.scatter(images)))
        model.bprop(model.scatter_output(np.ones((3, prod(model.output_shape)))))
        return y, sum(comm.allgather(model.bytes_sent))

    (exact, all_bytes), (half, fewer) = (
        nd.loopback.run(ranks, lambda c, s=s: job(c, s))[0] for s in ("halo", HalfHalo())
    )
    print(f"largest difference {np.abs(half - exact).max():.1e}, bytes {fewer} instead of {all_bytes}")
    assert np.abs(half - exact).max() < 1e-2
    assert 4 * fewer == all_bytes


if __name__ == "__main__":
    main()
