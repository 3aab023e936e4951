"""Batch norms with cumulative averages, whose counters are read, and the captured programs."""

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from test_constants import IMAGES, find_training_difference  # noqa: E402
from torch import nn  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.torch.capture.capture import capture_module  # noqa: E402


def build_norm(momentum=None, **more):
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum, **more), nn.Conv2d(4, 4, 1)
    )


@pytest.mark.parametrize("norm", [build_norm, lambda: build_norm(affine=False)])
def test_batch_norm_averages_all_batches(norm):
    def reset(module, step):
        if step == 2:
            module[1].reset_running_stats()

    assert find_training_difference(norm(), F.mse_loss, 4, (1, 1, 2), reset) is None


def test_averaging_batch_norm_is_captured_once():
    with nd.ProcessGrid() as grid:
        model = ndt.distribute(build_norm().double(), IMAGES, grid)
        plans = {id(model.plan)}
        for _ in range(3):
            model.module(torch.randn(IMAGES, dtype=torch.float64))
            plans.add(id(model.plan))
    assert len(plans) == 1


def test_update_bn_of_weight_averaging():
    batches = torch.randn(3, *IMAGES, dtype=torch.float64)
    torch.manual_seed(2)
    module = build_norm(0.1).double()
    start = copy.deepcopy(module)
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    torch.optim.swa_utils.update_bn(list(batches), average)

    def body(world):
        with nd.ProcessGrid(world, rows=2, cols=1) as ranks:
            local_average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(start))
            local_average.update_parameters(start)
            model = ndt.distribute(local_average, IMAGES, ranks)
            torch.optim.swa_utils.update_bn([model.scatter(x) for x in batches], model)
            return local_average.state_dict()

    for state in nd.loopback.run(2, body):
        for name, value in average.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


def test_programs_exclude_reads():
    for norm in (build_norm(0.1), build_norm(0.1).eval()):
        program = capture_module(norm.double(), [(IMAGES, torch.float64)])
        assert {str(node.target) for node in program.graph.nodes if node.op in ("call_function", "get_attr")} <= {
            "aten.conv2d.default", "aten.batch_norm.default", "aten.relu.default", "aten.add_.Tensor"
        }  # fmt: skip


def test_constant_reads_are_not_recorded():
    """PyTorch would decompose the whole program for a change of grad mode, which takes six times as long."""

    class Positions(nn.Module):
        def forward(self, x):
            return x * float(torch.arange(4).sum())

    program = capture_module(nn.Sequential(build_norm(0.1), Positions()), [(IMAGES, torch.float32)])
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "aten.batch_norm.default" in names
    assert "wrap_with_set_grad_enabled" not in names
