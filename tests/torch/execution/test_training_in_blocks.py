"""Training in blocks up to the first global operator against training on whole images."""

import copy
import os
import random
import re
from collections import OrderedDict
from itertools import combinations
from math import prod
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from test_blocks_of_modules import Globe, make_experiment  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_module, find_least_memory, share_captures  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.errors import UserError  # noqa: E402
from neondist.torch.execution.trunk import create_trunk_lowering  # noqa: E402

SEED = int(os.environ["NEONDIST_SEED"])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, 2, 1)
        self.inner, self.up = nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ConvTranspose2d(8, 6, 2, 2)
        self.last = nn.Conv2d(12, 4, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        x = F.relu_(self.first(x))
        y = F.gelu(self.inner(F.silu(self.down(x))))
        y = self.up(y)[:, :, : x.shape[2], : x.shape[3]]
        return self.last(torch.cat([x, y], 1))


class FrozenBatchNorm(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class Classifier(nn.Module):
    """Trunk and head with shared weights and dropout, and two extents between them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), FrozenBatchNorm(6)
        self.deep, self.last = nn.Conv2d(6, 6, 3, 2), nn.Linear(12, 4)
        self.norm.running_var += 0.5
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        first, second = self.norm(self.first(x)).chunk(2, 1)
        x = F.dropout2d(F.dropout(F.relu(torch.cat([second, first], 1)), 0.2, self.training), 0.2, self.training)
        y = F.relu_(self.deep(x))
        z = torch.cat([F.conv2d(x[:, :3], self.first.weight).mean((2, 3)), y.amax((2, 3))], 1)
        return self.last(F.dropout(z, 0.3, self.training))


class LiveNorms(nn.Module):
    """Norms with statistics of their inputs, one of them shared; the memory limit decides which belong to the head."""

    def __init__(self):
        super().__init__()
        self.first, self.plain, self.twice = nn.GroupNorm(1, 3), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4)
        self.groups, self.last = nn.GroupNorm(2, 4), nn.BatchNorm2d(4, track_running_stats=False)
        self.net, self.instance = UNet(), nn.InstanceNorm2d(4)

    def forward(self, x):
        x = self.groups(self.plain(self.net(self.first(x))))
        return self.last(F.relu(self.instance(self.twice(self.twice(x) * 2))))


class Conditioned(nn.Module):
    """Images of two extents, and a vector per sample."""

    def __init__(self):
        super().__init__()
        self.net, self.embedding, self.coarse = UNet(), nn.Linear(5, 3), nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x, coarse, vector):
        y = F.interpolate(self.coarse(coarse), size=x.shape[2:], mode="bilinear")
        return self.net(x * self.embedding(vector)[:, :, None, None] + y)


def train(module, shapes, target, ranks=1, replicas=1, **options):
    """Return the state after three steps, and the number of blocks on the first rank."""
    shapes = shapes if isinstance(shapes, list) else [shapes]
    generator = torch.Generator().manual_seed(1)
    inputs = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(3)]
    targets = [torch.randint(0, 4, target, generator=generator) for _ in range(3)]

    def body(world):
        with ProcessGrid(world, replicas=replicas) as grid:
            model = ndt.distribute(copy.deepcopy(module), shapes, grid, **options)
            blocks = [step.blocks for step in model.plan.steps if step.name == "blocks" and step.blocks]
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            torch.manual_seed(4)
            for tensors, y in zip(inputs, targets, strict=True):
                optimizer.zero_grad()
                tiles = [model.scatter(x, index) for index, x in enumerate(tensors)]
                model.loss(F.cross_entropy, model(*tiles), model.scatter_target(y)).backward()
                optimizer.step()
            assert not hasattr(model, "unused") or model.unused.grad is None
            return model.state_dict(), np.prod(blocks[-1].block_counts if blocks else ())

    return loopback.run(ranks, body)[0]


def build_local_network(activation=nn.ReLU):
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), activation(), nn.Conv2d(8, 3, 3, padding=1))


def build_column_softmax():
    return build_local_network(lambda: nn.Softmax(2))


@pytest.mark.long
def test_blocks_in_experiments(tmp_path, monkeypatch):
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)

    def train_on_two_ranks(memory, build=build_local_network):
        def body(world):
            experiment = make_experiment(build, memory)
            experiment.run(ProcessGrid(world), hooks=[])
            return experiment.model

        return loopback.run(2, body)[0]

    with share_captures():
        whole, blocked = train_on_two_ranks(None), train_on_two_ranks("50kB")
        assert "blocks per rank (samples x space)" in blocked.compiled.describe()
        for a, b in zip(whole.module.parameters(), blocked.module.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    message = r"aten\.softmax\.int in module '1' cannot .*compares the whole image; it and .* needs .* only 40"
    with pytest.raises(UserError, match=message):
        make_experiment(build_column_softmax, memory="40kB").validate()


CASES = {
    "unet": (UNet, (2, 3, 37, 46), (2, 37, 46), (540, 420, 350)),
    "classifier": (Classifier, (2, 3, 37, 29), (2,), (300, 140, 140)),
    "norms": (LiveNorms, (2, 3, 37, 46), (2, 37, 46), (750, 500, 350)),
    "conditioned": (Conditioned, [(2, 3, 37, 46), (2, 2, 19, 23), (2, 5)], (2, 37, 46), (600, 440, 350)),
}
"""Module, shapes of the inputs and of the target, and kilobytes per rank on 1, 3 and 2 x 2 ranks."""


@pytest.mark.parametrize(
    ("build", "shape", "target", "memory"),
    # tiles of 4 ranks of the last one are too small for blocks
    [*CASES.values(), (lambda: Globe(3, 4), (2, 3, 37, 46), (2, 19, 23), (210, 150))],
)
@pytest.mark.long
def test_training_steps_match_whole_images(build, shape, target, memory, monkeypatch):
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)
    torch.manual_seed(0)
    module = build().double().train()
    with share_captures():
        expected, _ = train(module, shape, target)
        for ranks, replicas, kilobytes in zip((1, 3, 4), (1, 1, 2), memory, strict=False):
            state, parts = train(module, shape, target, ranks, replicas, memory=f"{ranks * kilobytes} kB")
            assert parts > 1, ranks
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=f"{ranks} ranks: {name}")


OPTIONS = {
    "memory": None,
    "strips": [3, 5, "auto"],
    "recompute": [True],
    "compile": [lambda run: run],
    "scheme": ["deep_halo(layers=3)", "auto", "tower", "stale(steps=2)"],
}


@pytest.mark.parametrize(
    "names", [names for count in range(2, 6) for names in combinations(OPTIONS, count)], ids="-".join
)
@pytest.mark.long
def test_options_compose(names, monkeypatch):
    """Every set of options, on a random module and grid, against the scheme's results without the other options."""
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)
    rng = random.Random(f"{SEED} {names}")
    build, shape, target, memory = CASES[rng.choice(list(CASES))]
    (ranks, replicas), kilobytes = rng.choice([*zip([(1, 1), (3, 1), (4, 2)], memory, strict=True)])
    options = {name: rng.choice(OPTIONS[name]) for name in names if name != "memory"}
    torch.manual_seed(0)
    module = build().double().train()
    if options.get("scheme") in ("tower", "stale(steps=2)"):  # only the last window, which no blocks can include
        windows = [path for path, part in module.named_modules() if isinstance(part, nn.Conv2d) and "last" in path]
        options["scheme"] = {"": "halo", windows[0]: options["scheme"]} if windows else "halo"
        kilobytes *= 1.5
    with share_captures():
        expected, _ = train(module, shape, target, ranks, replicas, scheme=options.get("scheme", "halo"))
        limit = {"memory": f"{ranks * kilobytes:.0f} kB"} if "memory" in names else {}
        state, _ = train(module, shape, target, ranks, replicas, **options, **limit)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=f"{options}, {ranks} ranks: {name}")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            "overlap_tile",
            "memory: a pass needs .* scheme 'overlap_tile' cannot be computed block by block; use 'deep_halo'",
        ),
        ("tower", "aten.conv2d.* in module 'first' cannot be computed block by block: its border scheme is not exact"),
    ],
)
def test_schemes_without_blocks(scheme, message, monkeypatch):
    """Passes that fit as a whole are accepted."""
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)
    module, shape = nn.Sequential(OrderedDict(first=nn.Conv2d(2, 3, 3, padding=1), last=nn.ReLU())), (1, 2, 24, 24)

    def body(world):
        with ProcessGrid(world) as grid:
            ndt.distribute(copy.deepcopy(module), shape, grid, scheme=scheme, memory="1MB")
            with pytest.raises(UserError, match=message):
                ndt.distribute(copy.deepcopy(module), shape, grid, scheme=scheme, memory="20kB")

    loopback.run(2, body)


