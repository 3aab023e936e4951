"""Start the tests of tests/mpi under mpirun: one mpirun for each rank count, many cases in each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neondist.launcher.mpirun import find_mpirun

CASES = Path(__file__).parent / "mpi"
SMALL = "views or everything or unshared or weights or grids"
CHOSEN = {
    1: (9, SMALL),
    2: (18, f"{SMALL} or collectives or redistribution or graphs or backends or error"),
    3: (4, "collectives or redistribution or watched or error"),
    4: (32, ""),
    6: (7, "views or grids or everything and invariance"),
}
"""by number of ranks, how many tests at least, and which: all of four, with rows and columns; of others what differs"""
WITH_TORCH = 2


@pytest.mark.parametrize("ranks", CHOSEN)
def test_under_mpirun(ranks):
    mpirun = find_mpirun(os.environ)
    # each rank would spend seconds on importing PyTorch, whose kernels know nothing of ranks: one rank count has it
    hidden = "matplotlib" if ranks == WITH_TORCH else "matplotlib torch"
    environment = {**os.environ, **mpirun.environment(), "NEONDIST_MPI_TEST": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"NEONDIST_TESTS_HIDE": hidden, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [*mpirun.command(ranks), sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", CASES]
    command += ["-k", CHOSEN[ranks][1]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    said = done.stdout[-8000:] + done.stderr[-4000:]
    assert done.returncode == 0, said
    passed = re.findall(r"(\d+) passed", done.stdout)
    assert len(passed) == ranks, said
    assert min(map(int, passed)) >= CHOSEN[ranks][0], said


PARTING = """
import sys
import numpy as np
import neondist as nd

grid, how = nd.ProcessGrid(), sys.argv[1]
array = nd.GlobalArray(grid, (1, 6, 6, 1), nd.Window(3, padding=1))
tile = array.scatter(np.ones((1, 6, 6, 1)) * (grid.rank if how == "other images" else 1))
if grid.rank == 1 and how == "exit":
    sys.exit(0)
if grid.rank == 1 and how == "ProcessGrid.close":
    grid.close()
if how != "none":
    array.gather(tile)
sys.exit(3 * (how == "none"))
"""


@pytest.mark.parametrize("how", ["none", "exit", "ProcessGrid.close", "other images"])
@pytest.mark.long
def test_ranks_that_part_ways(how, tmp_path):
    """All end, with a message that names the rank and both calls; a common exit code stays."""
    (tmp_path / "script.py").write_text(PARTING)
    mpirun = find_mpirun(os.environ)
    environment = {**os.environ, **mpirun.environment(), "OMP_NUM_THREADS": "1"}
    command = [*mpirun.command(2), sys.executable, tmp_path / "script.py", how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    given = "the array given to scatter is of checksum"
    said = {"none": "", "other images": f"rank 1: {given}"}.get(how, f"rank 1: the call is {how}, but gather on rank 0")
    assert said in done.stderr
    assert done.returncode == (3 if how == "none" else 2), done.stderr
