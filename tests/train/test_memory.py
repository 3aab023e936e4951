"""Constant memory of a long run on two virtual ranks in one process."""

import os
import subprocess
import sys

import pytest

SCRIPT = r"""
import sys
import psutil
import neondist as nd
from neondist.comm import loopback
from neondist.train import Hook, StopOnSignal, TimeLimit, Watchdog

def resident_memory():
    return psutil.Process().memory_info().rss / 2**20

class Growth(Hook):
    def after_epoch(self, run):
        if run.epoch == 4:  # 200 steps, 4 evaluations and checkpoints: all lasting objects exist
            self.before = resident_memory()

    def after_run(self, run):
        # a single write, because two threads print
        sys.stdout.write(f"rank {run.grid.rank}: {run.step} steps, {resident_memory() - self.before:.2f} MB more\n")

def train(transport):
    layers = [
        nd.ConvLayerDist(2, 3, padding=1, activation=nd.ReLU()), nd.LocalFilteringLayerDist(2, 3), nd.FCLayerDist(3),
    ]
    model = nd.ConvnetDist(layers, optimizer=nd.Adam(0.001), backend="numpy")
    data = nd.Synthetic((6, 5, 1), classes=3, train=398, test=20)  # the last batch is smaller
    experiment = nd.FitExperiment(data, model, batch_size=8, epochs=10)
    hooks = [Growth(), StopOnSignal(), Watchdog(), TimeLimit(3600)]
    experiment.run(experiment.open_grid(transport), output=sys.argv[1], hooks=hooks)

loopback.run(2, train)
"""


@pytest.mark.long
def test_memory_growth_over_500_steps(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=480)
    assert process.returncode == 0, process.stderr
    lines = [line.split() for line in process.stdout.splitlines() if line.startswith("rank ")]
    assert len(lines) == 2, process.stdout
    for _, _, steps, _, growth, *_ in lines:
        assert int(steps) == 500
        assert float(growth) <= 1.1, process.stdout
