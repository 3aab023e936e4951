"""A job that would hang ends, and says why."""

import os
import re
import sys
import time

import pytest
from cli_runs import EXPERIMENT, call, mpirun_env, needs_mpirun, neondist
from processes import alive

from neondist.launcher.mpirun import find_mpirun

pytestmark = [needs_mpirun, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and /dev/shm")]
TELL = "import os, pathlib\npathlib.Path(f'pid{os.getpid()}').write_text(os.environ.get('OMPI_COMM_WORLD_RANK', ''))\n"
SLEEPS = """
import os, time
import neondist as nd
class Sleepy(nd.Activation):
    "The identity; the third time it sleeps on rank 1."
    calls = 0
    def fprop(self, z):
        self.calls += 1
        if self.calls == 3 and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            time.sleep(60)
        return z
    def bprop(self, y, dy):
        return dy
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "sleeps.py").write_text(TELL + SLEEPS)
    return tmp_path


def clean(pids, seconds=60.0):
    """Wait until the processes are gone; return those that are not in time."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.long
def test_a_rank_that_sleeps_is_reported(folder):
    activation = "model.layers.0.activation=!Sleepy {}"
    words = ["toy.yaml", "-n", 2, "--set", activation, "--import", "sleeps.py", "--stall-timeout", "5s"]
    code, _, err = call(neondist("run", *words), folder)
    assert code == 1
    assert re.search(r"^rank 0 of 2: no progress for 5 s .*, step 3: .*waits in ", err, re.M)
    told = r"^rank 1 of 2: .* forward pass of layer 'conv1': waits for no other rank, most recent call"
    assert re.search(told, err, re.M)
    assert re.search(r'^  File ".*sleeps.py", line \d+ in fprop$', err, re.M)
    assert clean([int(path.name[3:]) for path in folder.glob("pid*")]) == []


def test_files_that_differ_by_rank(folder):
    (folder / "other.yaml").write_text(EXPERIMENT.replace("out_channels: 2", "out_channels: 3"))
    one, other = (neondist("run", name, "--output", "out") for name in ("toy.yaml", "other.yaml"))
    mpirun = find_mpirun(os.environ).command(1)
    code, _, err = call([*mpirun, *one, ":", *mpirun[1:3], *other], folder, **mpirun_env())
    assert code == 2
    assert err.count("error: the ranks disagree: rank 0 has 'conv1': ConvLayerDist") == 1
    assert "start all ranks with the same files" in err


FAULT = "import os, signal\nif os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n    {}\n"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


def job_with(folder, fault, early=False, expected=1):
    """Run a job of two ranks, one of which does `fault` in code of the user's, or before anything is imported."""
    (folder / ("sitecustomize.py" if early else "fault.py")).write_text(FAULT.format(fault))
    more = {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"} if early else {}
    words = [] if early else ["--import", "fault.py"]
    code, _, err = call(neondist("run", "toy.yaml", "-n", 2, "--stall-timeout", "3s", *words), folder, **more)
    assert code == expected
    return err


@pytest.mark.long
def test_a_rank_that_is_stopped_before_it_starts_mpi(folder):
    assert "rank 0 of 2: no progress for 3 s (--stall-timeout): waits in the start of MPI" in job_with(
        folder, STOP, True
    )


@pytest.mark.long
def test_a_rank_that_is_stopped_in_code_of_the_users(folder):
    err = job_with(folder, STOP)
    assert re.search(
        r"^rank 0 of 2: no progress for 3 s .*(: waits in the start|, most recent call first:$)", err, re.M
    )
    assert "waits in the start" in err or re.search(r'^  File ".*mpi.py", line \d+ in allgather$', err, re.M)
    assert "allgather" not in err or "rank 1 of 2: is stopped (process " in err


@pytest.mark.long
def test_a_rank_that_leaves_without_a_word(folder):
    """Its exit code is 0."""
    assert re.search(
        r"^error: rank 1 of 2 on \S+ exited without reporting an error: ", job_with(folder, "os._exit(0)", expected=137)
    )
