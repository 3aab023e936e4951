"""Streams against whole images: python tools/stream_exactness.py [--extent N] [--ranks 1,2,3,4,6] [--rows 1,16,100].

Three training steps in float64 of three convolutions, each with live batch norm, on virtual ranks, in strips of so many
rows of the last map, for each number of ranks; printed is the largest difference of outputs, losses, weights and
statistics from those of one process with whole images. The exit code is 1 if any is above 1e-10.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # virtual ranks are threads

import numpy as np

import neondist as nd
from neondist.comm import loopback


def network(**more) -> nd.ConvnetDist:
    """Return an untrained network."""
    layers: list[nd.Layer] = []
    for channels, stride in ((16, 1), (32, 2), (64, 1)):
        layers += [nd.ConvLayerDist(channels, 3, stride=stride, padding=1, bias=False), nd.BatchNormLayerDist()]
        layers += [nd.ActivationLayerDist(nd.ReLU())]
    layers += [nd.MaxPoolingLayerDist(2), nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(10)]
    return nd.ConvnetDist(layers, seed=1, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **more)


def trained(grid: nd.ProcessGrid, extent: int, **more) -> dict[str, np.ndarray]:
    """Return what three steps come to."""
    model = network(**more)
    model.build((extent, extent, 3), 1, grid)
    assert (model.compiled.stream is not None) == bool(more)
    x = model.scatter(np.random.default_rng(0).standard_normal((1, extent, extent, 3)))
    losses = [model.train_batch(x, np.array([3])) for _ in range(3)]
    return {"output": model.gather(model.fprop(x, training=False)), "losses": np.array(losses)} | model.state()


def main() -> int:
    """Compare them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extent", type=int, default=2048)
    for name, default in (("ranks", [1, 2, 3, 4, 6]), ("rows", [1, 16, 100])):
        parser.add_argument(f"--{name}", default=default, type=lambda text: [int(n) for n in text.split(",")])
    given = parser.parse_args()
    whole, worst = trained(nd.ProcessGrid.serial(), given.extent), 0.0
    for ranks in given.ranks:
        for rows in given.rows:
            begun, more = time.perf_counter(), {"memory": "1TiB", "strips": rows}
            found = loopback.run(ranks, lambda comm, more=more: trained(nd.ProcessGrid(comm), given.extent, **more))
            differs = max(float(np.abs(each[name] - whole[name]).max()) for each in found for name in whole)
            print(
                f"{ranks} ranks, strips of {rows} rows: {differs:.1e}, {time.perf_counter() - begun:.0f} s", flush=True
            )
            worst = max(worst, differs)
    return int(not worst < 1e-10)


if __name__ == "__main__":
    sys.exit(main())
