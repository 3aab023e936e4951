"""One layer by itself, on one process and on virtual ranks: outputs and all gradients as whole arrays."""

import numpy as np
from support import worst

import neondist as nd
from neondist.comm import loopback

# ranks, replicas, rows, planes; on the images below some tiles are empty and all are uneven
GRIDS = [(1, 1, 1, 1), (4, 1, 2, 1), (6, 2, 3, 1), (9, 1, 9, 1), (4, 4, 1, 1), (8, 1, 2, 2)]


def passes(make, shape, grid=None, batch=3, dtype="float64"):
    """Run a one-layer model whose parameters are not their first values."""
    cls = nd.ConvnetDist if grid else nd.Convnet
    model = cls([make(bool(grid))], seed=1, dtype=dtype)
    model.build(shape, batch, grid)
    rng = np.random.default_rng(4)
    model.load_state({name: array + rng.normal(size=array.shape) for name, array in model.state().items()})
    x, dy = (rng.normal(0.3, 1.5, size=(batch, *one)) for one in (shape, model.output_shape))
    for sign in (-1, 1):  # a second round finds what a reused buffer left behind
        y = model.gather(model.fprop(model.scatter(sign * x)))
        dx = model.gather_input(model.bprop(model.scatter_output(sign * dy)))
    found = {"x": x, "dy": dy, "y": y, "dx": dx, "sent": np.array(model.bytes_sent)}
    found |= {f"param {name}": array for name, array in model.state().items()}
    return found | {f"grad {name}": array for name, array in model.gradients().items()}


def in_turn(at):
    """Return two of the grids: cases take turns."""
    return GRIDS[at % 3 :: 3]


def check_grids(make, shape, grids=GRIDS):
    """The same numbers on every grid."""
    expected = passes(make, shape)
    for ranks, replicas, rows, planes in grids:

        def job(comm, cut=(replicas, rows, planes)):
            replicas, rows, planes = cut
            grid = nd.ProcessGrid(comm, replicas=replicas, rows=rows, planes=planes)
            return passes(make, shape, grid, batch=max(3, replicas))

        wanted = expected if replicas <= 3 else passes(make, shape, batch=replicas)
        for found in loopback.run(ranks, job):
            assert worst(numbers(found), numbers(wanted)) < 1e-10, (ranks, replicas, rows, planes)


def numbers(found):
    return {name: array for name, array in found.items() if name != "sent"}


def layer(name, *args, **kwargs):
    """Return what makes a serial layer, or its twin."""
    return lambda dist: getattr(nd, f"{name}Layer{'Dist' if dist else ''}")(*args, **kwargs)
