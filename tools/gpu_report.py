"""`make test-gpu`: benchmark of a GPU in a few minutes; writes a table between the markers of docs/gpu.md.

python tools/gpu_report.py [--page FILE] [--seconds 480] [--networks resnet,unet]

Checks that training of layers and of a PyTorch module gives equal results on 1, 2 and 4 ranks that share the GPU.
Compares steps of networks of `neondist bench suite`, as layers and as distributed PyTorch modules, with eager and
compiled PyTorch in time and memory, and a halo exchange with a copy of its bytes on the device. Measurements beyond the
time limit are reported as not run.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import neondist as nd
from neondist.backends import Backend
from neondist.bench.networks import NETWORKS

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- gpu report: begin -->", "<!-- gpu report: end -->"
RANKS, PRECISIONS = (1, 2, 4), ("float32", "tf32", "bfloat16")
NETWORK_ORDER = ("resnet", "unet", "vgg", "mnist", "plain", "wide")
"""networks, most important first"""
HALO_SHAPE = (8, 256, 256, 64)
WARM_UP_STEPS = 5
"""untimed steps, in which kernels are compiled and selected, and graphs are captured"""


class Card(NamedTuple):
    """Device to measure: a GPU, or its replacement in tests.

    Attributes
    ----------
    name : name of the card
    backend : backend of layers
    torch_device : device of PyTorch modules
    run_job : runs a job on a number of ranks, and returns the arrays of the first rank
    measure : measures a network in a precision, with or without torch.compile
    """

    name: str
    backend: str | Backend
    torch_device: str
    run_job: Any
    measure: Any


def synchronise_device(xp: Any) -> None:
    """Synchronise the current stream."""
    xp.cuda.get_current_stream().synchronize()


def time_calls(work: Any, rounds: int, steps: int = 1) -> float:
    """Return the median seconds of a few rounds, after a warm-up round."""
    durations = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(steps):
            work()
        durations.append((time.perf_counter() - start) / steps)
    return median(durations[1:])


# Jobs on ranks that share the GPU.


def train_layers(grid: nd.ProcessGrid, backend: Any) -> dict[str, np.ndarray]:
    """Train a network in float64 with every kind of dependence between tiles; return losses and weights."""
    layers = [
        nd.ConvLayerDist(8, 5, padding=2, padding_mode="reflect"),
        nd.BatchNormLayerDist(),
        nd.ActivationLayerDist(nd.ReLU()),
        nd.MaxPoolingLayerDist(3, 2, padding=1),
        nd.LCNLayerDist(5),
        nd.ConvLayerDist(8, 3, padding=1, groups=2),
        nd.FCLayerDist(10),
    ]
    options = {"cost": nd.CrossEntropy(), "optimizer": nd.SGD(0.05, momentum=0.9), "seed": 1, "dtype": "float64"}
    model, rng = nd.ConvnetDist(layers, backend=backend, **options), np.random.default_rng(0)
    images, labels = rng.random((4, 33, 30, 3)), rng.integers(0, 10, 4)
    model.build(images.shape[1:], 4, grid)
    x = model.scatter(images)
    return {"losses": np.array([model.train_batch(x, labels) for _ in range(4)]), **model.state()}


def train_module(grid: nd.ProcessGrid, backend: Any, device: str = "cuda") -> dict[str, np.ndarray]:
    """Train a PyTorch module in float64 with every kind of exchange; return losses and weights."""
    import torch
    from torch import nn

    import neondist.torch as ndt

    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 5, padding=2, padding_mode="reflect"), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    up = nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2)
    network = nn.Sequential(*conv, *up, nn.ConvTranspose2d(8, 4, 3, 2, 1), nn.InstanceNorm2d(4), nn.Conv2d(4, 5, 1))
    module, (images, labels) = network.double().to(device), (torch.rand(4, 3, 34, 30), torch.randint(5, (4, 67, 59)))
    model = ndt.distribute(module, images.shape, grid, dtype=torch.float64)
    tile, target = model.scatter(images.double().to(device)), model.scatter_target(labels.to(device))
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model.loss(nn.CrossEntropyLoss(), model(tile), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": np.array(losses), **{name: tensor.cpu().numpy() for name, tensor in module.state_dict().items()}}


def run_halo(
    grid: nd.ProcessGrid, backend: Any, shape: tuple[int, ...] = HALO_SHAPE, steps: int = 20
) -> dict[str, np.ndarray]:
    """Time a forward halo exchange, and a copy of its bytes on the device."""
    array = nd.GlobalArray(grid, shape, nd.Window(3, padding=1), backend=backend)
    xp = array.backend.xp
    array.get_fprop_view(xp.zeros(array.local_shape, "f4"))
    halo = array.buffer(array.local_shape[0]).gather
    count = max(1, sum(cells.size for cells in halo.outgoing()))
    source, target = xp.zeros(count, "f4"), xp.zeros(count, "f4")

    def time_work(work: Any) -> float:
        def synchronous_work() -> None:
            work()
            synchronise_device(xp)

        return time_calls(synchronous_work, 5, steps)

    durations = time_work(halo.exchange), time_work(lambda: xp.copyto(target, source))
    return {"seconds": np.array(durations), "bytes": np.array(4 * count), "shape": np.array(shape)}


JOBS = {"losses": train_layers, "modules": train_module, "halos": run_halo}


def run_job_on_ranks(job: str, ranks: int) -> dict[str, np.ndarray]:
    """Run a job under mpirun on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "arrays.npz")
        words = [sys.executable, "-m", "neondist", "run", "-n", str(ranks), __file__, "--job", job, "--output", file]
        subprocess.run(list(map(str, words)), cwd=ROOT, check=True)
        with np.load(file) as arrays:
            return dict(arrays)


