"""Detection of stalled ranks, their reports, and the end of the job."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
from toy_training import make_experiment

from neondist.comm import ProcessGrid, loopback
from neondist.data import Synthetic
from neondist.errors import ConfigError, RemoteError
from neondist.layers import ActivationLayerDist, ConvLayerDist, FCLayerDist, LocalFilteringLayerDist, ReLU
from neondist.metrics import F1
from neondist.models import ConvnetDist, GBDist
from neondist.optim import SGD, CosineDecay
from neondist.train import FitExperiment, Hook, Watchdog


class SleepingLayerDist(ActivationLayerDist):
    """Activation in which tile 1 sleeps in fprop or bprop of the third step."""

    phase, wake_up = "", None

    def forward(self, ctx, view):
        if ctx.step == 2 and self.phase == "fprop" and self.context.grid.tile == 1:
            self.wake_up.wait(60)
        return super().forward(ctx, view)

    def backward(self, ctx, dy):
        if ctx.step == 2 and self.phase == "bprop" and self.context.grid.tile == 1:
            self.wake_up.wait(60)
        return super().backward(ctx, dy)


class SleepingHook(Hook):
    def __init__(self, wake_up):
        self.wake_up = wake_up

    def after_step(self, run):
        if run.step == 2 and run.grid.rank == 1:
            self.wake_up.wait(60)


def collect_reports(phase):
    """Let a rank of three sleep; return the reports in the order of ranks."""
    wake_up, reports = threading.Event(), []

    def layers():
        sleeping = SleepingLayerDist(ReLU(), name="sleeps")
        sleeping.phase, sleeping.wake_up = phase, wake_up
        return [ConvLayerDist(2, 3, name="one"), sleeping, ConvLayerDist(2, 3, name="two"), FCLayerDist(4, name="out")]

    def end(world, patience):
        deadline = time.monotonic() + 60
        while len(reports) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        wake_up.set()
        world.world.fail_waiting_ranks()

    def body(transport):
        experiment = make_experiment(2, layers=layers)
        hooks = [Watchdog(1.0, end, reports.append), *([SleepingHook(wake_up)] if phase == "hook" else [])]
        experiment.run(ProcessGrid(transport, rows=3, cols=1), hooks=hooks)

    with pytest.raises((RemoteError, SystemExit)):
        loopback.run(3, body, at_once=3)  # a sleeping rank keeps its turn
    return sorted(reports)


def test_stall_in_forward_pass_is_reported():
    for rank, text in enumerate(reports := collect_reports("fprop")):
        assert text.startswith(
            f"rank {rank} of 3: no progress for 1 s (--stall-timeout), step 3: forward pass of layer"
        )
    assert "layer 'two': waiting for rank 1 in the halo exchange" in reports[0]
    assert "layer 'sleeps': not waiting for another rank; most recent call first:\n" in reports[1]
    assert re.search(r'test_watchdog.py", line \d+ in forward$', reports[1], re.M)
    assert "call first" not in reports[0] + reports[2]
    assert "layer 'two': waiting for rank" in reports[2]
    assert ["use --debug-halo to find" in text for text in reports] == [True, False, False]


def test_stall_in_backward_pass_is_reported():
    reports = collect_reports("bprop")
    assert "step 3: backward pass of layer 'sleeps': not waiting for another rank; most" in reports[1]
    assert re.search(r'test_watchdog.py", line \d+ in backward$', reports[1], re.M)
    assert re.search(
        "step 3: (backward pass of layer 'one': waiting in|sum of gradients: waiting in a sum over all 3)", reports[0]
    )


def test_stall_between_steps_is_reported():
    reports = collect_reports("hook")
    assert "step 3; most recent call first:\n" in reports[1]
    assert re.search(r'test_watchdog.py", line \d+ in after_step$', reports[1], re.M)
    for rank in (0, 2):
        assert reports[rank].startswith(
            f"rank {rank} of 3: no progress for 1 s (--stall-timeout), step 3: waiting in a sum over all 3 ranks"
        )
        assert "call first" not in reports[rank]


def test_progressing_run_is_not_reported():
    reports = []
    make_experiment(2).run(hooks=[Watchdog(60.0, lambda *_: reports.append("end"), reports.append)])
    assert reports == []
    for thread in threading.enumerate():
        if thread.name == "watchdog":
            thread.join(60)
            assert not thread.is_alive()


class SimulatedClock:
    """Clock that advances while the watchdog waits, for a limited number of waits."""

    def __init__(self, waits_left):
        self.now, self.waits_left = 0.0, waits_left

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now, self.waits_left = self.now + seconds, self.waits_left - 1
        return self.waits_left < 0


class PeriodicWork:
    """Work that begins every `every` seconds."""

    is_waiting = False

    def __init__(self, clock, every):
        self.clock, self.every = clock, every

    @property
    def event_count(self):
        return int(self.clock.now // self.every)


@pytest.mark.parametrize(("every", "end"), [(8, None), (13, 12), (1000, 12)])
def test_progress_resets_the_timeout(monkeypatch, every, end):
    """Progress every `every` seconds; the job ends after more than 10 s without any."""
    clock, reports = SimulatedClock(waits_left=300), []
    for name, value in ("time", clock), ("count_disk_bytes", lambda peers: 0), ("list_file_states", lambda folder: 0):
        monkeypatch.setattr(f"neondist.train.callbacks.watchdog.{name}", value)
    watchdog = Watchdog(10.0, lambda *_: reports.append(clock.now), reports.append)
    watchdog.current_run, watchdog.current_activity = SimpleNamespace(step=6), PeriodicWork(clock, every)
    watchdog._watch(clock)
    assert reports[1:] == ([] if end is None else [pytest.approx(end)])
    assert [text.partition("(")[0] for text in reports[:1]] == ["rank 0 of 1: no progress for 10 s "] * (
        end is not None
    )


class SlowDisk(Hook):
    """Hook that writes for longer than the timeout, a few bytes at a time."""

    def __init__(self, path):
        self.path = path

    def after_step(self, run):
        if run.step == 2:
            with self.path.open("w") as file:
                for _ in range(12):
                    time.sleep(0.25)
                    print("bytes", file=file, flush=True)


def test_slow_checkpoint_is_not_reported(tmp_path):
    reports = []
    hooks = [
        Watchdog(2.0, lambda *_: reports.append("end"), reports.append, folder=tmp_path),
        SlowDisk(tmp_path / "slow"),
    ]
    make_experiment(1).run(hooks=hooks)
    assert reports == []


SETTING_DIFFERENCES = {
    "seed": ({"seed": 3}, "rank 0 has seed: 0.*, but rank 2 has seed: 3"),
    "batch_size": ({"batch_size": 9}, "rank 0 has batch_size: 10.*, but rank 2 has batch_size: 9"),
    "layers": (
        {"layers": lambda: [ConvLayerDist(3, 5, padding=1), FCLayerDist(4)]},
        r"rank 0 has 'conv1': ConvLayerDist .*rank 2 has 'conv1': ConvLayerDist",
    ),
    "scheme": (
        {"model": lambda layers, **more: ConvnetDist(layers, scheme="tower", **more)},
        "rank 0 has scheme of 'conv1': halo, but rank 2 has scheme of 'conv1': tower",
    ),
    "samples": (
        {"dataset": lambda: Synthetic((13, 11, 2), classes=4, train=44, test=13)},
        "rank 0 has dataset: Synthetic .*train: 45, .*, but rank 2 has dataset: Synthetic .*train: 44, ",
    ),
    "checkpoint": ({"checkpoint": {"every_steps": 2}}, "rank 0 has .* rank 2 has .*every_steps=2"),
    "schedule": (
        {"optimizer": SGD(0.05, momentum=0.9, schedule=CosineDecay(9))},
        "rank 0 has optimizer: SGD .* schedule: None, but rank 2 has .* schedule: CosineDecay epochs: 9",
    ),
    "metrics": ({"metrics": [F1()]}, "rank 0 has .*, but rank 2 has metric: F1"),
    "accumulate": ({"accumulate": 2}, "rank 0 has sync: .* accumulate: 1,.*, but rank 2 has .* accumulate: 2,"),
    "recompute": ({"recompute": True}, "rank 0 has sync: .* recompute: False,.* rank 2 has .* recompute: True,"),
    "strips": ({"strips": 3}, "rank 0 has sync: .* strips: None,.* rank 2 has .* strips: 3,"),
    "memory": ({"memory": "3GiB"}, "rank 0 has sync: .* memory: None, but rank 2 has .* memory: 3"),
    "sync": ({"sync": "bucketed"}, "rank 0 has sync: .*, accumulate.*, but rank 2 has sync: Bucketed"),
}


@pytest.mark.parametrize("name", SETTING_DIFFERENCES)
def test_different_settings_of_ranks_are_rejected(name):
    fields, message = SETTING_DIFFERENCES[name]

    def body(transport):
        experiment = make_experiment(1, **(fields if transport.rank == 2 else {}))
        with pytest.raises(ConfigError, match=rf"the ranks disagree: {message}.*start all ranks with") as caught:
            experiment.run(experiment.open_grid(transport), hooks=[])
        return str(caught.value), caught.value.raised_on_all_ranks

    assert len(set(loopback.run(3, body))) == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_pretrain_epochs", (1, 2)),
        ("sparsity", (0.1, 0.5)),
        ("pretrain_optimizer", (SGD(0.1, schedule=CosineDecay(2)), SGD(0.1, schedule=CosineDecay(3)))),
    ],
)
def test_different_pretraining_of_ranks_is_rejected(name, values):
    def body(transport):
        layers = [LocalFilteringLayerDist(2, 3), FCLayerDist(4)]
        model = GBDist(layers, dtype="float64", **{name: values[transport.rank]})
        experiment = FitExperiment(Synthetic((9, 8, 1), classes=4, train=6, test=2), model, batch_size=2)
        with pytest.raises(
            ConfigError, match=r"the ranks disagree: rank 0 has pretraining: .* rank 1 has pretraining: "
        ):
            experiment.run(experiment.open_grid(transport), hooks=[])

    loopback.run(2, body)


def test_different_grids_of_ranks_are_rejected():
    def body(transport):
        experiment = make_experiment(1, **({"grid": {"rows": 1}} if transport.rank == 2 else {}))
        with pytest.raises(
            ConfigError, match="rank 2: rows is 1, but None on rank 0; all ranks must make the same call"
        ):
            experiment.open_grid(transport)

    loopback.run(3, body)
