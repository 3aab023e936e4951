"""Indexing, gathering and scattering by tensors on virtual ranks against a single process, in float64."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from case_selection import select_grids  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import (  # noqa: E402
    FunctionModule,
    check_module,
    check_modules,
    run_distributed,
    run_serial,
    share_captures,
    split_into_groups,
)

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402

GRIDS = ((1, 1, 2), (1, 3, 1), (1, 2, 2), (2, 1, 2))
ROWS = torch.tensor([5, 0, 12, 5, 3])
COLUMNS = torch.tensor([1, 10, 4, 4, 7])


def encode_one_hot(x):
    """Encode the argmax over channels as one-hot channels."""
    labels = x.argmax(1, keepdim=True)
    return torch.zeros_like(x).scatter_(1, labels, 1.0) * x + torch.zeros(*x.shape).to(x).scatter(1, labels, 0.5)


def apply_write(x, write):
    y = x * 1.0
    write(y)
    return y * x


def assign(index, value):
    return lambda x: apply_write(x, lambda y: y.__setitem__(index, value(x) if callable(value) else value))


def sort_rows(x):
    return x.argsort(2)


MODULES = {
    "gather classes": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "gather rows": lambda x: x.gather(2, sort_rows(x)),
    "gather rows, fewer columns": lambda x: x.gather(2, sort_rows(x)[:, :2, :4, 2:9]),
    "gather a few rows": lambda x: x.gather(2, torch.tensor([3, 3, 12]).view(1, 1, 3, 1).expand(2, 3, 3, 11)),
    "gather samples": lambda x: x.gather(0, (x > 0).long()),
    "take along": lambda x: x.take_along_dim(x.mean(1, keepdim=True).argmax(2, keepdim=True), 2),
    "take along, flat": lambda x: x.take_along_dim(torch.tensor([3, 100, 857])),
    "take": lambda x: x.take(x.argmax(1) * 7 + 2),
    "one hot": encode_one_hot,
    "scatter rows": lambda x: x.scatter(2, sort_rows(x), x.sin()),
    "scatter a few": lambda x: x.scatter(3, (x > 0).argsort(3)[:, :, :9, :4], x.sin()[:, :, 2:11, :4]),
    "scatter add": lambda x: x.scatter_add(2, sort_rows(x) // 3, x.cos()),
    "scatter onto few": lambda x: torch.zeros(2, 3, 5, 11).to(x).scatter_add(2, sort_rows(x) % 5, x.cos()),
    "scatter multiply": lambda x: x * x.detach().scatter(2, sort_rows(x)[:, :, :1], 3.0, reduce="multiply"),
    "scatter mean": lambda x: x.scatter_reduce(3, (x > 0).long() * 4, x.cos(), "mean", include_self=False),
    "scatter amax": lambda x: x.scatter_reduce(2, (x > 0).long() * 4, x.cos(), "amax"),
    "index add": lambda x: x.index_add(2, ROWS, x[:, :, :5].cos(), alpha=2),
    "index copy": lambda x: x.index_copy(3, COLUMNS[:3], x[..., 4:7].cos()),
    "index fill": lambda x: x.index_fill(2, ROWS, 0.3) + x.index_fill(3, COLUMNS, x.mean()),
    "index reduce": lambda x: x.index_reduce(2, ROWS[:3], x[:, :, :3].cos(), "amax"),
    "rows written": assign((slice(None), slice(None), ROWS[:3]), lambda x: x[:, :, 4:7].cos()),
    "rows written, one number": assign((slice(None), slice(None), ROWS), 1.5),
    "cells written": assign((slice(None), slice(None), ROWS, COLUMNS), lambda x: x.mean((2, 3))[..., None]),
    "cells written, separated indices": assign(
        (torch.tensor([0, 1, 1]), slice(None), ROWS[:3]), lambda x: x[0].mean(1)[None] + x[:1, :, 0]
    ),
    "accumulated": lambda x: x.index_put((torch.tensor([0, 1])[:, None], torch.tensor([2, 2])), x[:, :1].sin(), True),
    "accumulated rows": lambda x: torch.ops.aten.index_put(x, [None, None, ROWS], x[:, :, :5].exp(), True),
    "masked": lambda x: apply_write(x, lambda y: y.__setitem__(y > 0.5, 0.1)),
    "masked, one number": lambda x: apply_write(x, lambda y: y.__setitem__(x > 0.5, x.mean())),
    "masked cells": lambda x: assign_masked_channels(x),
    "masked rows": lambda x: apply_write(
        x, lambda y: y.__setitem__((slice(None), slice(None), torch.arange(13) > 8), 0.2)
    ),
    "separated indices": lambda x: (
        x[torch.tensor([0, 1, 1, 0, 1]), :, ROWS] + x[torch.tensor([1]), :, :, COLUMNS].mean()
    ),
    "computed indices": lambda x: x[torch.arange(2)[:, None], x.mean((2, 3)).argsort(1)],
    "bins": lambda x: torch.bucketize(x, torch.linspace(-2, 2, 9).double()) * x,
    "searched": lambda x: torch.searchsorted(x.sort(-1)[0], x.sin().contiguous(), right=True) * x,
    "sampled": lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1).tanh(), align_corners=False),
    "sampled volumes": lambda x: F.grid_sample(
        x[:, :, None], x[:, None].movedim(2, -1).sin(), "nearest", align_corners=True
    ),
    "searched, side": lambda x: torch.searchsorted(x[0, 0, 0].sort()[0], x, side="left") * x,
}


def assign_masked_channels(x):
    y = x.movedim(1, -1) * 1.0
    y[x.mean(1) > 0] = x.mean((0, 2, 3))
    return y


@pytest.mark.parametrize("names", split_into_groups(MODULES), ids=lambda names: names[0])
@pytest.mark.long
def test_indexing_matches_single_process(names):
    torch.manual_seed(0)
    check_modules({name: FunctionModule(MODULES[name]) for name in names}, (2, 3, 13, 11), grids=select_grids(GRIDS))


def test_embedding_padding_has_no_gradient():
    """PyTorch's decomposition omits this."""
    table = nn.Embedding(7, 3, padding_idx=0)
    check_module(FunctionModule(lambda x, table: table((x > 0).sum(1)), table), (2, 3, 13, 11), grids=GRIDS)
    scaled_table = nn.Embedding(7, 3, scale_grad_by_freq=True)
    with share_captures(), pytest.raises(ndt.UnsupportedOperator, match="number of times each row is selected"):
        run_distributed(
            FunctionModule(lambda x, t: t((x > 0).sum(1)), scaled_table), [torch.randn(2, 3, 13, 11)], [], (1, 1, 2)
        )