def test_planned_traffic_of_sweeps():
    """Statistics have gradients, the running statistics that are computed from them have none."""
    check_module(nn.Sequential(nn.BatchNorm2d(3), nn.ZeroPad2d(1)), (2, 3, 8, 8), grids=[(1, 2, 1)], memory="least")


def split_by_sign(x, norm, conv):
    sign = F.interpolate(torch.cat([x > 0, x < 1], 1).double(), scale_factor=4)
    return F.avg_pool2d(sign, 3), F.avg_pool2d(norm(sign), 4), x * 2, conv(x)


def test_values_without_gradients():
    """An output has a gradient if it depends on a tensor with a gradient, also through the statistics of a norm."""
    module = FunctionModule(split_by_sign, nn.BatchNorm2d(6, affine=False), nn.Conv2d(3, 2, 3)).double()
    check_module(module, (2, 3, 6, 6), grids=[(1, 1, 1), (1, 2, 1)], memory="least")

    def body(world):
        with ProcessGrid(world) as ranks:
            own, shape = copy.deepcopy(module), (2, 3, 6, 6)
            memory = find_least_memory(own, shape, ranks, dtype=torch.float64)
            model = ndt.distribute(own, shape, ranks, dtype=torch.float64, memory=memory)
            return [y.requires_grad for y in model(model.scatter(torch.randn(shape).double()))]

    with mock.patch("neondist.system.memory.process_overhead_bytes", return_value=0):
        assert loopback.run(2, body) == [[False, False, False, True]] * 2


