"""A run that moves from 4 ranks to 6, to 1 and to 4 again, in the middle of epochs, has the curve of one that stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_runs import PLACES, STEPS, same_arrays, same_curves, stay, stretch
from present import needs_mpirun

from neondist.comm import loopback
from neondist.launcher.mpirun import find_mpirun


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """Folders and arrays of the runs that stay, by kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in STEPS}
    return {kind: (folder, stay(kind, folder)) for kind, folder in folders.items()}


def virtually(kind, folder, first=0, end=None):
    """Run the stretches from one on, on virtual ranks; return the whole arrays."""
    for at, (ranks, _) in list(enumerate(PLACES))[first:end]:
        state = loopback.run(ranks, lambda world, at=at: stretch(kind, at, world, folder))[0]
    return state


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.long
def test_moving_between_virtual_ranks(tmp_path, still, kind):
    folder, expected = still[kind]
    same_arrays(virtually(kind, tmp_path), expected)
    same_curves(tmp_path, folder)


@needs_mpirun
@pytest.mark.long
def test_moving_between_ranks_of_mpirun(tmp_path, still):
    """Both kinds in the job that goes on with 6 ranks; the other stretches on virtual ranks."""
    mpirun = find_mpirun(os.environ)
    env = os.environ | mpirun.environment() | {"OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "helpers" / "elastic_runs.py"
    for kind in still:
        virtually(kind, tmp_path / kind, end=1)
    command = [*mpirun.command(PLACES[1][0]), sys.executable, script, tmp_path, "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for kind, (folder, expected) in still.items():
        same_arrays(virtually(kind, tmp_path / kind, 2), expected)
        same_curves(tmp_path / kind, folder)
