"""`make test-gpu`: what a GPU gives, in a few minutes; writes a table between the markers of docs/gpu.md.

python tools/gpu_report.py [--page FILE] [--seconds 540] [--networks resnet,unet]

Whether training is the same on 1, 2 and 4 ranks that share the GPU, of layers and of a PyTorch module; steps of
networks of `neondist bench suite`, of layers and of the same PyTorch module distributed, against PyTorch, eager and
compiled; the exchange of a halo against a copy of its bytes on the device; and the memory of later steps. What does not
fit into the time is reported as not run.
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
ORDER = ("resnet", "unet", "vgg", "mnist", "plain", "wide")
"""the networks whose figures matter most come first"""
HALO = (8, 256, 256, 64)
WARM = 5
"""steps before one is timed: kernels are compiled and chosen, and graphs are captured"""


class Card(NamedTuple):
    """Device to measure: a GPU, or its replacement in tests.

    Attributes
    ----------
    name : of the card
    backend : of layers
    torch_device : of PyTorch's modules
    ranks : what runs a function of a grid and a backend on so many ranks, and returns the first one's arrays
    measured : what measures a network in a precision, with or without torch.compile
    """

    name: str
    backend: str | Backend
    torch_device: str
    ranks: Any
    measured: Any


def finish(xp: Any) -> None:
    """Wait for all that has been started."""
    xp.cuda.get_current_stream().synchronize()


def seconds_of(work: Any, rounds: int, steps: int = 1) -> float:
    """Return the median of a few rounds, after one more."""
    taken = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for _ in range(steps):
            work()
        taken.append((time.perf_counter() - begin) / steps)
    return median(taken[1:])


# On ranks that share the GPU.


def losses(grid: nd.ProcessGrid, backend: Any) -> dict[str, np.ndarray]:
    """Return what a few steps of training in float64 come to; every dependence between tiles is in the network."""
    layers = [
        nd.ConvLayerDist(8, 5, padding=2, padding_mode="reflect"),
        nd.BatchNormLayerDist(),
        nd.ActivationLayerDist(nd.ReLU()),
        nd.MaxPoolingLayerDist(3, 2, padding=1),
        nd.LCNLayerDist(5),
        nd.ConvLayerDist(8, 3, padding=1, groups=2),
        nd.FCLayerDist(10),
    ]
    made = {"cost": nd.CrossEntropy(), "optimizer": nd.SGD(0.05, momentum=0.9), "seed": 1, "dtype": "float64"}
    model, rng = nd.ConvnetDist(layers, backend=backend, **made), np.random.default_rng(0)
    images, labels = rng.random((4, 33, 30, 3)), rng.integers(0, 10, 4)
    model.build(images.shape[1:], 4, grid)
    x = model.scatter(images)
    return {"losses": np.array([model.train_batch(x, labels) for _ in range(4)]), **model.state()}


def modules(grid: nd.ProcessGrid, backend: Any, device: str = "cuda") -> dict[str, np.ndarray]:
    """Return losses and weights of a few steps of a PyTorch module in float64; every kind of exchange is in it."""
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
    optimizer, found = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model.loss(nn.CrossEntropyLoss(), model(tile), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return {"losses": np.array(found), **{name: one.cpu().numpy() for name, one in module.state_dict().items()}}


def halos(grid: nd.ProcessGrid, backend: Any, shape: tuple[int, ...] = HALO, steps: int = 20) -> dict[str, np.ndarray]:
    """Return the seconds of an exchange forward, and those of a copy of its bytes on the device."""
    array = nd.GlobalArray(grid, shape, nd.Window(3, padding=1), backend=backend)
    xp = array.backend.xp
    array.get_fprop_view(xp.zeros(array.local_shape, "f4"))
    halo = array.buffer(array.local_shape[0]).gather
    numbers = max(1, sum(cells.size for cells in halo.outgoing()))
    source, target = xp.zeros(numbers, "f4"), xp.zeros(numbers, "f4")

    def timed(work: Any) -> float:
        def each() -> None:
            work()
            finish(xp)

        return seconds_of(each, 5, steps)

    found = timed(halo.exchange), timed(lambda: xp.copyto(target, source))
    return {"seconds": np.array(found), "bytes": np.array(4 * numbers), "shape": np.array(shape)}


JOBS = {"losses": losses, "modules": modules, "halos": halos}


def on_ranks(job: str, ranks: int) -> dict[str, np.ndarray]:
    """Run a job under mpirun, on ranks of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.npz")
        words = [sys.executable, "-m", "neondist", "run", "-n", str(ranks), __file__, "--job", job, "--output", file]
        subprocess.run(list(map(str, words)), cwd=ROOT, check=True)
        with np.load(file) as arrays:
            return dict(arrays)


