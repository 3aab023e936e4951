"""However a job ends, its processes go, and Open MPI's files in the temporary folder and in shared memory."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runs import EXPERIMENT, mpirun_env, needs_mpirun, neondist, start
from processes import alive, finish

from neondist.comm.segments import BACKING
from neondist.launcher.cleanup import USER_TMPDIR, job_folders, restore_tmpdir
from neondist.launcher.mpirun import Mpirun

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
LIMIT = 60.0
LAUNCHER = """
import os, sys
from neondist.launcher.cleanup import job_folders
from neondist.launcher.mpirun import find_mpirun
from neondist.launcher.supervise import supervise
mpirun = find_mpirun(os.environ)
env = {**mpirun.environment(), **os.environ}
with job_folders(mpirun, env) as job:
    command = [*mpirun.command(2), sys.executable, "-c", sys.argv[1]]
    sys.exit(supervise(command, {**env, **job.environment}, job.inherited).code)
"""
# with names, as in the moment before the ranks know each other
RANK = """
import os, time
from mpi4py import MPI
from neondist.comm.segments import BACKING, _mapped_files
print("rank", os.getpid(), os.getppid(), os.environ[BACKING], *_mapped_files(), flush=True)
for _ in range(600):
    MPI.COMM_WORLD.allreduce(1)
    time.sleep(0.05)
"""


def wait(condition):
    end = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@linux
@needs_mpirun
@pytest.mark.parametrize("killed", ["launcher", "mpirun", "launcher and mpirun", "rank", "everyone", "nobody"])
@pytest.mark.long
def test_nothing_is_left(tmp_path, killed):
    rank = RANK.replace("600", "0") if killed == "nobody" else RANK
    launcher = start([sys.executable, "-c", LAUNCHER, rank], tmp_path, TMPDIR=str(tmp_path))
    told = [launcher.stdout.readline().split() for _ in range(2)]
    ranks, mpirun = [int(words[1]) for words in told], int(told[0][2])
    files = [Path(name) for name in told[0][3:]]
    if killed != "nobody":
        assert len(files) == 3, "the folder, and a segment of each rank"
        assert [file.exists() for file in files] == [True] * 3
        assert len(list(tmp_path.iterdir())) == 1
    whom = {"launcher": [launcher.pid], "mpirun": [mpirun], "launcher and mpirun": [launcher.pid, mpirun],
            "rank": ranks[:1], "everyone": [launcher.pid, mpirun, *ranks], "nobody": []}  # fmt: skip
    for pid in whom[killed]:
        os.kill(pid, signal.SIGKILL)
    finish(launcher, LIMIT)
    assert (launcher.returncode == 0) == (killed == "nobody")
    assert wait(lambda: not any(map(alive, [mpirun, *ranks])))
    assert wait(lambda: not any(file.exists() for file in files) and not list(tmp_path.iterdir()))


@linux
@needs_mpirun
def test_a_rank_ends_with_mpirun_in_the_middle_of_a_long_computation(tmp_path):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    (tmp_path / "long.py").write_text(
        "import ctypes, os\n"
        "if 'OMPI_COMM_WORLD_RANK' in os.environ:\n"
        "    print('rank', os.getpid(), os.getppid(), flush=True)\n"
        "    ctypes.CDLL(None).sleep(60)\n"
    )
    launcher = start(neondist("run", "toy.yaml", "-n", 2, "--import", "long.py"), tmp_path)
    told = [launcher.stdout.readline().split() for _ in range(2)]
    os.kill(int(told[0][2]), signal.SIGKILL)
    finish(launcher, LIMIT)
    assert launcher.returncode == 137
    assert wait(lambda: not any(alive(int(words[1])) for words in told))


@linux
@needs_mpirun
def test_a_process_alone_leaves_nothing(tmp_path):
    """Without mpirun, Open MPI 5 itself removes neither its folder nor the shared memory that it has with nobody."""
    script = (
        "import re, neondist as nd\n"
        "assert nd.ProcessGrid().size == 1\n"
        "print(re.findall(r'/\\S*_segment.*', open('/proc/self/maps').read()))"
    )
    env = {**os.environ, **mpirun_env(), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not re.findall(r"_segment\S+'", done.stdout), "it still has a name"
    assert not list(tmp_path.iterdir())


def test_other_mpis_get_nothing():
    with job_folders(Mpirun("/x/mpiexec", "HYDRA build details: Version: 4.2.0"), {}) as job:
        assert (job.environment, job.inherited) == ({}, ())


def test_ranks_get_the_users_temporary_folder_and_the_users_choice_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    user = {"TMPDIR": "/users", BACKING: "/chosen"}
    with job_folders(Mpirun("/x/mpirun", "mpirun (Open MPI) 5.0.11"), user) as job:
        assert BACKING not in job.environment
        env = {**user, **job.environment}
        assert Path(env["TMPDIR"]).parent == tmp_path
        restore_tmpdir(env)
        assert env == user
        nothing = {"TMPDIR": "/x", USER_TMPDIR: ""}
        restore_tmpdir(nothing)
        assert nothing == {}
    assert not list(tmp_path.iterdir())
