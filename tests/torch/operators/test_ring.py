"""Ring attention over cells: single-process results, messages and memory."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from case_selection import select_grids  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_module, share_captures  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.torch.exchange import ring  # noqa: E402
from neondist.torch.rules import product  # noqa: E402

CELLS = 13 * 11


class Attention(nn.Module):
    """Two attention heads; PyTorch has no fused kernel for values with a different number of channels than keys."""

    def __init__(self, values=6, **options):
        super().__init__()
        self.first, self.parts, self.options = nn.Conv2d(3, 8 + values, 1), [4, 4, values], options

    def forward(self, x):
        q, k, v = (t.flatten(2).unflatten(1, (2, -1)).mT for t in self.first(x).split(self.parts, 1))
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def attend_across(image):
    """Cross-attention to the cells of a larger image that is tiled in the same way, in three dimensions."""
    q, larger = image.flatten(2).mT, image.repeat_interleave(2, 3).flatten(2).mT
    return F.scaled_dot_product_attention(q, larger, larger * 2)


def make_mask(dtype):
    scores = torch.randn(CELLS, CELLS, generator=torch.Generator().manual_seed(1))
    mask = scores > 0
    mask[5] = False  # a query without keys
    return mask if dtype == torch.bool else scores.to(dtype)


MODULES = {
    "fused": lambda: Attention(4, scale=0.3),
    "plain": lambda: Attention(),
    "causal": lambda: Attention(is_causal=True),
    "scale": lambda: Attention(scale=0.3),
    "boolean mask": lambda: Attention(attn_mask=make_mask(torch.bool)),
    "float mask": lambda: Attention(attn_mask=make_mask(torch.float64)),
    "key mask": lambda: Attention(attn_mask=make_mask(torch.bool)[None, None, :1]),
    "other cells": lambda: FunctionModule(attend_across),
}


@pytest.fixture(autouse=True)
def ring_always(monkeypatch):
    monkeypatch.setattr(product, "MIN_RING_BYTES", 0)
    monkeypatch.setattr(ring, "MAX_SCORES_AT_ONCE", 0)


def make_plans(grid, module, shape=(2, 3, 13, 11)):
    """Return the step kinds, the memory and the plan's table of each rank."""

    def body(world):
        with ProcessGrid(world, replicas=grid[0], rows=grid[1], cols=grid[2]) as ranks:
            plan = ndt.distribute(copy.deepcopy(module).double(), shape, ranks, dtype=torch.float64).plan
            return {step.kind for step in plan.steps}, plan.memory(ranks.rank), plan.describe()

    with share_captures():
        return loopback.run(grid[0] * grid[1] * grid[2], body)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.long
def test_ring_matches_single_process(name):
    check_module(MODULES[name](), (2, 3, 13, 11), grids=select_grids(((1, 2, 1), (1, 1, 3), (2, 2, 1), (1, 2, 2))))
    assert all("ring" in kinds for kinds, _, _ in make_plans((1, 3, 1), MODULES[name]()))


@pytest.mark.parametrize("attention", [Attention(4), Attention(is_causal=True)])
def test_ranks_without_cells_and_recomputed_segments(attention):
    module = nn.Sequential(nn.AvgPool2d(3, 4), attention, nn.Tanh())
    check_module(module, (1, 3, 11, 8), grids=((1, 4, 1), (1, 4, 2)), recompute=True)


def test_large_keys_and_values_use_the_ring(monkeypatch):
    shape, size = (1, 3, 64, 64), 64 * 64 * 10 * 8  # of keys and values
    monkeypatch.setattr(product, "MIN_RING_BYTES", size)
    ring_plans = make_plans((1, 2, 2), Attention(), shape)
    monkeypatch.setattr(product, "MIN_RING_BYTES", size + 1)
    gathered_plans = make_plans((1, 2, 2), Attention(), shape)
    for (kinds, memory, table), (gathered_kinds, gathered_memory, _) in zip(ring_plans, gathered_plans, strict=True):
        assert "ring" in kinds - gathered_kinds
        assert "ring" in table.split()
        assert gathered_memory - memory >= size


@pytest.mark.parametrize("case", [0, 1])
def test_unsupported_attention_is_gathered(case):
    """Masks with gradients, and queries that are partitioned differently from keys."""
    bias = nn.Parameter(torch.randn(CELLS))
    module = (
        Attention(),
        FunctionModule(lambda x: F.scaled_dot_product_attention(*(t(x) for t in (pool_tokens, to_tokens, to_tokens)))),
    )
    if case == 0:
        module[0].options["attn_mask"] = module[0].bias = bias
    check_module(module[case], (1, 3, 13, 11), grids=((1, 2, 1), (1, 1, 3)))
    assert all("ring" not in kinds for kinds, _, _ in make_plans((1, 2, 1), module[case]))


def to_tokens(x):
    return x.flatten(2).mT


def pool_tokens(x):
    return x.mean((2, 3))[:, None]