# A training step, here and in PyTorch.


Found = dict[str, float | str]
"""seconds and bytes of a step; a text says why there is no figure"""


def in_process(network: str, precision: str, compiles: bool) -> Found:
    """Measure a network in a process of its own; without torch.compile, where that crashes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        words = [sys.executable, __file__, "--step", network, precision, "--output", str(file)]
        code = subprocess.run([*words, *["--compile"] * compiles], cwd=ROOT, check=False).returncode
        if not code:
            return dict(json.loads(file.read_text(encoding="utf-8")))
    crash = f"the process ended with {code}"
    return in_process(network, precision, False) | {"compiled": crash} if compiles else {"ours": crash}


def measured(case: Any, precision: str, card: Card, compiles: bool, rounds: int = 5) -> Found:
    """Return the figures of a training step of a network."""
    rng = np.random.default_rng(0)
    x = rng.random((case.batch, *case.shape), np.float32)
    try:
        found, *network = _ours(case, x, precision, card, rounds)
    except (TypeError, nd.ConfigError) as error:  # of a precision that is not there
        return {"ours": str(error).splitlines()[0]}
    gc.collect()  # its memory is PyTorch's now
    return found | _theirs(case, x, network, precision, card, compiles, rounds)


def _ours(case: Any, x: np.ndarray, precision: str, card: Card, rounds: int) -> tuple[Found, Any, Any, Any]:
    """Return our figures, and the network for PyTorch: its arrays, the names of those that are trained, and labels."""
    made = {} if precision == "float32" else {"precision": precision}
    learning = {"cost": nd.CrossEntropy(), "optimizer": nd.SGD(1e-3)}
    model = nd.ConvnetDist(case.layers(), backend=card.backend, **learning, **made)
    model.build(case.shape, case.batch, nd.ProcessGrid.serial())
    labels = np.random.default_rng(1).integers(0, case.classes, (case.batch, *model.output_shape[:-1]))
    tile, found = model.scatter(x), Found()
    found["ours"], found["our memory"] = _timed(lambda: model.train_batch(tile, labels), rounds, card)
    return found, model.state(), list(model.gradients()), labels


def _theirs(case: Any, x: np.ndarray, network: Any, precision: str, card: Card, compiles: bool, rounds: int) -> Found:
    """Return PyTorch's figures, channels-last, of the same network."""
    import torch

    from neondist.bench.torch_twin import TorchTwin

    state, trained, labels = network
    twin, found = TorchTwin(case.model(), state, trained, x, labels), Found()
    twin.module.to(card.torch_device)
    twin.x, twin.targets = twin.x.to(card.torch_device), twin.targets.to(card.torch_device)
    lower = torch.autocast(card.torch_device, torch.bfloat16, enabled=precision == "bfloat16")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=precision == "tf32"), lower:
            found["eager"], found["eager memory"] = _timed(twin.step, rounds, card)
            found["module"], _ = _timed(_distributed(twin), rounds, card)
            if compiles:
                found["compiled"] = twin.compile() or _timed(twin.step, rounds, card)[0]
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def _distributed(twin: Any) -> Any:
    """Return a training step of a twin's module, distributed over one rank."""
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


