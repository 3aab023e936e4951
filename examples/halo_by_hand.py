"""A training loop by hand over GlobalArray: two 3 x 3 filters learn to do together what one 5 x 5 blur does.

python examples/halo_by_hand.py [SIDE OF THE IMAGE] [STEPS]
mpirun -n 4 python examples/halo_by_hand.py 1024

Every rank holds its tile of one image. The losses are the same on any number of ranks.
"""

import sys

import numpy as np

import neondist as nd


def filtered(view, weights):
    """Return the valid correlation of a view (n, h + k - 1, w + k - 1, 1) with weights (k, k): (n, h, w, 1)."""
    k = len(weights)
    h, w = view.shape[1] - k + 1, view.shape[2] - k + 1
    return sum(weights[i, j] * view[:, i : i + h, j : j + w] for i, j in np.ndindex(k, k))


def filtered_back(dy, weights, shape):
    """Return the gradient of the view."""
    dview, (h, w) = np.zeros(shape), dy.shape[1:3]
    for i, j in np.ndindex(weights.shape):
        dview[:, i : i + h, j : j + w] += weights[i, j] * dy
    return dview


def weights_gradient(view, dy, k):
    """Return this rank's share of the gradient of the weights (k, k)."""
    h, w = dy.shape[1:3]
    return np.array([[np.sum(view[:, i : i + h, j : j + w] * dy) for j in range(k)] for i in range(k)])


side = int(sys.argv[1]) if len(sys.argv) > 1 else 512
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
grid = nd.ProcessGrid()
shape = (1, side, side, 1)

scenery = nd.Synthetic(shape=shape[1:], train=1, test=1)  # waves and noise
scenery.open(grid)
tile = scenery.train.images([0], "float64")  # this rank's cells; nobody holds the image

# wrap: the image is periodic, so that two small windows see exactly what one large window sees
small, large = nd.Window(kernel=3, padding=1, mode="wrap"), nd.Window(kernel=5, padding=2, mode="wrap")
first, second, whole = (nd.GlobalArray(grid, shape, window, "float64") for window in (small, small, large))
binomial = np.array([1, 4, 6, 4, 1]) / 16
target = filtered(whole.get_fprop_view(tile), np.outer(binomial, binomial))

a, b = np.zeros((2, 3, 3))
a[1, 1] = b[1, 1] = 0.5
for step in range(steps):
    view1 = first.get_fprop_view(tile)  # tile and halo
    view2 = second.get_fprop_view(filtered(view1, a))
    wrong = filtered(view2, b) - target

    da = second.get_bprop_view(filtered_back(wrong, b, view2.shape))  # halo parts travel home and are added
    sums = np.concatenate(
        [weights_gradient(view1, da, 3).ravel(), weights_gradient(view2, wrong, 3).ravel(), [0.5 * np.sum(wrong**2)]]
    )
    grid.world.allreduce(sums)  # over all tiles, in one message
    sums /= side * side
    a -= 0.5 * sums[:9].reshape(3, 3)
    b -= 0.5 * sums[9:18].reshape(3, 3)
    if grid.rank == 0 and step % 5 == 0:
        print(f"step {step:3d}  loss {sums[18]:.12f}")

sent = sum(grid.world.allgather(first.bytes_sent + second.bytes_sent + whole.bytes_sent))
if grid.rank == 0:
    print(f"step {steps:3d}  halos sent in all: {sent / 1e6:.2f} MB by {grid.rows} x {grid.cols} tiles")
    print(np.round(a, 3))
