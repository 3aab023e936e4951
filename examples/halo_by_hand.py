"""A custom training loop over GlobalArray: the composition of two 3 x 3 filters is fitted to a 5 x 5 blur.

python examples/halo_by_hand.py [SIDE OF THE IMAGE] [STEPS]
mpirun -n 4 python examples/halo_by_hand.py 1024

Every rank holds its tile of one image. The losses are the same on any number of ranks.
"""

import sys

import numpy as np

import neondist as nd


def correlate(view, weights):
    """Return the valid correlation of a view (1, h + k - 1, w + k - 1, 1) with weights (k, k): (1, h, w, 1)."""
    h, w = (n - len(weights) + 1 for n in view.shape[1:3])
    return sum(weights[i, j] * view[:, i : i + h, j : j + w] for i, j in np.ndindex(weights.shape))


def compute_view_gradient(dy, weights, shape):
    """Return the gradient of a view of this shape."""
    dview, (h, w) = np.zeros(shape), dy.shape[1:3]
    for i, j in np.ndindex(weights.shape):
        dview[:, i : i + h, j : j + w] += weights[i, j] * dy
    return dview


def compute_weights_gradient(view, dy, k=3):
    """Return this rank's contribution to the gradient of the weights, flat (k * k,)."""
    h, w = dy.shape[1:3]
    return [np.sum(view[:, i : i + h, j : j + w] * dy) for i, j in np.ndindex(k, k)]


side = int(sys.argv[1]) if len(sys.argv) > 1 else 512
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 40
grid = nd.ProcessGrid()
shape = (1, side, side, 1)

# this rank's tile of an image of waves and noise; no rank holds the whole image
dataset = nd.Synthetic(shape=shape[1:], train=1, test=1)
dataset.open(grid)
tile = dataset.train.images([0], "float64")

# wrap: the image is periodic, so that the composition of the small filters has the support of the large one
small, large = nd.Window(kernel=3, padding=1, mode="wrap"), nd.Window(kernel=5, padding=2, mode="wrap")
first, second, whole = (nd.GlobalArray(grid, shape, window, dtype="float64") for window in (small, small, large))
binomial = np.array([1, 4, 6, 4, 1]) / 16
target = correlate(whole.get_fprop_view(tile), np.outer(binomial, binomial))

weights = np.zeros(18)
a, b = weights.reshape(2, 3, 3)  # views of the array that the optimiser updates
a[1, 1] = b[1, 1] = 1.0
sgd = nd.SGD(learning_rate=0.2, momentum=0.7)
slots = sgd.create_slots(weights)

for step in range(steps):
    view1 = first.get_fprop_view(tile)  # the tile and its halo
    view2 = second.get_fprop_view(correlate(view1, a))
    residual = correlate(view2, b) - target

    # gradients of halo cells are returned to their owners and added
    dtile = second.get_bprop_view(compute_view_gradient(residual, b, view2.shape))
    sums = [
        *compute_weights_gradient(view1, dtile),
        *compute_weights_gradient(view2, residual),
        0.5 * np.sum(residual**2),
    ]
    means = np.array(sums) / side**2
    grid.world.allreduce(means)  # gradients and loss in one message
    sgd.update(weights, means[:18], slots, step)
    if grid.rank == 0 and (step % 10 == 0 or step == steps - 1):
        print(f"step {step:3d}  loss {means[18]:.12f}")

sent = sum(grid.world.allgather(first.bytes_sent + second.bytes_sent + whole.bytes_sent))
if grid.rank == 0:
    print(f"{grid.rows} x {grid.cols} tiles sent {sent / 1e6:.2f} MB of halos; the first filter is now\n{a.round(3)}")
