"""All ranks end at the same step when one is asked to, and nothing is sent for it."""

import os
import signal

import pytest
from session_toys import experiment

from neondist.comm import loopback
from neondist.layers import FCLayerDist, LocalFilteringLayerDist
from neondist.models import GBDist
from neondist.parallel import Flag
from neondist.train import Hook, StopOnSignal, TimeLimit


class Tell(Hook):
    """After some step, one rank has something to tell."""

    joins_pretraining = True

    def __init__(self, rank, step, flag=Flag.SIGUSR1):
        self.rank, self.step, self.flag = rank, step, flag

    def after_step(self, run):
        if run.grid.rank == self.rank and run.step == self.step:
            run.model.sync.flags.mine[self.flag] = 1


def stops(ranks, hooks, **fields):
    """Return where every rank stopped, as (step, code), and rank 0's reason."""

    def body(transport):
        made = experiment(2, **fields)
        result = made.run(made.open_grid(transport), hooks=hooks())
        return made.model.step, result.stop and result.stop.code, result.stop and result.stop.reason

    found = loopback.run(ranks, body)
    assert len({(step, code) for step, code, _ in found}) == 1
    return found[0]


@pytest.mark.parametrize(("ranks", "grid"), [(1, None), (4, {"replicas": 2}), (6, {"rows": 2})])
def test_all_ranks_stop_one_step_after_one_was_told(ranks, grid):
    step, code, reason = stops(ranks, lambda: [Tell(ranks - 1, 2), StopOnSignal()], grid=grid)
    assert (step, code) == (3, 75)
    assert reason == "received SIGUSR1; --resume continues from here"


@pytest.mark.parametrize(("pretrain", "step"), [(1, 0), (0, 3)])
def test_pretraining_and_training_of_a_part_stop_too(pretrain, step):
    def model(layers, **more):
        return GBDist(layers, num_pretrain_epochs=pretrain, num_initial_epochs=1, **more)

    def layers():
        return [LocalFilteringLayerDist(2, 3), FCLayerDist(4)]

    found = stops(4, lambda: [Tell(3, 2), StopOnSignal()], layers=layers, model=model)
    assert found[:2] == (step, 75)


def test_nothing_is_sent_for_it():
    def body(transport):
        counted = []
        plain = transport.allreduce
        transport.allreduce = lambda array, *op: (counted.append(array.size), plain(array, *op))
        made = experiment(1, metrics=[])
        made.run(made.open_grid(transport), hooks=[StopOnSignal()])
        return counted, made.model.parameters.shared, made.model.step

    counted, size, steps = loopback.run(3, body)[0]
    assert [n for n in counted if n >= size] == [size + 16] * steps


def test_a_signal_to_this_process():
    before = signal.getsignal(signal.SIGTERM)

    class Kill(Hook):
        def after_step(self, run):
            if run.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    made = experiment(2)
    result = made.run(hooks=[Kill(), StopOnSignal()])
    assert (made.model.step, result.stop.reason) == (3, "received SIGTERM; --resume continues from here")
    assert signal.getsignal(signal.SIGTERM) == before


class Clock(Hook):
    """A clock that a step, an evaluation and a checkpoint move on; called as the first hook."""

    joins_pretraining = True

    def __init__(self, step=1.0, evaluation=0.0, saving=0.0):
        self.now, self.times = 0.0, (step, evaluation, saving)
        self.ended = None

    def __call__(self):
        return self.now

    def after_step(self, run):
        self.now += self.times[0]

    def after_epoch(self, run):
        self.now += self.times[1]


class Save(Hook):
    """The last hook: what a checkpoint takes."""

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
def test_the_run_ends_in_time_and_not_much_earlier(times, seconds):
    def body(transport):
        clock = Clock(*times)
        made = experiment(100)
        made.dataset.counts["test"] = 10
        limit = TimeLimit(seconds, clock=clock)
        result = made.run(made.open_grid(transport), hooks=[clock, limit, Save(clock)])
        return clock.ended, result.stop.code, made.model.step

    ended, code, _ = loopback.run(2, body)[0]
    assert code == 75
    step, evaluation, saving = times
    assert seconds - (3 * step + evaluation + 2 * saving + 2) <= ended <= seconds


def test_a_run_that_is_done_in_time_is_not_stopped():
    assert stops(2, lambda: [TimeLimit(1e6), StopOnSignal()]) == (10, None, None)
