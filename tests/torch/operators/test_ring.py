"""Attention over cells by a ring: the numbers of one process, and what it sends and keeps."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import Function, captured_once, check, in_turn  # noqa: E402

import neondist.torch as ndt  # noqa: E402
from neondist import ProcessGrid  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.torch.exchange import ring  # noqa: E402
from neondist.torch.rules import product  # noqa: E402

CELLS = 13 * 11


class Attention(nn.Module):
    """Two heads; where values have other channels than keys, no fused kernel of PyTorch's computes them."""

    def __init__(self, values=6, **more):
        super().__init__()
        self.first, self.parts, self.more = nn.Conv2d(3, 8 + values, 1), [4, 4, values], more

    def forward(self, x):
        q, k, v = (t.flatten(2).unflatten(1, (2, -1)).mT for t in self.first(x).split(self.parts, 1))
        return F.scaled_dot_product_attention(q, k, v, **self.more)


def between(image):
    """Cells of another image, cut alike, are asked: more of them, and three dimensions."""
    q, other = image.flatten(2).mT, image.repeat_interleave(2, 3).flatten(2).mT
    return F.scaled_dot_product_attention(q, other, other * 2)


def mask_of(dtype):
    drawn = torch.randn(CELLS, CELLS, generator=torch.Generator().manual_seed(1))
    seen = drawn > 0
    seen[5] = False  # a query that sees nothing
    return seen if dtype == torch.bool else drawn.to(dtype)


MODULES = {
    "fused": lambda: Attention(4, scale=0.3),
    "plain": lambda: Attention(),
    "causal": lambda: Attention(is_causal=True),
    "scale": lambda: Attention(scale=0.3),
    "boolean mask": lambda: Attention(attn_mask=mask_of(torch.bool)),
    "mask of numbers": lambda: Attention(attn_mask=mask_of(torch.float64)),
    "mask of keys": lambda: Attention(attn_mask=mask_of(torch.bool)[None, None, :1]),
    "other cells": lambda: Function(between),
}


@pytest.fixture(autouse=True)
def all_by_ring(monkeypatch):
    monkeypatch.setattr(product, "RING_BYTES", 0)
    monkeypatch.setattr(ring, "SCORES", 0)


def kinds(grid, module, shape=(2, 3, 13, 11)):
    """Return the kinds of steps, the memory of each rank and the table."""

    def body(world):
        with ProcessGrid(world, replicas=grid[0], rows=grid[1], cols=grid[2]) as ranks:
            plan = ndt.distribute(copy.deepcopy(module).double(), shape, ranks, dtype=torch.float64).plan
            return {step.kind for step in plan.steps}, plan.memory(ranks.rank), plan.describe()

    with captured_once():
        return loopback.run(grid[0] * grid[1] * grid[2], body)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.long
def test_a_ring_gives_the_numbers_of_one_process(name):
    check(MODULES[name](), (2, 3, 13, 11), grids=in_turn(((1, 2, 1), (1, 1, 3), (2, 2, 1), (1, 2, 2))))
    assert all("ring" in found[0] for found in kinds((1, 3, 1), MODULES[name]()))


@pytest.mark.parametrize("attention", [Attention(4), Attention(is_causal=True)])
def test_ranks_without_cells_and_segments_that_run_again(attention):
    module = nn.Sequential(nn.AvgPool2d(3, 4), attention, nn.Tanh())
    check(module, (1, 3, 11, 8), grids=((1, 4, 1), (1, 4, 2)), recompute=True)


def test_large_keys_and_values_go_around_and_no_rank_has_all(monkeypatch):
    shape, size = (1, 3, 64, 64), 64 * 64 * 10 * 8  # of keys and values
    monkeypatch.setattr(product, "RING_BYTES", size)
    around = kinds((1, 2, 2), Attention(), shape)
    monkeypatch.setattr(product, "RING_BYTES", size + 1)
    gathered = kinds((1, 2, 2), Attention(), shape)
    for one, other in zip(around, gathered, strict=True):
        assert "ring" in one[0] - other[0]
        assert "ring" in one[2].split()
        assert other[1] - one[1] >= size


@pytest.mark.parametrize("which", [0, 1])
def test_what_cannot_go_around_is_gathered(which):
    """Masks with gradients, and queries that are cut otherwise than keys."""
    bias = nn.Parameter(torch.randn(CELLS))
    module = (Attention(), Function(lambda x: F.scaled_dot_product_attention(*(t(x) for t in (pooled, cells, cells)))))
    if which == 0:
        module[0].more["attn_mask"] = module[0].bias = bias
    check(module[which], (1, 3, 13, 11), grids=((1, 2, 1), (1, 1, 3)))
    assert all("ring" not in found[0] for found in kinds((1, 2, 1), module[which]))


def cells(x):
    return x.flatten(2).mT


def pooled(x):
    return x.mean((2, 3))[:, None]