@pytest.mark.long
def test_suggested_memory_needs_few_blocks():
    """The least memory would need thousands of blocks."""
    module = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    args, lowerings = (module, (1, 1, 512, 512), ProcessGrid.serial()), []

    def create(*args):
        lowerings.append(create_trunk_lowering(*args))
        return lowerings[-1]

    def describe(memory):
        ndt.distribute(*args, memory=memory)
        return lowerings[-1].group_description

    with (
        mock.patch("neondist.torch.execution.options.create_trunk_lowering", create),
        mock.patch("neondist.system.memory.process_overhead_bytes", return_value=0),
        mock.patch("neondist.torch.execution.trunk.format_limit_for", lambda needed, ranks: f"{needed} B"),
    ):
        with pytest.raises(UserError) as error:
            describe("1 B")
        few = describe(re.search("give memory: (.* B) or more", str(error.value))[1])
        many = describe(find_least_memory(*args))
    assert "memory: 1 x 16 x 16 blocks per rank (samples x space)" in few
    assert "slow" not in few
    assert "so many that a step may be slow; fewer blocks suffice with more memory or more ranks" in many
    assert prod(lowerings[-1].block_counts) > 1000


@pytest.mark.long
def test_many_blocks_of_a_module_in_16_bits():
    """Add the gradients of blocks in float32: the sum of 1,000 blocks in bfloat16 would be half of the gradient."""
    torch.manual_seed(1)
    module, shape = (
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1)),
        (1, 1, 512, 8),
    )
    exact = copy.deepcopy(module).double()
    exact(torch.ones(shape).double()).sum().backward()

    def body(world):
        with ProcessGrid(world) as ranks:
            own = copy.deepcopy(module).bfloat16()
            args = own, shape, ranks
            memory = find_least_memory(*args, dtype=torch.bfloat16)
            model = ndt.distribute(*args, dtype=torch.bfloat16, memory=memory)
            model(model.scatter(torch.ones(shape).bfloat16())).sum().backward()
            return [parameter.grad for parameter in own.parameters()]

    with mock.patch("neondist.system.memory.process_overhead_bytes", return_value=0):
        for gradients in loopback.run(2, body):
            for actual, parameter in zip(gradients, exact.parameters(), strict=True):
                assert (actual - parameter.grad).norm() < 0.02 * parameter.grad.norm()
