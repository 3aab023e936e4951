"""The cells traced from declared reaches equal those that views read, for every block and rank."""

import importlib
import os
import random
from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

import random_modules  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from module_steps import STEPS  # noqa: E402
from test_blocks_of_modules import LOCAL_STEPS, Globe, Net  # noqa: E402
from torch import nn  # noqa: E402
from zoo import ZOO  # noqa: E402

from neondist.errors import UserError  # noqa: E402
from neondist.halo import as_scheme  # noqa: E402
from neondist.torch.execution.image_blocks import TracedImageModule  # noqa: E402
from neondist.torch.execution.program_lowering import even_layout, ranges_at  # noqa: E402
from neondist.torch.execution.recomputed_blocks import extend_empty_ranges  # noqa: E402
from neondist.torch.execution.segments import SegmentSearch  # noqa: E402
from neondist.torch.execution.trunk import Trunk  # noqa: E402
from neondist.torch.ir.layout import Mesh  # noqa: E402
from neondist.torch.ir.range_tracing import extend_symbol_range  # noqa: E402

CAPTURE = importlib.import_module("neondist.torch.capture.capture")
SEED = int(os.environ["NEONDIST_SEED"])


def collect_read_ranges(traced, ranges):
    """Return the range of each symbol that the outputs and views of a block read, with every range re-evaluated."""
    needed, before = {}, None
    for output, box in zip(traced.outputs, ranges, strict=True):
        for (atom,), indices in zip(output.layout, box, strict=True):
            extend_symbol_range(needed, atom, *indices)
    while before != needed:
        before = dict(needed)
        for first, _, reach, source in reversed(traced.dependences):
            whole = reach.out_partition.origin[0] < first  # the symbol of another argument
            for indices in reach.view(
                *((0, reach.out_partition.extent) if whole else reach.out_partition.range(needed)), source.extent
            )[0]:
                extend_symbol_range(needed, source, *indices)
    return needed


def trace_parts(module, shape, dtype=torch.float64):
    """Return the parts of a module that can be computed in blocks: the output, a trunk with its sweeps, segments."""
    parts, mesh = [], Mesh((1, *[2] * (len(shape) - 2)))
    for training in (False, True):
        program = CAPTURE.capture_module(module.train(training), [(shape, dtype)])
        with suppress(UserError):  # it depends on the whole image
            parts += [TracedImageModule(program, shape, (), "")] if shape[0] == 1 else []
        with suppress(UserError):
            whole = Mesh((1,) * (len(shape) - 1))
            trunk = Trunk.find(SegmentSearch(program, whole, [whole.image_layout(shape)], (), {}, None), 3)
            parts += trunk.subgraphs if trunk.outputs else []
        with suppress(UserError):
            search = SegmentSearch(
                program, mesh, [mesh.image_layout(shape)], (), {"": as_scheme("deep_halo(layers=3)")}, None
            )
            parts += [segment.traced for segment in search.find_segments()]
    return parts


def check_symbol_ranges(traced, rng, grids=2):
    """Compare `symbol_ranges` with `collect_read_ranges` on random grids; return the number of merged dependences."""
    merged = sum(
        each.source_atom.origin[1] > 1 or each.reach.out_partition.origin[1] > 1 for each in traced.dependences
    )
    for _ in range(grids):
        mesh = Mesh((rng.randint(1, 2), *(rng.randint(1, 4) for _ in range(traced.spatial_ndim))))
        layouts = [even_layout(output, mesh) for output in traced.outputs]
        for rank in range(mesh.size):
            own = ranges_at(layouts, dict(enumerate(mesh.place(rank))))
            block = extend_empty_ranges(own, own)
            assert traced.symbol_ranges(block) == collect_read_ranges(traced, block)
    return merged


def test_random_modules(monkeypatch):
    monkeypatch.setattr(random_modules, "STEPS", {name: STEPS[name] for name in LOCAL_STEPS.split()})
    compared = 0
    for number in range(60 if os.environ.get("NEONDIST_CASES") == "all" else 8):
        rng = random.Random(f"{SEED} {number}")
        case = random_modules._draw(rng, f"{SEED} {number}")
        if len(case.shapes) == 1:
            with suppress(UserError):
                parts = trace_parts(case.module(), case.shapes[0])
                compared += len(parts)
                for traced in parts:
                    check_symbol_ranges(traced, rng)
    assert compared >= 4


class ShiftedWindows(nn.Module):
    """Shifted windows of 4 x 4 cells, each mixed inside, as in Swin transformers; atoms of merged dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(16, 16), nn.Conv2d(4, 2, 3, 2, 1)

    def forward(self, x):
        x = self.first(x)
        n, c, h, w = x.shape
        y = x.roll((-2, -2), (2, 3)).reshape(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5)
        y = self.mix(y.reshape(n * (h // 4) * (w // 4), c, 16)).reshape(n, h // 4, w // 4, c, 4, 4)
        y = y.permute(0, 3, 1, 4, 2, 5).reshape(n, c, h, w).roll((2, 2), (2, 3))
        return self.last(x + y)


class LossModule(nn.Module):
    """Losses in the partition of one of two arguments."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(1, 3, 5, padding=2)

    def forward(self, x):
        losses = F.cross_entropy(self.first(x), self.second(x).argmax(1), reduction="none")
        return F.max_pool2d(losses[:, None], 3, 1, 1)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Net(1), (1, 1, 97)),
        (Net(), (1, 1, 61, 50)),
        (Globe(), (1, 1, 21, 26)),
        (ShiftedWindows(), (1, 1, 24, 32)),
        (LossModule(), (1, 1, 13, 9)),
    ],
    ids=["net-1d", "net-2d", "globe", "windows", "losses"],
)
def test_modules(module, shape):
    parts = trace_parts(module.double(), shape)
    assert any(isinstance(part, TracedImageModule) for part in parts)
    merged = sum(check_symbol_ranges(part, random.Random(SEED), 3) for part in parts)
    assert bool(merged) == isinstance(module, ShiftedWindows)


@pytest.mark.parametrize("name", ["smp.Unet", "torchvision.resnet18", "torchvision.swin"])
@pytest.mark.long
def test_public_models(name):
    entry = next(entry for entry in ZOO if entry.name == name)
    parts = trace_parts(entry.make(), entry.example_shape, torch.float32)
    assert any(len(part.steps) > 10 for part in parts)
    merged = sum(check_symbol_ranges(part, random.Random(SEED), 1) for part in parts)
    assert bool(merged) == (name == "torchvision.swin")
