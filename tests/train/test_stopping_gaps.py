"""A signal in any gap - before the first step, between stages, while files are written - stops the run in order."""

import os
import signal

import pytest
from session_toys import experiment

from neondist.comm import loopback
from neondist.layers import FCLayerDist, LocalFilteringLayerDist
from neondist.models import GBDist
from neondist.system.signals import Signals
from neondist.train import Hook, StopOnSignal


def gb():
    return {
        "layers": lambda: [LocalFilteringLayerDist(2, 3), LocalFilteringLayerDist(2, 2), FCLayerDist(4)],
        "model": lambda layers, **more: GBDist(layers, num_pretrain_epochs=1, num_initial_epochs=1, **more),
    }


class At(Hook):
    """Does something when a hook is called in a run of this model; joins pretraining."""

    joins_pretraining = True

    def __init__(self, call, model, action):
        self.model, self.action = model, action
        setattr(self, call, self.act)

    def act(self, run, *_):
        if str(run.model).startswith(self.model):
            self.action()


def test_heard_before_the_first_step(tmp_path):
    """By one rank of three; --resume trains as if nothing had been."""

    def body(transport, hears, **more):
        signals = Signals()
        if hears and transport.rank == 1:
            signals.handle(signal.SIGUSR1)
        made = experiment(1)
        result = made.run(made.open_grid(transport), output=tmp_path, hooks=[StopOnSignal(signals)], **more)
        return result.stop, made.model.step

    for stop, step in loopback.run(3, lambda transport: body(transport, True)):
        assert (stop.code, stop.reason, step) == (75, "received SIGUSR1; --resume continues from here", 0)
    assert loopback.run(3, lambda transport: body(transport, False, resume=True)) == [(None, 5)] * 3


@pytest.mark.parametrize(("call", "stage", "there"), [("after_run", "Autoencoder", 1), ("before_run", "GBDist", 2)])
@pytest.mark.long
def test_between_stages(tmp_path, call, stage, there):
    """After the first stage, and after the last one."""
    signals = Signals()
    hooks = [At(call, stage, lambda: signals.handle(signal.SIGTERM)), StopOnSignal(signals)]
    made = experiment(1, **gb())
    result = made.run(output=tmp_path, hooks=hooks)
    assert (result.stop.code, made.model.step) == (75, 0)
    assert sorted(path.name for path in tmp_path.glob("pretrain_*.h5")) == ["pretrain_1.h5", "pretrain_2.h5"]
    assert (tmp_path / "checkpoint.h5").exists() == (there == 2)
    made = experiment(1, **gb())
    assert made.run(output=tmp_path, hooks=[], resume=True).stop is None
    assert made.model.step == 5


def test_more_signals_while_the_files_are_written(tmp_path):
    """USR1, then TERM, as Slurm sends them; hooks after the one that listens write the checkpoint."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]

    def send(number):
        return lambda: os.kill(os.getpid(), number)

    hooks = [At("after_step", "ConvnetDist", send(signal.SIGUSR1)), StopOnSignal()]
    hooks += [At("on_stop", "ConvnetDist", send(number)) for number in (signal.SIGTERM, signal.SIGUSR1)]
    result = experiment(1).run(output=tmp_path, hooks=hooks)
    assert result.stop.code == 75
    assert (tmp_path / "checkpoint.h5").exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_run_that_is_complete_is_not_stopped(tmp_path):
    experiment(1).run(output=tmp_path, hooks=[])
    signals = Signals()
    signals.handle(signal.SIGTERM)
    assert experiment(1).run(output=tmp_path, hooks=[StopOnSignal(signals)], resume=True).stop is None
