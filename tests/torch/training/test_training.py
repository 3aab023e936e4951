"""Training scripts over distributed modules against a single process: losses, optimisers, modes, precision."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from availability import needs_mpirun  # noqa: E402
from case_selection import select_grids  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import share_captures  # noqa: E402
from torch_training import (  # noqa: E402
    CELLS,
    IMAGES,
    LOSSES,
    SCRIPTS,
    Net,
    SerialModel,
    build_seeded,
    compute_loss,
    draw_labels,
    draw_tensor,
    max_relative_difference,
)

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.launcher.mpirun import find_mpirun  # noqa: E402
from neondist.torch.module import criteria  # noqa: E402
from neondist.torch.module import programs as capturing  # noqa: E402

GRIDS = (1, 1, 1), (1, 3, 1), (1, 2, 2), (2, 1, 2)
"""(replicas, rows, cols)"""
CAPTURED_PROGRAMS = {}
"""captured programs of the scripts' few modules"""
HELPERS = Path(__file__).parents[2] / "helpers"


def run_on_grid(grid, body):
    """Return the results of body(grid) on all virtual ranks."""
    replicas, rows, cols = grid

    def rank(world):
        with nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            return body(ranks)

    return loopback.run(replicas * rows * cols, rank)


def check_script(script, grids=GRIDS, tolerance=1e-9):
    expected = script(lambda module, _: SerialModel(module))
    with share_captures(CAPTURED_PROGRAMS):
        for grid in grids:
            results = run_on_grid(
                grid, lambda ranks: script(lambda module, shape: ndt.distribute(module, shape, ranks))
            )
            for rank, actual in enumerate(results):
                assert max_relative_difference(actual, expected) < tolerance, f"grid {grid}, rank {rank}"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.long
def test_losses_match_whole_images(name):
    criterion, target = LOSSES[name]
    check_script(lambda start: compute_loss(start, Net, criterion, target()), grids=select_grids(GRIDS[2:], 1))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.long
def test_scripts_match_single_process(name):
    check_script(SCRIPTS[name], select_grids(GRIDS, 1))


@pytest.mark.long
def test_autocast_is_close_to_single_process():
    def train(start):
        model = start(build_seeded(Net).float(), IMAGES)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.2), []
        for step in range(4):
            x = model.scatter(draw_tensor(*IMAGES).float())
            target = model.scatter_target(draw_labels(*CELLS, step=step % 2))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
                loss = model.loss(F.cross_entropy, y, target)
            assert y.dtype == torch.bfloat16
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    expected = train(lambda module, _: SerialModel(module))
    for losses in run_on_grid(
        (1, 2, 2), lambda ranks: train(lambda module, shape: ndt.distribute(module, shape, ranks))
    ):
        torch.testing.assert_close(losses, expected, rtol=0.01, atol=0)
        assert losses[-1] < losses[0]


def test_distributed_module_behaves_like_the_module(tmp_path):
    x = draw_tensor(*IMAGES)
    with nd.ProcessGrid.serial() as grid:
        module = build_seeded(Net).float()
        model = ndt.distribute(module, IMAGES, grid)
        names = [name for name, _ in module.named_parameters()]
        assert [name for name, _ in model.named_parameters()] == names
        assert all(a is b for a, b in zip(model.parameters(), module.parameters(), strict=True))
        assert dict(model.named_buffers()).keys() == dict(module.named_buffers()).keys()
        assert list(model.modules())[1:] == list(module.modules())[1:]
        assert model.first is module.first
        assert model.state_dict().keys() == module.state_dict().keys()
        model.to(torch.float64)
        assert model(model.scatter(x)).dtype == torch.float64
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        other = ndt.distribute(Net().double(), IMAGES, grid)
        other.load_state_dict(torch.load(tmp_path / "weights.pt"))
        torch.testing.assert_close(other(x), model(x))
        model.requires_grad_(False)
        assert not model(x).requires_grad
        model.requires_grad_()
        calls = []
        hooks = [
            model.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
            model.register_forward_hook(lambda _, inputs, y: calls.append(y.shape)),
            model.register_full_backward_hook(lambda *_: calls.append("backward")),
        ]
        model.eval()
        y = model(x.requires_grad_())
        torch.testing.assert_close(y, module(2 * x))
        y.sum().backward()
        assert calls == [y.shape, "backward"]
        assert module.first.weight.grad is model.first.weight.grad is not None
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        assert module.first.weight.grad is None
        for copy_model in (copy.deepcopy, lambda model: torch.save(model, tmp_path / "model.pt")):
            with pytest.raises(nd.ConfigError, match=r"cannot be copied or pickled; save model.state_dict\(\)"):
                copy_model(model)