def _timed(step: Any, rounds: int, card: Card) -> tuple[float, float]:
    """Return the seconds of a step, after the first ones, and the bytes of the GPU that are taken for such steps.

    They are those that PyTorch's pool holds, which CuPy's are of: also what graphs keep for themselves.
    """
    import torch

    for _ in range(WARM):
        step()
    if card.torch_device != "cuda":
        return seconds_of(step, rounds), 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return seconds_of(step, rounds), float(torch.cuda.max_memory_reserved())


# The page.


def report(card: Card, networks: Any, seconds: float, precisions: Any = PRECISIONS) -> Iterator[str]:
    """Yield the lines of the tables, each as soon as it is measured, in about so many seconds."""
    begin = time.perf_counter()

    def left() -> float:
        return seconds - (time.perf_counter() - begin)

    yield from (f"Measured on {card.name}, neondist {nd.__version__}.", "")
    yield "| Ranks on one GPU | Largest relative difference to one rank, float64: layers | PyTorch module |"
    yield "| --- | --- | --- |"
    alone = {job: card.ranks(job, 1) for job in ("losses", "modules")}
    for ranks in RANKS[1:]:
        worst = [_difference(card.ranks(job, ranks), expected) for job, expected in alone.items()]
        yield f"| {ranks} | {worst[0]:.1e} | {worst[1]:.1e} |"
    taken = card.ranks("halos", 2)
    exchange, copy = taken["seconds"]
    what = f"{' × '.join(map(str, taken['shape']))} on 2 ranks, {int(taken['bytes']) / 1e6:.2f} MB each"
    yield from ("", f"A halo of {what}: {1e6 * exchange:.0f} µs, {exchange / copy:.1f} × a copy on the device.", "")
    yield "| Step | ms | ÷ eager | ÷ compiled | Memory ÷ eager | Module distributed ÷ eager |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for network in networks:
        for precision in precisions:
            name = f"| {network}, {precision} |"
            if left() < 0:
                yield f"{name} not run: no time left | | | | |"
            else:
                yield f"{name} {_row(card.measured(network, precision, left() > 60))} |"


def _row(found: Found) -> str:
    ours = found["ours"]
    if isinstance(ours, str):
        return f"not run: {ours} | | | |"
    compiled, memory = found.get("compiled"), found.get("eager memory")
    by_compiled = f"{ours / compiled:.2f}" if isinstance(compiled, float) else f"not run: {compiled or 'no time left'}"
    by_memory = f"{found['our memory'] / memory:.2f}" if memory else "not run"
    by_module = f"{found['module'] / found['eager']:.2f}"
    return f"{1e3 * ours:.2f} | {ours / found['eager']:.2f} | {by_compiled} | {by_memory} | {by_module}"


def _difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest difference, relative to the largest number of its array."""
    return max(float(np.abs(found[name] - one).max() / max(np.abs(one).max(), 1e-3)) for name, one in expected.items())


def write(path: Path, text: str) -> None:
    """Put a text between the markers of a page."""
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=480, help="begin no measurement later (default 480)")
    parser.add_argument("--networks", default=",".join(ORDER), help=f"default {','.join(ORDER)}")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        grid = nd.ProcessGrid()
        found = JOBS[given.job](grid, "cupy")
        if grid.rank == 0:
            np.savez(given.output, **found)
        return 0
    usable = next(one for one in nd.available() if one.name == "cupy")
    if not usable.usable:
        print(f"no report: {usable.reason}")
        return 0
    card, lines = Card(usable.reason, "cupy", "cuda", on_ranks, in_process), list[str]()
    if given.step:
        network, precision = given.step
        found = measured(NETWORKS[network], precision, card, given.compile)
        given.output.write_text(json.dumps(found), encoding="utf-8")
        return 0
    for line in report(card, given.networks.split(","), given.seconds):
        print(line, flush=True)
        lines.append(line)
        write(given.page, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
