"""Jobs that would hang: they end and report the reason."""

import os
import re
import sys
import time

import pytest
from availability import needs_mpirun
from cli_runs import EXPERIMENT, build_command, mpirun_environment, run_command
from processes import is_alive

from neondist.launcher.mpirun import find_mpirun

pytestmark = [needs_mpirun, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")]
SLEEPING_ACTIVATION_MODULE = """
import os, time
import neondist as nd
class Sleepy(nd.Activation):
    "The identity; its third call on rank 1 sleeps."
    calls = 0
    def fprop(self, z):
        self.calls += 1
        if self.calls == 3 and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            time.sleep(60)
        return z
    def bprop(self, y, dy):
        return dy
"""


def await_end(pids, seconds=60.0):
    """Wait until the processes have ended; return those that still run at the deadline."""
    deadline = time.monotonic() + seconds
    while (remaining := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


@pytest.mark.long
def test_sleeping_rank_is_reported(folder, pids):
    (folder / "sleepy.py").write_text(SLEEPING_ACTIVATION_MODULE)
    activation = "model.layers.0.activation=!Sleepy {}"
    modules = "--import", "write_pid.py", "--import", "sleepy.py"
    words = ["toy.yaml", "-n", 2, "--set", activation, *modules, "--stall-timeout", "5s"]
    code, _, err = run_command(build_command("run", *words), folder)
    assert code == 1
    assert re.search(r"^rank 0 of 2: no progress for 5 s .*, step 3: .*waiting (in|for) ", err, re.M)
    pattern = r"^rank 1 of 2: .* forward pass of layer 'conv1': not waiting for another rank; most recent call"
    assert re.search(pattern, err, re.M)
    assert re.search(r'^  File ".*sleepy.py", line \d+ in fprop$', err, re.M)
    assert await_end(pids()) == []


def test_ranks_with_different_files(folder):
    (folder / "other.yaml").write_text(EXPERIMENT.replace("out_channels: 2", "out_channels: 3"))
    first, second = (build_command("run", name, "--output", "out") for name in ("toy.yaml", "other.yaml"))
    mpirun = find_mpirun(os.environ).command(1)
    code, _, err = run_command([*mpirun, *first, ":", *mpirun[1:3], *second], folder, **mpirun_environment())
    assert code == 2
    assert err.count("error: the ranks disagree: rank 0 has 'conv1': ConvLayerDist") == 1
    assert "start all ranks with the same files" in err


FAULT_STATEMENT = "import os, signal\nif os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n    {}\n"
STOP_STATEMENT = "os.kill(os.getpid(), signal.SIGSTOP)"


def run_with_fault(folder, fault, early=False, expected=1):
    """Run a job whose rank 1 executes `fault` in user code or, with `early`, before any import; return stderr."""
    (folder / ("sitecustomize.py" if early else "fault.py")).write_text(FAULT_STATEMENT.format(fault))
    env = {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"} if early else {}
    words = [] if early else ["--import", "fault.py"]
    code, _, err = run_command(
        build_command("run", "toy.yaml", "-n", 2, "--stall-timeout", "3s", *words), folder, **env
    )
    assert code == expected
    return err


@pytest.mark.long
def test_rank_stopped_before_the_start_of_mpi(folder):
    assert "rank 0 of 2: no progress for 3 s (--stall-timeout): waiting in the start of MPI" in run_with_fault(
        folder, STOP_STATEMENT, True
    )


@pytest.mark.long
def test_rank_stopped_in_user_code(folder):
    err = run_with_fault(folder, STOP_STATEMENT)
    assert re.search(
        r"^rank 0 of 2: no progress for 3 s .*(: waiting in the start|; most recent call first:$)", err, re.M
    )
    assert "waiting in the start" in err or re.search(r'^  File ".*mpi.py", line \d+ in allgather$', err, re.M)
    assert "allgather" not in err or "rank 1 of 2: process " in err


@pytest.mark.long
def test_rank_interrupted_in_user_code(folder):
    """End the other ranks, which wait for it."""
    assert "no progress" not in run_with_fault(folder, "raise KeyboardInterrupt", expected=130)


@pytest.mark.long
def test_rank_that_exits_silently(folder):
    """Exit with code 0."""
    assert re.search(
        r"^error: rank 1 of 2 on \S+ exited without reporting an error: ",
        run_with_fault(folder, "os._exit(0)", expected=137),
    )
