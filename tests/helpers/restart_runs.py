"""Restarted runs: generations that end as scripted, and the weights that a run has written."""

import threading
import time

import h5py

import neondist as nd
from neondist.cli.arguments import create_parser
from neondist.comm import loopback
from neondist.config import load_experiment
from neondist.launcher import members
from neondist.launcher.generations import run_generations
from neondist.launcher.supervision import JobEnding
from neondist.system.signals import SignalRecorder


class GenerationScript:
    """Generations without ranks, which end as scripted or after a change of hosts.

    Attributes
    ----------
    started : ranks by host of each generation
    signals : the signals received by the command
    """

    def __init__(self, folder, *acts):
        self.folder, self.acts, self.started = folder, list(acts), []
        self.signals = SignalRecorder()

    def write_hosts(self, text):
        (self.folder / "hosts.new").write_text(text.replace(" ", "\n") + "\n")
        (self.folder / "hosts.new").replace(self.folder / "hosts")  # readers never see half a list

    def start(self, arguments, received, environment, has_changed):
        assert environment["NEONDIST_GENERATION"] == str(arguments.generation) == str(len(self.started) + 1)
        self.started.append(dict(arguments.hosts))
        act = self.acts.pop(0)
        if isinstance(act, JobEnding):
            return act
        self.write_hosts(act)
        end = time.monotonic() + 20
        while not has_changed():
            assert time.monotonic() < end, "the change of hosts is not noticed"
            threading.Event().wait(0.005)
        return JobEnding(75, stopped_for_host_change=True)

    def run(self, *words, sleep=time.sleep):
        arguments = create_parser().parse_args(
            ["run", str(self.folder / "toy.yaml"), "--output", str(self.folder / "out"),
             "--hosts-from", str(self.folder / "discover"), *words]
        )  # fmt: skip
        arguments.signals = self.signals
        members.resolve_host_options(arguments, None)
        return run_generations(arguments, load_experiment(self.folder / "toy.yaml"), self.start, sleep)


def read_weights(path):
    """Return the arrays of the model and the optimizer in a checkpoint."""
    arrays = {}
    with h5py.File(path) as file:
        for group in ("model", "optimizer"):
            file[group].visititems(
                lambda name, item: arrays.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
    return arrays


def check_weights(path, experiment_file, ranks, settings=(), stop_at=None):
    """Compare a checkpoint, bit by bit, with the weights of an uninterrupted run on virtual ranks."""

    def train(world):
        experiment = load_experiment(experiment_file, list(settings))
        experiment.run(nd.ProcessGrid(world), hooks=[nd.StopAtStepHook(stop_at)] if stop_at else [])
        return experiment.model.state()

    weights = read_weights(path)
    for name, array in loopback.run(ranks, train)[0].items():
        assert (weights[name] == array).all(), name
