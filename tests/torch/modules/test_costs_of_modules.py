"""Costs of module steps on all ranks at once against the plan of each rank and the output of `check`."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import share_captures  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist.geometry import Atom, DimRequest, GridShape, ViewTransfer  # noqa: E402
from neondist.plan import report  # noqa: E402
from neondist.torch.ir.layout import Mesh, local_atom_extents  # noqa: E402
from neondist.torch.lowering.costs import module_paths  # noqa: E402
from neondist.torch.lowering.traffic import RankSubset, ring_keys_sent_by_rank, traffic_of  # noqa: E402
from neondist.torch.rules import product  # noqa: E402

GRIDS = GridShape(1, 2, 3), GridShape(2, 3, 1), GridShape(1, 1, 1), GridShape(1, 1, 5)


def draw_request(rng, mesh, dim, axis, needing_axis):
    """Draw the ranges that the parts of an axis, or all ranks, need of a dimension cut by another axis, or by none."""
    extent = int(rng.integers(1, 12))
    source = Atom(extent)
    if axis is not None:
        bounds = np.sort(rng.integers(0, extent + 1, mesh.parts[axis] - 1)).tolist()
        source = Atom(extent, axis, (0, *bounds, extent))
    ranges = [
        tuple(tuple(np.sort(rng.integers(0, extent + 1, 2)).tolist()) for _ in range(rng.integers(0, 3)))
        for _ in range(1 if needing_axis is None else mesh.parts[needing_axis])
    ]
    return DimRequest(dim, source, needing_axis, tuple(ranges))


@pytest.mark.parametrize("seed", range(30))
def test_sends_match_receives(seed):
    rng, mesh = np.random.default_rng(seed), Mesh((2, 3, 4))
    axes = rng.permutation(3)[: rng.integers(1, 4)].tolist()
    odd = seed % 5 == 0  # one axis cuts the dimension, and the parts of another need ranges

    def draw_axes(axis):
        return (axis, (axis + 1) % 3) if odd else [(axis, axis), (axis, None), (None, axis)][rng.integers(3)]

    transfer = ViewTransfer(
        mesh.parts, tuple(draw_request(rng, mesh, dim, *draw_axes(axis)) for dim, axis in enumerate(axes))
    )
    assert transfer.is_separable is not odd
    expected = {rank: Counter() for rank in range(mesh.size)}
    for receiver in range(mesh.size):
        for piece in transfer.receives(receiver):
            if piece.peer != receiver:
                expected[piece.peer][replace(piece, peer=receiver)] += 1
    for rank in range(mesh.size):
        assert Counter(transfer.sends(rank)) == expected[rank]
        if transfer.is_separable:
            sent, received = (cells.item() for cells in RankSubset(mesh, [rank]).sent_and_received_cells(transfer))
            assert sent == sum(piece.source.size for piece in transfer.sends(rank))
            assert received == sum(piece.source.size for piece in transfer.receives(rank) if piece.peer != rank)
    assert transfer.needs_no_messages == (not any(expected.values()))


class Net(nn.Module):
    """Network with windows, norms, attention, a sum along one axis and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.GroupNorm(2, 6))
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y = self.frozen(self.second(self.first(x)))
        tokens = y.flatten(2).mT
        y = y + F.scaled_dot_product_attention(tokens, tokens, tokens).mT.reshape(y.shape)
        return self.last((y - y.mean(2, keepdim=True)).square().mean((2, 3)))


def make_plan(shape, build=Net, image=(17, 14, 2), **options):
    model = ndt.TorchModel(build, **options)
    with share_captures():
        return model.plan(image, shape, 4)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.long
def test_costs_sum_to_traffic(shape, recompute):
    plan = make_plan(shape, recompute=recompute)
    steps, costs, total = plan.steps, plan.costs(), plan.all_costs.total
    traffic = [steps.traffic(rank, plan.trained) for rank in range(shape.size)]
    sent = [sum(n for (kind, _, _), n in counts.items() if kind != "sum") for counts in traffic]
    assert total.total_sent_bytes == sum(cost.total_sent_bytes for cost in costs.values()) == sum(sent)
    assert total.max_sent_bytes == max(sent) <= sum(cost.max_sent_bytes for cost in costs.values())
    max_summed_bytes = [
        sum(n for (kind, name, _), n in counts.items() if kind == "sum" and name != "gradients") for counts in traffic
    ]
    assert total.max_summed_bytes == max(max_summed_bytes)
    max_summed_bytes = plan.all_costs.traffic["sum", "gradients", "backward"]
    assert max_summed_bytes.max() == max(counts.get(("sum", "gradients", "backward"), 0) for counts in traffic)
    forward = {(kind, name): n for (kind, name, direction), n in traffic[0].items() if direction == "forward"}
    assert all(kind in costs[plan.benchmark_row_of(name)].message_kinds for kind, name in forward)
    memory = steps.memory(plan.all_costs.max_memory_rank) + plan.parameters.memory(plan.all_costs.max_memory_rank)
    assert total.memory == sum(cost.memory for cost in costs.values()) == memory
    assert f"planned peak: {report.format_size(plan.max_training_memory)}, " in plan.describe()
    assert plan.memory(plan.all_costs.max_memory_rank) == max(plan.memory(rank) for rank in range(shape.size))
    assert total.parameters == sum(p.numel() for p in Net().parameters() if p.requires_grad)
    assert costs["frozen"].parameters == 0


@pytest.mark.parametrize("options", [{"scheme": "quantised"}, {}])
def test_traffic_of_single_ranks_matches_all(options):
    plan = make_plan(GridShape(2, 3, 2), **options).steps
    every = traffic_of(plan, range(12))
    for rank in (0, 5, 11):
        assert plan.traffic(rank) == {account: n[rank] for account, n in every.items() if n[rank]}


