"""Training scripts over distributed modules give the numbers of one process: losses, optimisers, modes, precision."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from present import needs_mpirun  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import captured_once, in_turn  # noqa: E402
from torch_training import CELLS, IMAGES, LOSSES, SCRIPTS, Net, OneProcess, drawn, labels, made, off, one_loss  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.launcher.mpirun import find_mpirun  # noqa: E402
from neondist.torch.module import criteria  # noqa: E402
from neondist.torch.module import module as capturing  # noqa: E402

GRIDS = (1, 1, 1), (1, 3, 1), (1, 2, 2), (2, 1, 2)
"""(replicas, rows, cols)"""
PROGRAMS = {}
"""those of the scripts' modules, which are few"""
HELPERS = Path(__file__).parents[2] / "helpers"


def on(grid, body):
    """Return what body(grid) gives on each of the virtual ranks."""
    replicas, rows, cols = grid

    def rank(world):
        with nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols) as ranks:
            return body(ranks)

    return loopback.run(replicas * rows * cols, rank)


def equal(script, grids=GRIDS, tolerance=1e-9):
    expected = script(lambda module, _: OneProcess(module))
    with captured_once(PROGRAMS):
        for grid in grids:
            found = on(grid, lambda ranks: script(lambda module, shape: ndt.distribute(module, shape, ranks)))
            for rank, each in enumerate(found):
                assert off(each, expected) < tolerance, f"grid {grid}, rank {rank}"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.long
def test_a_loss_is_that_of_the_whole_images(name):
    criterion, target = LOSSES[name]
    equal(lambda start: one_loss(start, Net, criterion, target()), grids=in_turn(GRIDS[2:], 1))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.long
def test_a_script_gives_the_numbers_of_one_process(name):
    equal(SCRIPTS[name], in_turn(GRIDS, 1))


@pytest.mark.long
def test_automatic_precision_is_close_to_that_of_one_process():
    def found(start):
        model = start(made(Net).float(), IMAGES)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.2), []
        for step in range(4):
            x = model.scatter(drawn(*IMAGES).float())
            target = model.scatter_target(labels(*CELLS, step=step % 2))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
                loss = model.loss(F.cross_entropy, y, target)
            assert y.dtype == torch.bfloat16
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    expected = found(lambda module, _: OneProcess(module))
    for losses in on((1, 2, 2), lambda ranks: found(lambda module, shape: ndt.distribute(module, shape, ranks))):
        torch.testing.assert_close(losses, expected, rtol=0.01, atol=0)
        assert losses[-1] < losses[0]


def test_a_distributed_module_is_the_module_to_its_user(tmp_path):
    x = drawn(*IMAGES)
    with nd.ProcessGrid.serial() as grid:
        module = made(Net).float()
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
        seen = []
        hooks = [
            model.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
            model.register_forward_hook(lambda _, inputs, y: seen.append(y.shape)),
            model.register_full_backward_hook(lambda *_: seen.append("backward")),
        ]
        model.eval()
        y = model(x.requires_grad_())
        torch.testing.assert_close(y, module(2 * x))
        y.sum().backward()
        assert seen == [y.shape, "backward"]
        assert module.first.weight.grad is model.first.weight.grad is not None
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        assert module.first.weight.grad is None
        for refused in (copy.deepcopy, lambda model: torch.save(model, tmp_path / "model.pt")):
            with pytest.raises(nd.ConfigError, match=r"cannot be copied or pickled; save model.state_dict\(\)"):
                refused(model)


def test_a_mode_is_captured_once_and_a_changed_attribute_anew(monkeypatch):
    made_of = []
    real = capturing.capture_module

    def counted(module, *more, **named):
        made_of.append(type(module).__name__)
        return real(module, *more, **named)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.calls, self.norm = 2.0, 0, nn.BatchNorm2d(3)

        def forward(self, x):
            self.calls += 1
            return self.norm(x) * self.scale

    for place in (capturing, criteria):
        monkeypatch.setattr(place, "capture_module", counted)
    with nd.ProcessGrid.serial() as grid:
        model = ndt.distribute(Scaled().double(), IMAGES, grid)
        x = drawn(*IMAGES)
        for _ in range(3):
            for mode in (True, False):
                model.train(mode)
                with torch.no_grad():
                    y = model(x)
                for factor in range(2):
                    model.loss(lambda y, t, factor=factor: factor * (y - t).square().mean(), y, x)
        assert made_of.count("Scaled") == 2
        assert len(made_of) == 2 + 2
        model.eval()
        before = model(x)
        model.module.scale = 3.0
        torch.testing.assert_close(model(x), before * 1.5)
        model.module.norm.eps = 10.0
        assert model(x).abs().max() < before.abs().max() / 2


def test_messages_of_a_training_step_are_planned_once(monkeypatch):
    planned = []
    real = loopback.LoopbackTransport.exchange

    def counted(self, *messages):
        planned.append(messages)
        return real(self, *messages)

    monkeypatch.setattr(loopback.LoopbackTransport, "exchange", counted)
    module = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)).double()

    def body(ranks):
        model = ndt.distribute(copy.deepcopy(module), IMAGES, ranks)
        for _ in range(3):
            model(model.scatter(drawn(*IMAGES))).sum().backward()

    on((1, 1, 2), body)
    assert len(planned) == 2 * 3  # each rank: both views, and the adjoint of the second


@needs_mpirun
@pytest.mark.long
def test_on_ranks_of_mpi():
    """And, at the end, a mistake in a script of the user's own, on one rank only: exit code 2, and one message."""
    mpirun = find_mpirun(os.environ)
    command = [*mpirun.command(2), sys.executable, HELPERS / "torch_training.py", "mpi"]
    said = check_ranks(command, 2, mpirun.environment(), code=2)
    message = "ShapeError: rank 1: input 0 has shape (1, 1, 6, 9), but this rank's tile of (1, 1, 12, 10) is"
    assert said.count(message) == 1, said
    assert said.count("failed and ends the job") == 1, said


@pytest.mark.long
def test_on_ranks_of_torchrun():
    check_ranks([sys.executable, HELPERS / "torch_ranks.py", "2", str(HELPERS / "torch_training.py"), "torch"], 2, {})


def check_ranks(command, ranks, environment, code=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("all equal") == ranks
    return done.stderr
