"""Exactness of streaming: python tools/stream_exactness.py [--extent N] [--ranks 1,2,3,4,6] [--rows 1,16,100].

Runs three training steps in float64 of three convolutions with batch normalisation on virtual ranks, in strips of given
numbers of rows of the last feature map, for each number of ranks. Prints the largest difference of outputs, losses,
weights and statistics from those of one process with whole images. The exit code is 1 if any is above 1e-10.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # virtual ranks are threads

import numpy as np

import neondist as nd
from neondist.comm import loopback


def build_network(**options) -> nd.ConvnetDist:
    """Return an untrained network."""
    layers: list[nd.Layer] = []
    for channels, stride in ((16, 1), (32, 2), (64, 1)):
        layers += [nd.ConvLayerDist(channels, 3, stride=stride, padding=1, bias=False), nd.BatchNormLayerDist()]
        layers += [nd.ActivationLayerDist(nd.ReLU())]
    layers += [nd.MaxPoolingLayerDist(2), nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(10)]
    return nd.ConvnetDist(layers, seed=1, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **options)


def train(grid: nd.ProcessGrid, extent: int, **options) -> dict[str, np.ndarray]:
    """Train for three steps; return outputs, losses and weights."""
    model = build_network(**options)
    model.build((extent, extent, 3), 1, grid)
    assert (model.compiled.stream is not None) == bool(options)
    x = model.scatter(np.random.default_rng(0).standard_normal((1, extent, extent, 3)))
    losses = [model.train_batch(x, np.array([3])) for _ in range(3)]
    return {"output": model.gather(model.fprop(x, training=False)), "losses": np.array(losses)} | model.state()


def main() -> int:
    """Compare all combinations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extent", type=int, default=2048)
    for name, default in (("ranks", [1, 2, 3, 4, 6]), ("rows", [1, 16, 100])):
        parser.add_argument(f"--{name}", default=default, type=lambda text: [int(n) for n in text.split(",")])
    arguments = parser.parse_args()
    extent = arguments.extent
    expected, worst = train(nd.ProcessGrid.serial(), extent), 0.0
    for ranks in arguments.ranks:
        for rows in arguments.rows:
            start, streams = time.perf_counter(), {"memory": "1TiB", "strips": rows}
            results = loopback.run(ranks, lambda comm, streams=streams: train(nd.ProcessGrid(comm), extent, **streams))
            error = max(float(np.abs(state[name] - expected[name]).max()) for state in results for name in expected)
            print(f"{ranks} ranks, strips of {rows} rows: {error:.1e}, {time.perf_counter() - start:.0f} s", flush=True)
            worst = max(worst, error)
    return int(not worst < 1e-10)


if __name__ == "__main__":
    sys.exit(main())
