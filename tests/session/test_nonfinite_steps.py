"""End of a session whose step leaves a parameter that is not finite, without a checkpoint of it."""

import math

import pytest
import torch
from torch import nn

import neondist as nd
import neondist.torch as ndt
from neondist.comm import loopback

LAST = 4


def train(world, folder, bad_step, create_optimizer, returns_loss, **options):
    """Return the error of a session whose loss is NaN at a step, and its last step."""
    torch.manual_seed(0)
    grid = nd.ProcessGrid(world)
    module = ndt.distribute(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (2, 1, 2, 2), grid=grid)
    optimizer = create_optimizer(module)
    hooks = [nd.StopAtStepHook(LAST)]
    session = nd.DistributedSession(
        nd.TaskSpecDef(), [module, optimizer], folder, hooks, log_step_count_steps=None, **options
    )

    def step():
        optimizer.zero_grad()
        output = module(module.scatter(torch.ones(2, 1, 2, 2)))
        loss = module.loss(nn.functional.mse_loss, output, module.scatter_target(torch.zeros(2, 2)))
        if session.global_step + 1 == bad_step:
            loss = loss * math.nan
        loss.backward()
        optimizer.step()
        return loss if returns_loss(grid.rank) else None

    try:
        with session:
            while not session.should_stop():
                session.run(step)
    except nd.NonFiniteError as error:
        return str(error), session.global_step
    return None, session.global_step


def distributed_sgd(module):
    return ndt.DistributedOptimizer(module, torch.optim.SGD, lr=0.1)


def plain_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize("create_optimizer", [distributed_sgd, plain_sgd])
@pytest.mark.parametrize("returns_loss", [lambda rank: True, lambda rank: rank == 0, lambda rank: False])
def test_nonfinite_loss_stops_all_ranks_and_is_not_saved(tmp_path, create_optimizer, returns_loss):
    def body(world):
        return train(world, tmp_path, 3, create_optimizer, returns_loss, save_checkpoint_steps=1)

    (message, step), *others = loopback.run(2, body)
    assert message.startswith("step 3: parameter '1.weight' is not finite; lower the learning rate")
    assert step == 3
    assert others == [(message, step)]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n:08}.h5" for n in range(3)]
    assert (
        loopback.run(2, lambda world: train(world, tmp_path, 0, create_optimizer, returns_loss)) == [(None, LAST)] * 2
    )


def test_nonfinite_parameters_behind_a_finite_loss_are_not_saved(tmp_path):
    """The gradient of the square root at 0 is infinite, the loss is 0."""
    module = ndt.distribute(nn.Linear(1, 1, bias=False), (1, 1), grid=nd.ProcessGrid.serial())
    optimizer = distributed_sgd(module)
    nn.init.zeros_(module.module.weight)

    def step():
        optimizer.zero_grad()
        loss = module(torch.ones(1, 1)).abs().sqrt().sum()
        loss.backward()
        optimizer.step()
        return loss

    def run_session():
        session = nd.DistributedSession(nd.TaskSpecDef(), module, tmp_path, log_step_count_steps=None)
        with session:
            assert session.run(step).isfinite()

    with pytest.raises(nd.NonFiniteError, match="step 1: parameter 'weight' is not finite"):
        run_session()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000000.h5"]
    assert not (tmp_path / "complete.json").exists()


def test_step_that_skips_its_update_does_not_stop_the_session(tmp_path):
    module = ndt.distribute(nn.Linear(1, 1), (1, 1), grid=nd.ProcessGrid.serial())
    session = nd.DistributedSession(nd.TaskSpecDef(), [module, plain_sgd(module)], tmp_path, log_step_count_steps=None)
    with session:
        session.run(lambda: math.nan)
    assert session.global_step == 1
    assert (tmp_path / "checkpoint-00000001.h5").exists()
