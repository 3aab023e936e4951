"""Tests of tests/mpi under mpirun, in one job per number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neondist.launcher.mpirun import find_mpirun

CASES = Path(__file__).parent / "mpi"
COMMON = "views or everything or unshared or weights or grids"
SELECTED = {
    1: (9, COMMON),
    2: (18, f"{COMMON} or collectives or redistribution or graphs or backends or error"),
    3: (4, "collectives or redistribution or debug_transport or error"),
    4: (32, ""),
    6: (7, "views or grids or everything and invariance"),
}
"""minimum number of tests and their selection, by number of ranks: all tests on four, others where ranks matter"""
TORCH_RANKS = 2


@pytest.mark.parametrize("ranks", SELECTED)
def test_under_mpirun(ranks):
    mpirun = find_mpirun(os.environ)
    # only one job imports PyTorch, which takes seconds on each rank; its kernels do not depend on ranks
    hidden = "matplotlib" if ranks == TORCH_RANKS else "matplotlib torch"
    environment = {**os.environ, **mpirun.environment(), "NEONDIST_MPI_TEST": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"NEONDIST_TESTS_HIDE": hidden, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [*mpirun.command(ranks), sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", CASES]
    command += ["-k", SELECTED[ranks][1]]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    output = process.stdout[-8000:] + process.stderr[-4000:]
    assert process.returncode == 0, output
    passed = re.findall(r"(\d+) passed", process.stdout)
    assert len(passed) == ranks, output
    assert min(map(int, passed)) >= SELECTED[ranks][0], output


MPI_ERROR_SCRIPT = """
import os, sys
import neondist as nd
from neondist.comm import mpi

def fail(library):
    if library.COMM_WORLD.Get_rank() == library.COMM_WORLD.Get_size() - 1:
        raise library.Exception(library.ERR_INTERN)
    library.COMM_WORLD.Barrier()  # waits for the last rank

mpi.unlink_segments = fail
nd.ProcessGrid()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_mpi_error_during_start(ranks, tmp_path):
    """End the job on all ranks at once, with MPI's own message."""
    (tmp_path / "script.py").write_text(MPI_ERROR_SCRIPT)
    mpirun = find_mpirun(os.environ)
    environment = {**os.environ, **mpirun.environment(), "OMP_NUM_THREADS": "1"}
    command = [*mpirun.command(ranks), sys.executable, tmp_path / "script.py"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1, process.stderr
    assert "MPI_ERR_INTERN" in process.stderr
    assert "needs mpi4py" not in process.stderr
    expected = "MPI failed to start (" if ranks == 1 else "rank 1 of 2 failed and ends the job"
    assert expected in process.stderr


DIVERGING_SCRIPT = """
import sys
import numpy as np
import neondist as nd

grid, event = nd.ProcessGrid(), sys.argv[1]
array = nd.GlobalArray(grid, (1, 6, 6, 1), nd.Window(3, padding=1))
tile = array.scatter(np.ones((1, 6, 6, 1)) * (grid.rank if event == "other images" else 1))
if grid.rank == 1 and event == "exit":
    sys.exit(0)
if grid.rank == 1 and event == "ProcessGrid.close":
    grid.close()
if event != "none":
    array.gather(tile)
sys.exit(3 * (event == "none"))
"""


@pytest.mark.parametrize("event", ["none", "exit", "ProcessGrid.close", "other images"])
@pytest.mark.long
def test_diverging_ranks(event, tmp_path):
    """All ranks end with a message that names the rank and both calls; a common exit code is kept."""
    (tmp_path / "script.py").write_text(DIVERGING_SCRIPT)
    mpirun = find_mpirun(os.environ)
    environment = {**os.environ, **mpirun.environment(), "OMP_NUM_THREADS": "1"}
    command = [*mpirun.command(2), sys.executable, tmp_path / "script.py", event]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    detail = "the array given to scatter is of checksum"
    message = {"none": "", "other images": f"rank 1: {detail}"}.get(
        event, f"rank 1: the call is {event}, but gather on rank 0"
    )
    assert message in process.stderr
    assert process.returncode == (3 if event == "none" else 2), process.stderr