def bag_cells(x, *tables):
    """Return a bag of all cells of each sample for each table."""
    rows = (x[:, 0] * 3).long().clamp(0, 6)
    weights = x[:, 1].flatten(1)
    return [table(rows.flatten(1), None, weights if table.mode == "sum" else None) for table in tables]


def test_embedding_bags():
    options = [{"mode": "sum"}, {}, {"mode": "max"}]
    tables = [nn.EmbeddingBag(7, 3, padding_idx=padding, **each) for each in options for padding in (None, 0)]
    check_module(FunctionModule(bag_cells, *tables), (2, 3, 13, 11), grids=GRIDS)


@pytest.mark.parametrize("offsets", [[0, 3, 3, 200], [0, 0, 143, 286]])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_embedding_bags_with_offsets(offsets, include_last_offset):
    """Bags differ in length, and some are empty."""
    options = {"padding_idx": 0}, {"mode": "sum"}
    tables = [nn.EmbeddingBag(7, 3, include_last_offset=include_last_offset, **each) for each in options]

    def bag(x, *tables):
        rows, starts = (x[:, 0] * 3).long().clamp(0, 6).flatten(), torch.tensor(offsets + [286] * include_last_offset)
        return [table(rows, starts, x[:, 1].flatten() if table.mode == "sum" else None) for table in tables]

    check_module(FunctionModule(bag, *tables), (2, 3, 13, 11), grids=((1, 2, 1), (2, 1, 2)))


def test_invalid_embedding_bags():
    def bag(x):
        return F.embedding_bag((x[:, 0, 0] > 0).long().flatten(), torch.ones(2, 3))

    with pytest.raises(nd.ConfigError, match="offsets has to be a 1D Tensor"), nd.ProcessGrid.serial() as grid:
        ndt.distribute(FunctionModule(bag), (2, 3, 13, 11), grid)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_padding(mode):
    from neondist.torch.rules.gather_scatter import traceable_embedding_bag

    rows, table = torch.tensor([[0, 2, 2], [0, 0, 0]]), torch.arange(12.0).reshape(4, 3)
    for padding in (0, -4, None):
        options = {"mode": mode, "padding_idx": padding}
        torch.testing.assert_close(
            traceable_embedding_bag(rows, table, **options), F.embedding_bag(rows, table, **options)
        )


def test_assignments_that_depend_on_mask_counts_are_rejected():
    def write(x):
        y = x * 1.0
        y[x >= 0.5] = torch.arange(428.0).to(x)
        return y

    for function in (write, lambda x: x.masked_scatter(x > 0, x.sin())):
        module, x = FunctionModule(function), torch.arange(-429.0, 429.0, dtype=torch.float64).reshape(2, 3, 13, 11)
        with share_captures(), pytest.raises(ndt.UnsupportedOperator, match="the assignment of values to cells"):
            run_distributed(module, [x], run_serial(module, [x])["gradients"], (1, 1, 2))
