"""Images of different sizes with masks, as files, and data sets of them."""

import numpy as np

import neondist as nd

SIZES = [(40, 52), (61, 33), (47, 47), (35, 80), (50, 41)]


def make_sample(n, channels=3):
    y, x = np.indices(SIZES[n])
    rng = np.random.default_rng(n)
    noise = rng.integers(0, 99, (*SIZES[n], channels))
    return (noise + 9 * n + y[..., None]).astype("uint8"), ((x + y + n) % 3).astype("uint8")


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = array if array.ndim == 3 else array[..., None]
    with nd.create_sink(path, array.shape, array.dtype, "YXC", overwrite=True) as sink:
        sink.write(nd.Box.of(array.shape), array)
        sink.commit()


def open_dataset(grid, fields, **overrides):
    data = nd.ImageFiles(**({"crop": [24, 30], "validation": 2, "seed": 5} | fields | overrides))
    data.open(grid)
    return data


def run_on_ranks(ranks, function):
    return nd.loopback.run(ranks, lambda world: function(nd.ProcessGrid(world)))
