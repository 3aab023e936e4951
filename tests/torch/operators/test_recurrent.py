"""Recurrent layers on virtual ranks against a single process, in float64."""

import random

import pytest

torch = pytest.importorskip("torch")

from case_selection import select_cases, select_grids  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import check_module  # noqa: E402

GRIDS = ((1, 1, 2), (1, 3, 1), (1, 2, 2), (2, 1, 2), (3, 1, 1))


class Recurrent(nn.Module):
    """A recurrent layer over the columns of images, over their rows, or over all cells of a sample."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.sequence, self.batch_first = draw.choice(["rows", "columns", "cells"]), draw.random() < 0.5
        self.writes_results = draw.random() < 0.5
        self.gives_states = draw.random() < 0.5
        layer, options = draw.choice([(nn.LSTM, {}), (nn.GRU, {}), (nn.RNN, {"nonlinearity": "relu"}), (nn.RNN, {})])
        if layer is nn.LSTM and draw.random() < 0.5:
            options["proj_size"] = 2
        options |= {"bidirectional": draw.random() < 0.5, "bias": draw.random() < 0.8, "batch_first": self.batch_first}
        self.layer = layer(3, 4, draw.choice([1, 2, 3]), **options)
        directions = 1 + options["bidirectional"]
        sizes = [options.get("proj_size", 4), *[4] * (layer is nn.LSTM)]
        self.states = [torch.randn(directions * self.layer.num_layers, 1, n, dtype=torch.float64) for n in sizes]
        self.scale = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        y = self.scale(x)
        n, c, h, w = y.shape
        order, shape = {
            "rows": ((0, 3, 2, 1), (n * w, h, c)),
            "columns": ((0, 2, 3, 1), (n * h, w, c)),
            "cells": ((0, 2, 3, 1), (n, h * w, c)),
        }[self.sequence]
        sequences = y.permute(order).reshape(shape)
        states = [state.expand(-1, shape[0], -1).contiguous() for state in self.states]
        given = (tuple(states) if len(states) > 1 else states[0],) if self.gives_states else ()
        output, last = self.layer(sequences if self.batch_first else sequences.transpose(0, 1), *given)
        last = last if isinstance(last, tuple) else (last,)
        if self.writes_results:
            output[:, 0] *= 2
            last[0][-1] += 1
        return output, *last


@pytest.mark.parametrize("seed", select_cases(range(40), 8))
@pytest.mark.long
def test_recurrent_layers_match_single_process(seed):
    torch.manual_seed(seed)
    check_module(Recurrent(seed).double(), (3, 3, 7, 6), grids=select_grids(GRIDS))


@pytest.mark.parametrize(
    "options", [{"memory": "least"}, {"recompute": True}, {"strips": 2}, {"compile": True}], ids=str
)
@pytest.mark.long
def test_recurrent_layers_with_options(options):
    torch.manual_seed(0)
    check_module(Recurrent(1).double(), (3, 3, 7, 6), grids=((1, 2, 1),), **options)