# Training steps of neondist and of PyTorch.


Measurements = dict[str, float | str]
"""seconds and bytes of a step, or the reason for a missing figure"""


def measure_in_process(network: str, precision: str, compiles: bool) -> Measurements:
    """Measure a network in a separate process; without torch.compile if that crashes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measurements.json")
        words = [sys.executable, __file__, "--step", network, precision, "--output", str(file)]
        code = subprocess.run([*words, *["--compile"] * compiles], cwd=ROOT, check=False).returncode
        if not code:
            return dict(json.loads(file.read_text(encoding="utf-8")))
    crash = f"the process ended with exit code {code}"
    return measure_in_process(network, precision, False) | {"compiled": crash} if compiles else {"ours": crash}


def measure_network(case: Any, precision: str, card: Card, compiles: bool, rounds: int = 5) -> Measurements:
    """Measure a training step of a network with neondist and with PyTorch."""
    rng = np.random.default_rng(0)
    x = rng.random((case.batch_size, *case.sample_shape), np.float32)
    try:
        measurements, *network = _measure_neondist(case, x, precision, card, rounds)
    except (TypeError, nd.ConfigError) as error:  # unsupported precision
        return {"ours": str(error).splitlines()[0]}
    gc.collect()  # returns the memory of the model to PyTorch's pool
    return measurements | _measure_torch(case, x, network, precision, card, compiles, rounds)


def _measure_neondist(
    case: Any, x: np.ndarray, precision: str, card: Card, rounds: int
) -> tuple[Measurements, Any, Any, Any]:
    """Return the measurements of neondist, and data for PyTorch: all arrays, names of the trained ones, and labels."""
    options = {} if precision == "float32" else {"precision": precision}
    training = {"cost": nd.CrossEntropy(), "optimizer": nd.SGD(1e-3)}
    model = nd.ConvnetDist(case.layers(), backend=card.backend, **training, **options)
    model.build(case.sample_shape, case.batch_size, nd.ProcessGrid.serial())
    labels = np.random.default_rng(1).integers(0, case.classes, (case.batch_size, *model.output_shape[:-1]))
    tile, measurements = model.scatter(x), Measurements()
    measurements["ours"], measurements["our memory"] = _time_step(lambda: model.train_batch(tile, labels), rounds, card)
    return measurements, model.state(), list(model.gradients()), labels


def _measure_torch(
    case: Any, x: np.ndarray, network: Any, precision: str, card: Card, compiles: bool, rounds: int
) -> Measurements:
    """Return the measurements of PyTorch for the same network, channels-last."""
    import torch

    from neondist.bench.torch_twin import TorchTwin

    state, trained, labels = network
    twin, measurements = TorchTwin(case.model(), state, trained, x, labels), Measurements()
    twin.module.to(card.torch_device)
    twin.x, twin.targets = twin.x.to(card.torch_device), twin.targets.to(card.torch_device)
    autocast = torch.autocast(card.torch_device, torch.bfloat16, enabled=precision == "bfloat16")
    matmul_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=precision == "tf32"), autocast:
            measurements["eager"], measurements["eager memory"] = _time_step(twin.step, rounds, card)
            measurements["module"], _ = _time_step(_distributed_step(twin), rounds, card)
            if compiles:
                measurements["compiled"] = twin.compile() or _time_step(twin.step, rounds, card)[0]
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
    return measurements


def _distributed_step(twin: Any) -> Any:
    """Return a training step of the twin's module, distributed over one rank."""
    from torch.nn import functional

    import neondist.torch as ndt

    model = ndt.distribute(twin.module, tuple(twin.x.shape), nd.ProcessGrid.serial())
    tile, targets = model.scatter(twin.x), model.scatter_target(twin.targets)

    def step() -> float:
        twin.optimizer.zero_grad(set_to_none=True)
        loss = model.loss(functional.cross_entropy, model(tile), targets)
        loss.backward()
        twin.optimizer.step()
        return float(loss.detach())

    return step


