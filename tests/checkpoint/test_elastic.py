"""Runs that move from 4 ranks to 6, to 1 and to 4 within epochs, against uninterrupted runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from availability import needs_mpirun
from elastic_runs import GRIDS, STEPS_BY_STAGE, check_arrays, check_curves, run_stage, run_uninterrupted

from neondist.comm import loopback
from neondist.launcher.mpirun import find_mpirun


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Folders and arrays of the uninterrupted runs, by kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in STEPS_BY_STAGE}
    return {kind: (folder, run_uninterrupted(kind, folder)) for kind, folder in folders.items()}


def run_stages(kind, folder, first=0, end=None):
    """Run stages from `first` on virtual ranks; return the full arrays."""
    for stage, (ranks, _) in list(enumerate(GRIDS))[first:end]:
        state = loopback.run(ranks, lambda world, stage=stage: run_stage(kind, stage, world, folder))[0]
    return state


@pytest.mark.parametrize("kind", STEPS_BY_STAGE)
@pytest.mark.long
def test_runs_move_between_virtual_ranks(tmp_path, uninterrupted, kind):
    folder, expected = uninterrupted[kind]
    check_arrays(run_stages(kind, tmp_path), expected)
    check_curves(tmp_path, folder)


@needs_mpirun
@pytest.mark.long
def test_runs_move_between_mpi_ranks(tmp_path, uninterrupted):
    """The stage on 6 ranks runs under mpirun, the other stages on virtual ranks."""
    mpirun = find_mpirun(os.environ)
    env = os.environ | mpirun.environment() | {"OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "helpers" / "elastic_runs.py"
    for kind in uninterrupted:
        run_stages(kind, tmp_path / kind, end=1)
    command = [*mpirun.command(GRIDS[1][0]), sys.executable, script, tmp_path, "1"]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    for kind, (folder, expected) in uninterrupted.items():
        check_arrays(run_stages(kind, tmp_path / kind, 2), expected)
        check_curves(tmp_path / kind, folder)
