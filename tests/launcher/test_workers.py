"""Workers beside servers: one that is killed is started again, and each record is applied once."""

from cli_runs import call, neondist

EXPERIMENT = """!FitExperiment
dataset: !Synthetic {shape: [6, 6, 1], classes: 2, train: 24, test: 4}
model: !ConvnetDist {layers: [!FCLayerDist {out_features: 2, activation: !Fails {}}], optimizer: !SGD {}}
grid: {replicas: 2}
batch_size: 4
epochs: 2
strategy: !PS {sync: false}
"""
FAILS = """
import os
import signal

import neondist as nd


class Fails(nd.Activation):
    "The identity; the process that comes to its third batch first is killed there."
    batches = 0

    def fprop(self, z):
        self.batches += 1
        if self.batches == 3:
            try:
                os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return z

    def bprop(self, y, dy):
        return dy
"""


def test_a_worker_that_is_killed_is_started_again(tmp_path):
    (tmp_path / "job.yaml").write_text(EXPERIMENT)
    (tmp_path / "fails.py").write_text(FAILS)
    code, out, err = call(neondist("run", "job.yaml", "--import", "fails.py", "-n", 2, "--output", "run"), tmp_path)
    assert code == 0, err
    assert "was killed; started again" in err
    assert "applied: 24 records in each of 2 epochs, each once; 1 workers started again" in out, err
    assert (tmp_path / "killed").exists()
    assert (tmp_path / "run/complete.json").exists()
