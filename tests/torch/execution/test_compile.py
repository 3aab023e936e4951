"""Compilation of a rank's computation between messages."""

import copy
import time
from contextlib import nullcontext
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import check_module  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402


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


class ListArguments(nn.Module):
    def forward(self, x):
        y = torch.stack([x, x.sin()]).permute(1, 0, 2, 3, 4).reshape(2, 4, 9, 8)
        return nn.functional.layer_norm(y.movedim(1, -1), [4]).exp(), nn.functional.pad(y, [0, 0, 0, 0, 1, 2]).mean([1])


@pytest.mark.long
def test_functions_with_lists_as_arguments_are_compiled_as_one():
    """In parts, they would be compiled once per operator, until the recompile limit."""
    compiler = partial(torch.compile, backend="eager", fullgraph=True)
    check_module(ListArguments(), (2, 2, 9, 8), grids=[(1, 2, 1)], compile=compiler)


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


def _compile_to_results(run):
    """Return a function that computes its results once, and then returns them with a trivial gradient."""
    results = []

    def run_compiled(*tensors):
        if not results:
            results.extend(y.detach() for y in run(*tensors))
        zero = sum(tensor.sum() * 0 for tensor in tensors if tensor.requires_grad and tensor.numel() < 99)
        return [y + zero if y.is_floating_point() else y for y in results]

    return run_compiled


def _compile_slowly(run):
    def run_compiled(*tensors):
        time.sleep(0.1)
        return run(*tensors)

    return run_compiled


def _fail_to_compile(run):
    def run_compiled(*tensors):
        raise RuntimeError("no C++ compiler")

    return run_compiled


@pytest.mark.parametrize(
    ("compiler", "expected"), [(_compile_to_results, True), (_compile_slowly, False), (_fail_to_compile, False)]
)
def test_compilation_is_chosen_if_it_saves_time(compiler, expected):
    def body(world):
        with nd.ProcessGrid(world, rows=2, cols=1) as grid:
            model = ndt.distribute(Net(), (4, 2, 256, 256), grid)
            model.programs.compile_if_faster(compiler)
            return model.is_compiled

    assert nd.loopback.run(2, body) == [expected] * 2


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"memory": "least"}, {"recompute": True}], ids=str)
def test_automatic_compilation_matches_single_process(options):
    check_module(Net(), (1, 2, 9, 8), grids=[(1, 2, 1), (1, 1, 1)], compile="auto", **options)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 2, 9, 8), (2, 2, 9, 8)])
def test_module_is_compiled_on_one_rank(shape):
    """Also with the gradients of norms of a single sample."""
    graphs = []

    def count_graphs(graph, inputs):
        graphs.append(graph)
        return graph.forward

    check_module(Net(), shape, grids=[(1, 1, 1)], compile=partial(torch.compile, backend=count_graphs))
    assert graphs


@pytest.mark.parametrize(
    "context", [nullcontext, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)], ids=range(3)
)
def test_choice_of_compilation_is_independent_of_modes_and_random_numbers(context):
    """Training passes without autocast are timed, and draw nothing from PyTorch's generator."""
    modes = []

    def compile_recorded(run):
        def run_compiled(*tensors):
            modes.append((tensors[0].requires_grad, torch.is_autocast_enabled("cpu")))
            return run(*tensors)

        return run_compiled

    modules = [Net()]
    modules.append(copy.deepcopy(modules[0]))
    random_state = torch.get_rng_state()

    def body(world):
        with nd.ProcessGrid(world, rows=2, cols=1) as grid, context():
            model = ndt.distribute(modules[world.rank], (1, 2, 9, 3), grid)
            model.programs.compile_if_faster(compile_recorded)

    nd.loopback.run(2, body)
    assert set(modes) == {(True, False)}
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("compiler", [_compile_slowly, _fail_to_compile])
def test_ranks_without_cells_choose_alike(compiler):
    """They have fewer groups of local steps than other ranks."""
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Tanh())
    modules = [copy.deepcopy(module) for _ in range(5)]

    def body(world):
        with nd.ProcessGrid(world, rows=5, cols=1) as grid:
            model = ndt.distribute(modules[world.rank], (1, 2, 3, 4), grid)
            model.programs.compile_if_faster(compiler)
            return model.is_compiled

    assert nd.loopback.run(5, body) == [False] * 5
