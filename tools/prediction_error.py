"""Errors of predicted step times of ten networks on this machine: five built from neondist layers, five in PyTorch.

    neondist bench model calibrate
    python tools/prediction_error.py --machine machine.yaml

A prediction times the work of one rank alone; the measurement is a step of all ranks. Predictions and measurements
alternate, and medians are compared, so that changes in the speed of the machine do not count as errors of the model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn
from torch.nn import functional

from neondist.bench.model.calibrate import VALIDATION_NETWORKS
from neondist.bench.model.predict import fastest_grid, predict_step
from neondist.bench.model.rank_profile import prepare_busiest_rank_step, profile_busiest_rank, time_step
from neondist.bench.networks import NETWORKS
from neondist.bench.sleeping_barrier import sleeping_barrier
from neondist.bench.step import load_own_batch
from neondist.comm import ProcessGrid, Transport
from neondist.comm.mpi import world_transport
from neondist.config import load_experiment
from neondist.data import Synthetic
from neondist.system.machine import Machine, read_machine
from neondist.torch import TorchModel
from neondist.train import FitExperiment

RANKS = 1, 2, 4
TURN_SECONDS = 0.3
YAML = Path(__file__).parents[1] / "yaml"


class Norms(nn.Sequential):
    """Three convolutions with batch normalisation, and a classifier."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inner, outer in ((3, 16), (16, 32), (32, 32)):
            layers += nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Block(nn.Module):
    """Block of a ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(channels, channels, 7, padding=3, groups=channels), nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus a function of it, (N, C, H, W)."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.narrow(functional.gelu(self.wide(y))).permute(0, 3, 1, 2)


class UNet(nn.Module):
    """U-Net of five blocks, whose scores are averaged over the image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(inner: int, outer: int) -> nn.Sequential:
            first, second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
            return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

        self.down = nn.ModuleList([block(3, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 4 * width)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in (2 * width, width))
        self.up = nn.ModuleList(block(2 * n, n) for n in (2 * width, width))
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores (N, 10)."""
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], 1))
        return self.head(x).mean((2, 3))


def convnext() -> nn.Module:
    """Return a small ConvNeXt."""
    first = nn.Conv2d(3, 48, 4, stride=4), Block(48), Block(48), nn.GroupNorm(1, 48), nn.Conv2d(48, 96, 2, stride=2)
    return _classifier([*first, Block(96), Block(96)], 96)


class Residual(nn.Module):
    """Block of a ResNet-18, or, with `inner` channels of a depthwise convolution, of a MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, inner: int = 0) -> None:
        super().__init__()
        wide = inner or outputs
        convs = [nn.Conv2d(inputs, wide, 1)] if inner else []
        convs.append(nn.Conv2d(wide if inner else inputs, wide, 3, stride, 1, groups=inner or 1, bias=False))
        convs.append(nn.Conv2d(wide, outputs, 1, bias=False) if inner else nn.Conv2d(wide, outputs, 3, padding=1))
        layers = [layer for conv in convs for layer in (conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU())]
        self.body, same = nn.Sequential(*layers[:-1]), inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a function of x plus x, (N, C, H, W)."""
        return functional.relu(self.body(x) + self.skip(x))


def _classifier(first: Sequence[nn.Module], channels: int) -> nn.Module:
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def mobilenet() -> nn.Module:
    """Return a network of depthwise convolutions."""
    widths = [(16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1)]
    return _classifier([nn.Conv2d(3, 16, 3, 2, 1), *(Residual(n, m, s, 4 * n) for n, m, s in widths)], 80)


def resnet() -> nn.Module:
    """Return a network with the convolutions of ResNet-18."""
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = (block for n, m, s in widths for block in (Residual(n, m, s), Residual(m, m)))
    return _classifier([nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks], 512)


def _module(factory: Callable[[], nn.Module], extent: int, batch: int) -> Callable[[], FitExperiment]:
    data = lambda: Synthetic((extent, extent, 3), classes=10, train=10, test=1)  # noqa: E731
    return lambda: FitExperiment(data(), TorchModel(factory), batch_size=batch, epochs=1)


EXPERIMENTS: dict[str, Callable[[], FitExperiment]] = {
    "digits": lambda: load_experiment(YAML / "mnist_distarray_convnet.yaml"),
    "image": lambda: load_experiment(YAML / "bench_2048.yaml"),
    **{name: NETWORKS[name].experiment for name in ("wide", "dilated", "deep")},
    "norms": _module(Norms, 256, 2),
    "convnext": _module(convnext, 256, 1),
    "mobilenet": _module(mobilenet, 320, 2),
    "resnet18": _module(resnet, 256, 1),
    "unet": _module(UNet, 256, 2),
}
assert EXPERIMENTS.keys().isdisjoint(VALIDATION_NETWORKS)  # not those on which `calibrate` was checked


def create_step(experiment: FitExperiment, grid: ProcessGrid) -> Callable[[], None]:
    """Return a training step of all ranks. Collective."""
    model, shape, batch_size = experiment.model, experiment.dataset.sample_shape, experiment.batch_size
    plan = model.fit_plan_to_memory(model.plan(shape, grid.shape, batch_size))
    images, labels = load_own_batch(experiment, grid, plan)
    model.build(shape, batch_size, grid, plan)
    model.restrict_cost_to_local_cells(experiment.dataset.fields)
    return lambda: model.train_batch(images, labels, batch_size=batch_size)


def predict_and_measure(
    world: Transport, experiment: Callable[[], FitExperiment], machine: Machine, turns: int
) -> tuple[float, float]:
    """Return the predicted and the measured seconds of a step of all ranks. Collective."""
    shape = fastest_grid(world.size, experiment, machine) if world.rank == 0 else None
    shape = world.bcast(shape)
    if world.rank == 0:
        profile, (alone, *_) = profile_busiest_rank(experiment(), shape), prepare_busiest_rank_step(experiment(), shape)
    sleeping_barrier(world)
    predicted, measured = [], []
    with ProcessGrid(world, **asdict(shape)) as grid:
        step = create_step(experiment(), grid)
        step()
        begin = time.perf_counter()
        step()
        count = max(1, round(TURN_SECONDS / max(world.allgather(time.perf_counter() - begin))))
        for _ in range(1 + turns):
            sleeping_barrier(world)
            if world.rank == 0:
                profile = replace(profile, seconds=time_step(alone, TURN_SECONDS))
                predicted.append(predict_step(shape, machine, profile)["seconds_per_step"])
            sleeping_barrier(world)
            begin = time.perf_counter()
            for _ in range(count):
                step()
            measured.append(max(world.allgather(time.perf_counter() - begin)) / count)
    return median(predicted[1:] or [0.0]), median(measured[1:])  # without the first round


def run_ranks(ranks: int, arguments: Sequence[str]) -> tuple[float, float]:
    """Run this script on `ranks` ranks and return the times that rank 0 prints."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else "mpirun"
    command = [mpirun, "--oversubscribe", "-n", str(ranks), sys.executable, __file__, "--on-ranks", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    predicted, measured = map(float, done.stdout.split())
    return predicted, measured


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--machine", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_ranks:
        world, (name,) = world_transport(), arguments.names
        figures = predict_and_measure(world, EXPERIMENTS[name], read_machine(arguments.machine), arguments.turns)
        if world.rank == 0:
            print(*figures)
        return
    print("| network | ranks | predicted | measured | error |\n|" + " --- |" * 5, flush=True)
    means = []
    for name in arguments.names or EXPERIMENTS:
        errors = []
        for ranks in RANKS:
            options = [name, "--machine", str(arguments.machine), "--turns", str(arguments.turns)]
            predicted, measured = run_ranks(ranks, options)
            errors.append(predicted / measured - 1)
            cells = f"{predicted * 1e3:.1f} ms | {measured * 1e3:.1f} ms | {errors[-1]:+.1%}"
            print(f"| {name} | {ranks} | {cells} |", flush=True)
        means.append(mean(map(abs, errors)))
    print(f"mean error of each network: {', '.join(f'{one:.1%}' for one in means)}; of all: {mean(means):.1%}")


if __name__ == "__main__":
    main()
