"""Signals between steps - before the first one, between stages, during writes - stop a run in order."""

import os
import signal

import pytest
from toy_training import make_experiment

from neondist.comm import loopback
from neondist.layers import FCLayerDist, LocalFilteringLayerDist
from neondist.models import GBDist
from neondist.system.signals import SignalRecorder
from neondist.train import Hook, StopOnSignal


def make_gb_fields():
    return {
        "layers": lambda: [LocalFilteringLayerDist(2, 3), LocalFilteringLayerDist(2, 2), FCLayerDist(4)],
        "model": lambda layers, **more: GBDist(layers, num_pretrain_epochs=1, num_initial_epochs=1, **more),
    }


class ActionOnCall(Hook):
    """Perform an action when a hook is called in a run of a certain model, pretraining included."""

    runs_during_pretraining = True

    def __init__(self, call, model, action):
        self.model, self.action = model, action
        setattr(self, call, self._act)

    def _act(self, run, *_):
        if run.model.display_name.startswith(self.model):
            self.action()


def test_signal_before_the_first_step(tmp_path):
    """Signal to one rank of three; a resumed run trains all steps."""

    def body(transport, signalled, **options):
        signals = SignalRecorder()
        if signalled and transport.rank == 1:
            signals.handle(signal.SIGUSR1)
        experiment = make_experiment(1)
        result = experiment.run(
            experiment.open_grid(transport), output=tmp_path, hooks=[StopOnSignal(signals)], **options
        )
        return result.stop, experiment.model.step

    for stop, step in loopback.run(3, lambda transport: body(transport, True)):
        assert (stop.exit_code, stop.reason, step) == (75, "received SIGUSR1; --resume continues from here", 0)
    assert loopback.run(3, lambda transport: body(transport, False, resume=True)) == [(None, 5)] * 3


@pytest.mark.parametrize(("call", "stage", "stages"), [("after_run", "Autoencoder", 1), ("before_run", "GBDist", 2)])
@pytest.mark.long
def test_signal_between_stages(tmp_path, call, stage, stages):
    """After the first stage, and after the last stage."""
    signals = SignalRecorder()
    hooks = [ActionOnCall(call, stage, lambda: signals.handle(signal.SIGTERM)), StopOnSignal(signals)]
    experiment = make_experiment(1, **make_gb_fields())
    result = experiment.run(output=tmp_path, hooks=hooks)
    assert (result.stop.exit_code, experiment.model.step) == (75, 0)
    assert sorted(path.name for path in tmp_path.glob("pretrain_*.h5")) == ["pretrain_1.h5", "pretrain_2.h5"]
    assert (tmp_path / "checkpoint.h5").exists() == (stages == 2)
    experiment = make_experiment(1, **make_gb_fields())
    assert experiment.run(output=tmp_path, hooks=[], resume=True).stop is None
    assert experiment.model.step == 5


def test_signals_during_writes(tmp_path):
    """SIGUSR1, then SIGTERM, as Slurm sends them; the hooks after StopOnSignal write the checkpoint."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]

    def send(number):
        return lambda: os.kill(os.getpid(), number)

    hooks = [ActionOnCall("after_step", "ConvnetDist", send(signal.SIGUSR1)), StopOnSignal()]
    hooks += [ActionOnCall("on_stop", "ConvnetDist", send(number)) for number in (signal.SIGTERM, signal.SIGUSR1)]
    result = make_experiment(1).run(output=tmp_path, hooks=hooks)
    assert result.stop.exit_code == 75
    assert (tmp_path / "checkpoint.h5").exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_complete_run_is_not_stopped(tmp_path):
    make_experiment(1).run(output=tmp_path, hooks=[])
    signals = SignalRecorder()
    signals.handle(signal.SIGTERM)
    assert make_experiment(1).run(output=tmp_path, hooks=[StopOnSignal(signals)], resume=True).stop is None
