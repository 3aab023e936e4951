"""Compilation of a rank's computation between messages."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import check_module  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 2, 3, stride=2, padding=1)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        y = y * torch.sigmoid(y) + 1
        return self.second(y), y.mean((2, 3))


@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 3, 1), (1, 1, 4)])
def test_compiled_functions_match_single_process(grid):
    """Including ranks without cells."""
    compiled = []
    check_module(Net(), (2, 2, 9, 3), grids=[grid], compile=lambda run: compiled.append(run) or run)
    assert compiled


class DetachedProduct(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            scaled = x * x.mean()
        return torch.cat([scaled, x], 1)


@pytest.mark.parametrize("recompute", [False, True])
def test_traffic_is_that_of_uncompiled_steps(recompute):
    """A compiled function has gradients of some of its inputs only."""
    check_module(DetachedProduct(), (2, 2, 4, 4), grids=[(1, 2, 2)], recompute=recompute, compile=lambda run: run)


@pytest.mark.long
def test_torch_compile_matches_single_process():
    """With the stages before code generation, which takes a minute."""
    check_module(Net(), (1, 2, 9, 8), grids=[(1, 2, 1)], compile=partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 1, 4)])
def test_recomputed_segments_are_compiled(grid):
    compiled = []
    check_module(Net(), (2, 2, 9, 3), grids=[grid], recompute=True, compile=lambda run: compiled.append(run) or run)
    assert compiled


@pytest.mark.long
def test_recomputed_segments_match_single_process_with_torch_compile():
    check_module(
        Net(), (1, 2, 9, 8), grids=[(1, 2, 1)], recompute=True, compile=partial(torch.compile, backend="aot_eager")
    )


@pytest.mark.long
def test_compiled_segments_may_exceed_the_recompile_limit():
    graphs = []

    def record(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    layers = [nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Sigmoid()] * (torch._dynamo.config.recompile_limit + 2)
    check_module(
        nn.Sequential(*layers), (1, 2, 9, 8), grids=[(1, 2, 1)], compile=partial(torch.compile, backend=record)
    )
    assert len(graphs) >= 2 * (torch._dynamo.config.recompile_limit + 2)
