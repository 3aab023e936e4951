"""A long run holds its memory flat: two virtual ranks in one process, whose memory is that of both."""

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

def resident():
    return psutil.Process().memory_info().rss / 2**20

class Growth(Hook):
    def after_epoch(self, run):
        if run.epoch == 4:  # 200 steps, 4 evaluations and checkpoints: everything has been made that is kept
            self.before = resident()

    def after_run(self, run):
        # one write: two threads print
        sys.stdout.write(f"rank {run.grid.rank}: {run.step} steps, {resident() - self.before:.2f} MB more\n")

def rank(transport):
    layers = [
        nd.ConvLayerDist(2, 3, padding=1, activation=nd.ReLU()), nd.LocalFilteringLayerDist(2, 3), nd.FCLayerDist(3),
    ]
    model = nd.ConvnetDist(layers, optimizer=nd.Adam(0.001), backend="numpy")
    data = nd.Synthetic((6, 5, 1), classes=3, train=398, test=20)  # the last batch is a small one
    run = nd.FitExperiment(data, model, batch_size=8, epochs=10)
    run.run(run.open_grid(transport), output=sys.argv[1], hooks=[Growth(), StopOnSignal(), Watchdog(), TimeLimit(3600)])

loopback.run(2, rank)
"""


@pytest.mark.long
def test_five_hundred_steps(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(lines) == 2, done.stdout
    for _, _, steps, _, growth, *_ in lines:
        assert int(steps) == 500
        assert float(growth) <= 1.1, done.stdout