def _time_step(step: Any, rounds: int, card: Card) -> tuple[float, float]:
    """Return the seconds of a step after warm-up, and its peak memory on the GPU in bytes.

    The memory is the amount reserved by PyTorch's pool, which CuPy shares; it includes captured graphs.
    """
    import torch

    for _ in range(WARM_UP_STEPS):
        step()
    if card.torch_device != "cuda":
        return time_calls(step, rounds), 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return time_calls(step, rounds), float(torch.cuda.max_memory_reserved())


# The page.


def report(card: Card, networks: Any, seconds: float, precisions: Any = PRECISIONS) -> Iterator[str]:
    """Yield the lines of the tables, each once it is measured, in about `seconds` seconds."""
    start = time.perf_counter()

    def remaining() -> float:
        return seconds - (time.perf_counter() - start)

    yield from (f"Measured on {card.name}, neondist {nd.__version__}.", "")
    difference = "largest relative difference from one rank in float64"
    yield f"| Ranks on one GPU | Layers: {difference} | PyTorch module: {difference} |"
    yield "| --- | --- | --- |"
    expected_by_job = {job: card.run_job(job, 1) for job in ("losses", "modules")}
    for ranks in RANKS[1:]:
        differences = [
            _worst_difference(card.run_job(job, ranks), expected) for job, expected in expected_by_job.items()
        ]
        yield f"| {ranks} | {differences[0]:.1e} | {differences[1]:.1e} |"
    halo = card.run_job("halos", 2)
    exchange, copy = halo["seconds"]
    shape_text, megabytes = " × ".join(map(str, halo["shape"])), int(halo["bytes"]) / 1e6
    yield from ("", f"Exchanging the halo of an array of shape {shape_text} between 2 ranks ({megabytes:.2f} MB each)")
    yield from (f"takes {1e6 * exchange:.0f} µs, {exchange / copy:.1f} times as long as a copy on the device.", "")
    yield "| Step | ms | ÷ eager | ÷ compiled | Memory ÷ eager | Distributed module ÷ eager |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for network in networks:
        for precision in precisions:
            name = f"| {network}, {precision} |"
            if remaining() < 0:
                yield f"{name} not run (time limit) | | | | |"
            else:
                yield f"{name} {_format_row(card.measure(network, precision, remaining() > 60))} |"


def _format_row(measurements: Measurements) -> str:
    ours = measurements["ours"]
    if isinstance(ours, str):
        return f"not run ({ours}) | | | |"
    compiled, memory = measurements.get("compiled"), measurements.get("eager memory")
    by_compiled = f"{ours / compiled:.2f}" if isinstance(compiled, float) else f"not run ({compiled or 'time limit'})"
    by_memory = f"{measurements['our memory'] / memory:.2f}" if memory else "not run"
    by_module = f"{measurements['module'] / measurements['eager']:.2f}"
    return f"{1e3 * ours:.2f} | {ours / measurements['eager']:.2f} | {by_compiled} | {by_memory} | {by_module}"


def _worst_difference(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest difference, relative to the largest number of the same array."""
    return max(float(np.abs(actual[name] - one).max() / max(np.abs(one).max(), 1e-3)) for name, one in expected.items())


def write(path: Path, text: str) -> None:
    """Write text between the markers of a page."""
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> int:
    """Measure, and print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=480, help="start no measurement after this time (default 480)")
    parser.add_argument("--networks", default=",".join(NETWORK_ORDER), help=f"default {','.join(NETWORK_ORDER)}")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        grid = nd.ProcessGrid()
        result = JOBS[arguments.job](grid, "cupy")
        if grid.rank == 0:
            np.savez(arguments.output, **result)
        return 0
    backend = next(one for one in nd.available() if one.name == "cupy")
    if not backend.usable:
        print(f"no report: {backend.reason}")
        return 0
    card, lines = Card(backend.reason, "cupy", "cuda", run_job_on_ranks, measure_in_process), list[str]()
    if arguments.step:
        network, precision = arguments.step
        result = measure_network(NETWORKS[network], precision, card, arguments.compile)
        arguments.output.write_text(json.dumps(result), encoding="utf-8")
        return 0
    for line in report(card, arguments.networks.split(","), arguments.seconds):
        print(line, flush=True)
        lines.append(line)
        write(arguments.page, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
