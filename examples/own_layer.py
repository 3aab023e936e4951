"""A custom layer, serial and over tiles: the gradient magnitude of an image by Sobel filters.

python examples/own_layer.py                 checks it on one rank
mpirun -n 4 python examples/own_layer.py     checks it on four
neondist run examples/own_layer.yaml -n 4 --import examples/own_layer.py
"""

import numpy as np

import neondist as nd

# begin layer
#        row, column, weight in the vertical derivative, weight in the horizontal derivative
SOBEL_TAPS = [(i, j, (i - 1) * (1, 2, 1)[j] / 8, (j - 1) * (1, 2, 1)[i] / 8) for i in range(3) for j in range(3)]


class SobelLayer(nd.Layer):
    window = nd.Window(kernel=3, padding=1, mode="replicate")

    def forward(self, ctx, view):
        h, w = ctx.output_box.shape
        dv = sum(v * view[:, i : i + h, j : j + w] for i, j, v, _ in SOBEL_TAPS)
        dh = sum(u * view[:, i : i + h, j : j + w] for i, j, _, u in SOBEL_TAPS)
        ctx.save(dv=dv, dh=dh, y=ctx.xp.sqrt(dv**2 + dh**2 + 1e-6), shape=view.shape)  # 1e-6: differentiable at 0
        return ctx.y

    def backward(self, ctx, dy):
        dview, (h, w) = ctx.xp.zeros(ctx.shape, dy.dtype), ctx.output_box.shape
        for i, j, v, u in SOBEL_TAPS:
            dview[:, i : i + h, j : j + w] += dy / ctx.y * (v * ctx.dv + u * ctx.dh)
        return dview


class SobelLayerDist(nd.Dist, SobelLayer): ...


# end layer


# begin checks
def build_model(cls, layer, grid=None):
    model = cls([layer], dtype="float64")
    model.build(input_shape=(33, 22, 3), batch_size=4, grid=grid)
    return model


def compute_largest_difference(serial, tiled, x, dy):
    """Return the largest difference of outputs and input gradients between one process and the tiles."""
    y, y_tiled = serial.fprop(x), tiled.gather(tiled.fprop(tiled.scatter(x)))
    dx, dx_tiled = serial.bprop(dy), tiled.gather_input(tiled.bprop(tiled.scatter_output(dy)))
    return max(np.abs(y - y_tiled).max(), np.abs(dx - dx_tiled).max())


def compute_dot_test_error(tiled, x, direction, dy, h=1e-5):
    """Return the relative difference of <J direction, dy> (central differences) and <direction, J' dy> (bprop)."""
    above = tiled.gather(tiled.fprop(tiled.scatter(x + h * direction)))
    below = tiled.gather(tiled.fprop(tiled.scatter(x - h * direction)))
    tiled.fprop(tiled.scatter(x))
    dx = tiled.gather_input(tiled.bprop(tiled.scatter_output(dy)))
    left, right = np.sum((above - below) / (2 * h) * dy), np.sum(direction * dx)
    return abs(left - right) / abs(right)


def main():
    grid = nd.ProcessGrid()
    serial, tiled = build_model(nd.Convnet, SobelLayer()), build_model(nd.ConvnetDist, SobelLayerDist(), grid)
    x, direction, dy = np.random.default_rng(0).normal(size=(3, 4, 33, 22, 3))  # the same on every rank
    difference, error = (
        compute_largest_difference(serial, tiled, x, dy),
        compute_dot_test_error(tiled, x, direction, dy),
    )
    if grid.rank == 0:
        print(f"{grid.rows} x {grid.cols} tiles: differs from one process by {difference:.1e}, dot test {error:.1e}")
    assert difference < 1e-12
    assert error < 1e-7  # the accuracy of central differences


if __name__ == "__main__":
    main()
# end checks