def test_state_dict_methods_of_the_module_are_called():
    """As in segmentation_models_pytorch, whose `load_state_dict` has no positional `strict`."""

    class Prefixed(nn.Conv2d):
        def state_dict(self):
            return {f"old.{name}": value for name, value in super().state_dict().items()}

        def load_state_dict(self, state_dict, **kwargs):
            return super().load_state_dict({name[4:]: value for name, value in state_dict.items()}, **kwargs)

    with nd.ProcessGrid.serial() as grid:
        model, other = (ndt.distribute(Prefixed(1, 2, 3), (1, 1, 5, 5), grid) for _ in range(2))
        state = model.state_dict()
        assert list(state) == ["old.weight", "old.bias"]
        other.load_state_dict(state, strict=True)
        torch.testing.assert_close(other.weight, model.weight)


def test_modes_are_captured_once(monkeypatch):
    captured = []
    capture = capturing.capture_module

    def counting_capture(module, *args, **kwargs):
        captured.append(type(module).__name__)
        return capture(module, *args, **kwargs)

    class ScaledNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.calls, self.norm = 2.0, 0, nn.BatchNorm2d(3)

        def forward(self, x):
            self.calls += 1
            return self.norm(x) * self.scale

    for place in (capturing, criteria):
        monkeypatch.setattr(place, "capture_module", counting_capture)
    with nd.ProcessGrid.serial() as grid:
        model = ndt.distribute(ScaledNorm().double(), IMAGES, grid)
        x = draw_tensor(*IMAGES)
        for _ in range(3):
            for mode in (True, False):
                model.train(mode)
                with torch.no_grad():
                    y = model(x)
                for factor in range(2):
                    model.loss(lambda y, t, factor=factor: factor * (y - t).square().mean(), y, x)
        assert captured.count("ScaledNorm") == 2
        assert len(captured) == 2 + 2
        model.eval()
        before = model(x)
        model.module.scale = 3.0
        torch.testing.assert_close(model(x), before * 1.5)
        model.module.norm.eps = 10.0
        assert model(x).abs().max() < before.abs().max() / 2


def test_messages_are_planned_once(monkeypatch):
    planned = []
    exchange = loopback.LoopbackTransport.create_exchange

    def counting_exchange(self, *messages):
        planned.append(messages)
        return exchange(self, *messages)

    monkeypatch.setattr(loopback.LoopbackTransport, "create_exchange", counting_exchange)
    module = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)).double()

    def body(ranks):
        model = ndt.distribute(copy.deepcopy(module), IMAGES, ranks)
        for _ in range(3):
            model(model.scatter(draw_tensor(*IMAGES))).sum().backward()

    run_on_grid((1, 1, 2), body)
    assert len(planned) == 2 * 3  # both views and the adjoint of the second, on each rank


@needs_mpirun
@pytest.mark.long
def test_scripts_under_mpi():
    """At the end, an error on one rank of a user script exits with code 2 and one message."""
    mpirun = find_mpirun(os.environ)
    command = [*mpirun.command(2), sys.executable, HELPERS / "torch_training.py", "mpi"]
    stderr = check_ranks(command, 2, mpirun.environment(), code=2)
    message = "ShapeError: rank 1: input 0 has shape (1, 1, 6, 9), but this rank's tile of (1, 1, 12, 10) is"
    assert stderr.count(message) == 1, stderr
    assert stderr.count("failed and ends the job") == 1, stderr


@pytest.mark.long
def test_scripts_under_torchrun():
    check_ranks([sys.executable, HELPERS / "torch_ranks.py", "2", str(HELPERS / "torch_training.py"), "torch"], 2, {})


def check_ranks(command, ranks, environment, code=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib", **environment}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert process.returncode == code, process.stdout[-4000:] + process.stderr[-4000:]
    assert process.stdout.count("all equal") == ranks
    return process.stderr
