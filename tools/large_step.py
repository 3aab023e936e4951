"""Verified training step on an image larger than memory: mpirun -n 2 python tools/large_step.py --extent 65536.

The image, of 8-bit colours in an HDF5 file, repeats a random square. Sums over an output of convolutions are therefore
polynomials of degree 2 in the number of repeats, with terms for corners, edges and interiors. PyTorch computes these
sums for 2, 3 and 4 repeats in float64. Their extrapolation to the large image, which no process could compute at once,
is compared with the loss and all gradients of the step. The exit code is 1 if they differ by more than 1e-4 of their
largest value, or 1e-9 in float64.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

import neondist as nd

LABEL = 3
CONVOLUTIONS = ((16, 1), (32, 2), (64, 1))
"""channels and stride of convolutions, which precede a max pooling with disjoint windows"""


def write(path: Path, extent: int, square: np.ndarray) -> None:
    """Write the image, strip by strip."""
    strip = np.tile(square, (1, extent // len(square), 1))
    with h5py.File(path, "w") as file:
        images = file.create_dataset("train/images", (1, extent, extent, 3), "u1", chunks=(1, 64, min(2048, extent), 3))
        for row in range(0, extent, len(strip)):
            images[0, row : row + len(strip)] = strip
        file["train/labels"] = np.array([LABEL], "i4")
        file["test"] = file["train"]


def network(memory: str, dtype: str) -> nd.ConvnetDist:
    """Return the network `plain` of docs/measured.md, with learning rate 0, so that a step changes no weights."""
    layers: list[nd.Layer] = []
    for channels, stride in CONVOLUTIONS:
        layers.append(nd.ConvLayerDist(channels, 3, stride=stride, padding=1, activation=nd.ReLU()))
    layers += [nd.MaxPoolingLayerDist(2), nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(10)]
    optimizer = nd.SGD(learning_rate=0.0)
    return nd.ConvnetDist(layers, cost=nd.CrossEntropy(), optimizer=optimizer, seed=0, dtype=dtype, memory=memory)


def expected_gradients(state: dict[str, np.ndarray], square: np.ndarray, repeats: int) -> dict[str, np.ndarray]:
    """Return the loss and the gradients for `repeats` repeats along each axis."""
    import torch
    import torch.nn.functional as F

    weights = {name: torch.from_numpy(np.asarray(value, np.float64)) for name, value in state.items()}
    for name in weights:
        if weights[name].ndim == 4:
            weights[name] = weights[name].permute(3, 2, 0, 1).contiguous()
        weights[name].requires_grad_()
    convolutions = [name.split("/")[0] for name in weights if weights[name].ndim == 4]

    def sums(count: int) -> torch.Tensor:
        x = torch.from_numpy(np.tile(square, (count, count, 1)) / 255.0).permute(2, 0, 1)[None]
        for name, (_, stride) in zip(convolutions, CONVOLUTIONS, strict=True):
            x = F.relu(F.conv2d(x, weights[f"{name}/weights"], weights[f"{name}/bias"], stride, 1))
        return F.max_pool2d(x, 2).sum((0, 2, 3))

    def extrapolate(values: list[torch.Tensor]) -> torch.Tensor:
        """Return the value at `repeats` of the polynomial through the values at 2, 3 and 4."""
        a, b, c = values
        n = repeats - 2
        return a + n * (b - a) + n * (n - 1) / 2 * (c - 2 * b + a)

    cells = (len(square) * repeats // 4) ** 2
    totals = [sums(count) for count in (2, 3, 4)]
    means = (extrapolate(totals).detach() / cells).requires_grad_()
    fc = next(name.split("/")[0] for name in weights if weights[name].ndim == 2)
    loss = F.cross_entropy((means @ weights[f"{fc}/weights"] + weights[f"{fc}/bias"])[None], torch.tensor([LABEL]))
    loss.backward()
    gradients = {name: weights[name].grad for name in weights if name.startswith(fc)}
    inner = [name for name in weights if name not in gradients]
    terms = [torch.autograd.grad(total @ means.grad, [weights[name] for name in inner]) for total in totals]
    for name, *values in zip(inner, *terms, strict=True):
        gradient = extrapolate(values) / cells
        gradients[name] = gradient.permute(2, 3, 1, 0) if gradient.ndim == 4 else gradient
    return {"loss": np.array([loss.item()])} | {name: value.numpy() for name, value in gradients.items()}


def main() -> int:
    """Run the step, and compare it with the expected results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extent", type=int, default=65536, help="rows and columns, a multiple of --square")
    parser.add_argument("--square", type=int, default=256, help="rows and columns of the square, a multiple of 4")
    parser.add_argument("--memory", default="8GiB", help="limit of the total memory of all ranks")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--file", type=Path, default=Path("large.h5"), help="written if missing")
    arguments = parser.parse_args()
    world, extent = MPI.COMM_WORLD, arguments.extent
    square = np.random.default_rng(0).integers(0, 256, (arguments.square, arguments.square, 3), np.uint8)
    if world.rank == 0 and not arguments.file.exists():
        write(arguments.file, extent, square)
    world.Barrier()
    data, model = nd.HDF5Dataset(arguments.file, classes=10), network(arguments.memory, arguments.dtype)
    data.check()
    grid = nd.ProcessGrid(world, rows=world.size, cols=1)
    model.build((extent, extent, 3), batch_size=1, grid=grid)
    data.open(grid.with_tiles(model.compiled.overlapping_tiles), checked=True)
    x, targets = next(iter(data.splits["train"].batches([np.array([0])], model.dtype, lazy=model.is_streamed)))
    start = time.perf_counter()
    loss = model.train_batch(x, targets)
    seconds = time.perf_counter() - start
    peaks = world.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    actual, state = {"loss": np.array([loss])} | model.gradients(), model.state()
    if peaks is None:
        return 0
    print(f"{model.compiled.stream}")
    print(
        f"{extent} x {extent} x 3 on {world.size} ranks: {seconds:.0f} s, {seconds / extent**2 * 1e6:.3f} µs per pixel;"
        f" peak memory of all processes {sum(peaks) / 2**20:.2f} GiB (limit {arguments.memory})",
        flush=True,
    )
    worst = 0.0
    for name, reference in expected_gradients(state, square, extent // arguments.square).items():
        difference = float(np.abs(actual[name] - reference).max() / np.abs(reference).max())
        print(f"{name}: error {difference:.1e} relative to the largest value, {np.abs(reference).max():.3e}")
        worst = max(worst, difference)
    return int(not worst < (1e-4 if arguments.dtype == "float32" else 1e-9))


if __name__ == "__main__":
    sys.exit(main())
