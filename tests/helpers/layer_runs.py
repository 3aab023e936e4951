"""Runs of a single layer on one process and on virtual ranks, with results as full arrays."""

import numpy as np
from common_checks import max_relative_difference

import neondist as nd
from neondist.comm import loopback

# ranks, replicas, rows, planes; tiles are uneven, and some are empty
GRIDS = [(1, 1, 1, 1), (4, 1, 2, 1), (6, 2, 3, 1), (9, 1, 9, 1), (4, 4, 1, 1), (8, 1, 2, 2)]


def run_layer(make, shape, grid=None, batch=3, dtype="float64"):
    """Run a one-layer model with perturbed parameters; return outputs and all gradients."""
    model_class = nd.ConvnetDist if grid else nd.Convnet
    model = model_class([make(bool(grid))], seed=1, dtype=dtype)
    model.build(shape, batch, grid)
    rng = np.random.default_rng(4)
    model.load_state({name: array + rng.normal(size=array.shape) for name, array in model.state().items()})
    x, dy = (rng.normal(0.3, 1.5, size=(batch, *extent)) for extent in (shape, model.output_shape))
    for sign in (-1, 1):  # a second pass detects stale data in reused buffers
        y = model.gather(model.fprop(model.scatter(sign * x)))
        dx = model.gather_input(model.bprop(model.scatter_output(sign * dy)))
    results = {"x": x, "dy": dy, "y": y, "dx": dx, "sent": np.array(model.bytes_sent)}
    results |= {f"param {name}": array for name, array in model.state().items()}
    return results | {f"grad {name}": array for name, array in model.gradients().items()}


def rotate_grids(index):
    """Return two of the grids, which rotate over the cases."""
    return GRIDS[index % 3 :: 3]


def check_on_grids(make, shape, grids=GRIDS):
    """Check that every grid gives the results of one process."""
    expected = run_layer(make, shape)
    for ranks, replicas, rows, planes in grids:

        def job(comm, factors=(replicas, rows, planes)):
            replicas, rows, planes = factors
            grid = nd.ProcessGrid(comm, replicas=replicas, rows=rows, planes=planes)
            return run_layer(make, shape, grid, batch=max(3, replicas))

        reference = expected if replicas <= 3 else run_layer(make, shape, batch=replicas)
        for results in loopback.run(ranks, job):
            assert max_relative_difference(drop_byte_counts(results), drop_byte_counts(reference)) < 1e-10, (
                ranks,
                replicas,
                rows,
                planes,
            )


def drop_byte_counts(results):
    return {name: array for name, array in results.items() if name != "sent"}


def make_factory(name, *args, **kwargs):
    """Return a function that creates the serial or the distributed layer."""
    return lambda dist: getattr(nd, f"{name}Layer{'Dist' if dist else ''}")(*args, **kwargs)
