"""A mistake in a script of the user's own, on one rank only: exit code 2, and one message."""

import os
import subprocess
import sys

import pytest
from present import needs_mpirun

from neondist.launcher.mpirun import find_mpirun

pytest.importorskip("torch")

SCRIPT = """
import torch
from torch import nn
import neondist as nd
import neondist.torch as ndt

grid = nd.ProcessGrid()
torch.manual_seed(0)
model = ndt.distribute(nn.Conv2d(1, 2, 3), (1, 1, 12, 10), grid)
x = model.scatter(torch.ones(1, 1, 12, 10))
model(x[..., 1:] if grid.rank else x)
"""


@needs_mpirun
def test_one_rank_is_wrong(tmp_path):
    script, mpirun = tmp_path / "script.py", find_mpirun(os.environ)
    script.write_text(SCRIPT)
    environment = {**os.environ, **mpirun.environment(), "OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib"}
    command = [*mpirun.command(2), sys.executable, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    message = "ShapeError: rank 1: input 0 has shape (1, 1, 6, 9), but this rank's tile of (1, 1, 12, 10) is"
    assert done.stderr.count(message) == 1, done.stderr
    assert done.stderr.count("failed and ends the job") == 1, done.stderr
