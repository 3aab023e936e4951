"""Coordinated stop of all ranks after the same step, without additional messages."""

import os
import signal

import pytest
from toy_training import make_experiment

from neondist.comm import loopback
from neondist.layers import FCLayerDist, LocalFilteringLayerDist
from neondist.models import GBDist
from neondist.parallel import ControlFlag
from neondist.train import Hook, StopOnSignal, TimeLimit


class RaiseControlFlag(Hook):
    """Raise a control flag on one rank after a step."""

    runs_during_pretraining = True

    def __init__(self, rank, step, flag=ControlFlag.SIGUSR1):
        self.rank, self.step, self.flag = rank, step, flag

    def after_step(self, run):
        if run.grid.rank == self.rank and run.step == self.step:
            run.model.sync.flags.own_flags[self.flag] = 1


def run_until_stop(ranks, hooks, **fields):
    """Train on virtual ranks; return the step, the exit code and the reason of the stop, which all ranks share."""

    def body(transport):
        experiment = make_experiment(2, **fields)
        result = experiment.run(experiment.open_grid(transport), hooks=hooks())
        return experiment.model.step, result.stop and result.stop.exit_code, result.stop and result.stop.reason

    results = loopback.run(ranks, body)
    assert len({(step, code) for step, code, _ in results}) == 1
    return results[0]


@pytest.mark.parametrize(("ranks", "grid"), [(1, None), (4, {"replicas": 2}), (6, {"rows": 2})])
def test_all_ranks_stop_one_step_after_a_flag(ranks, grid):
    step, code, reason = run_until_stop(ranks, lambda: [RaiseControlFlag(ranks - 1, 2), StopOnSignal()], grid=grid)
    assert (step, code) == (3, 75)
    assert reason == "received SIGUSR1; --resume continues from here"


@pytest.mark.parametrize(("pretrain", "step"), [(1, 0), (0, 3)])
def test_pretraining_and_partial_training_stop(pretrain, step):
    def model(layers, **more):
        return GBDist(layers, num_pretrain_epochs=pretrain, num_initial_epochs=1, **more)

    def layers():
        return [LocalFilteringLayerDist(2, 3), FCLayerDist(4)]

    results = run_until_stop(4, lambda: [RaiseControlFlag(3, 2), StopOnSignal()], layers=layers, model=model)
    assert results[:2] == (step, 75)


def test_stop_needs_no_additional_message():
    def body(transport):
        sizes = []
        allreduce = transport.allreduce
        transport.allreduce = lambda array, *op: (sizes.append(array.size), allreduce(array, *op))
        experiment = make_experiment(1, metrics=[])
        experiment.run(experiment.open_grid(transport), hooks=[StopOnSignal()])
        return sizes, experiment.model.parameters.num_world_gradients, experiment.model.step

    sizes, size, steps = loopback.run(3, body)[0]
    assert [n for n in sizes if n >= size] == [size + 16] * steps


def test_signal_to_this_process():
    before = signal.getsignal(signal.SIGTERM)

    class Kill(Hook):
        def after_step(self, run):
            if run.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    experiment = make_experiment(2)
    result = experiment.run(hooks=[Kill(), StopOnSignal()])
    assert (experiment.model.step, result.stop.reason) == (3, "received SIGTERM; --resume continues from here")
    assert signal.getsignal(signal.SIGTERM) == before


class SimulatedClock(Hook):
    """Simulated clock, advanced by steps, evaluations and checkpoints; the first hook of a run."""

    runs_during_pretraining = True

    def __init__(self, step=1.0, evaluation=0.0, saving=0.0):
        self.now, self.times = 0.0, (step, evaluation, saving)
        self.ended = None

    def __call__(self):
        return self.now

    def after_step(self, run):
        self.now += self.times[0]

    def after_epoch(self, run):
        self.now += self.times[1]


class SimulatedSave(Hook):
    """Last hook of a run, which advances the clock by the duration of a checkpoint."""

    def __init__(self, clock):
        self.clock = clock

    def after_epoch(self, run):
        self.clock.now += self.clock.times[2]

    def on_stop(self, run):
        self.after_epoch(run)
        self.clock.ended = self.clock.now

    def after_run(self, run):
        self.on_stop(run)


@pytest.mark.parametrize("times", [(1, 7, 0), (1, 0, 7), (3, 2, 1)])
@pytest.mark.parametrize("seconds", [47, 60])
@pytest.mark.long
def test_time_limit_is_nearly_used_up(times, seconds):
    def body(transport):
        clock = SimulatedClock(*times)
        experiment = make_experiment(100)
        experiment.dataset.split_sizes["test"] = 10
        limit = TimeLimit(seconds, clock=clock)
        result = experiment.run(experiment.open_grid(transport), hooks=[clock, limit, SimulatedSave(clock)])
        return clock.ended, result.stop.exit_code, experiment.model.step

    ended, code, _ = loopback.run(2, body)[0]
    assert code == 75
    step, evaluation, saving = times
    assert seconds - (3 * step + evaluation + 2 * saving + 2) <= ended <= seconds


def test_run_within_the_time_limit_is_not_stopped():
    assert run_until_stop(2, lambda: [TimeLimit(1e6), StopOnSignal()]) == (10, None, None)