def test_flops_are_divided_among_ranks():
    def compute_flops(shape):
        return {name: cost.flops for name, cost in make_plan(shape, image=(16, 12, 2)).costs().items()}

    serial = compute_flops(GridShape())
    convolution = 2 * 4 * 16 * 12 * 4 * 2 * 9
    assert serial["first.0"] == 2 * convolution  # the gradient of the images is not needed
    assert serial["last"] == 3 * 2 * 4 * 6 * 3
    tiled = compute_flops(GridShape(1, 2, 3))  # of the largest tile
    assert tiled["first.0"] * 6 == serial["first.0"]
    assert tiled["second.0"] == 3 * 2 * 4 * (4 * 2) * 6 * 4 * 9
    assert compute_flops(GridShape(4, 1, 1))["last"] * 4 == serial["last"]


def test_ring_attention_recomputes_scores(monkeypatch):
    def count_products(shape):
        costs = make_plan(shape, image=(13, 11, 2)).all_costs
        kinds = {step.kind for step in costs.plan.steps if "attention" in step.name}
        return kinds, sum(costs.flops[id(step)] for step in costs.plan.steps if "attention" in step.name)

    monkeypatch.setattr(product, "MIN_RING_BYTES", 0)
    (serial_kinds, serial_flops), (ring_kinds, ring_flops) = (
        count_products(GridShape()),
        count_products(GridShape(1, 2, 1)),
    )
    assert (serial_kinds, ring_kinds >= {"ring"}) == ({"local"}, True)
    # each rank has 3 x 5 of 6 x 5 cells; the ring recomputes the scores in backward: seven products instead of six
    assert ring_flops * 6 == serial_flops / 2 * 7
    ring = next(step.kind_args for step in make_plan(GridShape(2, 2, 3)).steps.steps if step.kind == "ring")
    for direction in ("forward", "backward"):
        assert ring_keys_sent_by_rank(ring, direction).tolist() == [
            count_keys_sent(ring, rank, direction) for rank in range(12)
        ]


def count_keys_sent(ring, rank, direction):
    """Return the number of keys that a rank sends in a pass: all blocks but the next rank's; all twice in backward."""
    ranks = ring.ranks(rank)
    length = {peer: math.prod(local_atom_extents(ring.keys, ring.mesh.place(peer))) for peer in ranks}
    total, following = sum(length.values()), length[ranks[(ranks.index(rank) + 1) % len(ranks)]]
    return total - following if direction == "forward" else 2 * total - following


def test_table_totals():
    plan = make_plan(GridShape(1, 2, 3))
    lines, total = plan.describe().splitlines(), plan.all_costs.total
    assert lines[0] == "float32 on 6 ranks (1 replica, 2 rows, 3 cols), inputs 17×14×2, batches of 4"
    foot = next(line for line in lines if line.startswith("total"))
    sizes = [report.format_size(n) for n in (total.max_sent_bytes, total.total_sent_bytes, total.max_summed_bytes)]
    expected = [*sizes, report.format_count(total.flops), f"{total.parameters:,}", report.format_size(total.memory)]
    assert foot.split() == ["total", *" ".join(expected).split()]
    rows = {line.split()[0]: line for line in lines if line}
    assert "4×4×17×14" in rows["first.0"]
    assert "halo" in rows["first.0"]
    assert f"gradient reduction: {report.format_size(plan.parameters.reduction_bytes(0))} per rank and step" in lines


def test_plans_for_thousands_of_ranks():
    plan = make_plan(GridShape(1, 64, 64), lambda: nn.Sequential(*[nn.Conv2d(2, 2, 3, padding=1)] * 3), (640, 640, 2))
    total = plan.all_costs.total
    inner = 4 * 2 * (2 * (4 * 10 + 4)) * 4  # bytes: samples, channels, cells around a tile
    assert plan.all_costs.traffic["halo", "0:aten.conv2d.default", "forward"].max() * 2 == inner
    assert total.max_sent_bytes == 5 * inner // 2  # the images have no gradient
    assert plan.min_extent == 640


def test_nested_modules_are_grouped():
    names = ["a.b.c:op", "a.b.d:op", "a.e:op", "f:op", "aten.add.Tensor"]
    assert list(module_paths(names, 5).values()) == ["a.b.c", "a.b.d", "a.e", "f", "aten.add.Tensor"]
    assert list(module_paths(names, 4).values()) == ["a.b", "a.b", "a.e", "f", "aten.add.Tensor"]
    assert set(module_paths(names, 1).values()) == {"a", "f", "aten.add.Tensor"}
    assert module_paths([], 3) == {}


def test_optimizer_slots():
    slots = {"SGD": 0, "Adam": 2, "Adagrad": 1, "RMSprop": 1}
    assert {name: ndt.TorchOptimizer(name).slots_per_parameter for name in slots} == slots
    assert ndt.TorchOptimizer("SGD", {"lr": 0.1, "momentum": 0.9}).slots_per_parameter == 1


def test_uncounted_steps_are_named():
    plan = make_plan(GridShape(1, 1, 5))
    counted = plan.all_costs.total.flops

    def run(*tensors):
        raise RuntimeError("depends on values")

    plan = make_plan(GridShape(1, 1, 5))
    next(step for step in plan.steps.steps if step.kind == "local" and step.name[:5] == "last:").run = run
    assert "flops exclude last:aten.linear.default, which could not be counted" in plan.describe()
    assert 0 < plan.all_costs.total.flops < counted
