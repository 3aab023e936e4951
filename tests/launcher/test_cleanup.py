"""Removal of processes and of Open MPI's temporary files and shared memory, however a job ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from availability import needs_mpirun
from cli_runs import EXPERIMENT, build_command, mpirun_environment, start_command
from processes import communicate, is_alive
from waiting import wait_until

from neondist.comm.shared_memory import BACKING_DIR_VARIABLE
from neondist.launcher.cleanup import USER_TMPDIR_VARIABLE, create_temporary_job_folders, restore_tmpdir
from neondist.launcher.mpirun import Mpirun

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TIME_LIMIT_SECONDS = 60.0
LAUNCHER_SCRIPT = """
import os, sys
from neondist.launcher.cleanup import create_temporary_job_folders
from neondist.launcher.mpirun import find_mpirun
from neondist.launcher.supervision import supervise_command
mpirun = find_mpirun(os.environ)
env = {**mpirun.environment(), **os.environ}
with create_temporary_job_folders(mpirun, env) as job:
    command = [*mpirun.command(2), sys.executable, "-c", sys.argv[1]]
    sys.exit(supervise_command(command, {**env, **job.environment}, job.inherited_descriptors).exit_code)
"""
# segments still have names, as before all ranks are connected
RANK_SCRIPT = """
import os, time
from mpi4py import MPI
from neondist.comm.shared_memory import BACKING_DIR_VARIABLE, _mapped_segment_files
print("rank", os.getpid(), os.getppid(), os.environ[BACKING_DIR_VARIABLE], *_mapped_segment_files(), flush=True)
for _ in range(600):
    MPI.COMM_WORLD.allreduce(1)
    time.sleep(0.05)
"""


@linux
@needs_mpirun
@pytest.mark.parametrize("killed", ["launcher", "mpirun", "launcher and mpirun", "rank", "all", "none"])
@pytest.mark.long
def test_no_process_or_file_remains(tmp_path, killed):
    rank = RANK_SCRIPT.replace("600", "0") if killed == "none" else RANK_SCRIPT
    launcher = start_command([sys.executable, "-c", LAUNCHER_SCRIPT, rank], tmp_path, TMPDIR=str(tmp_path))
    reports = [launcher.stdout.readline().split() for _ in range(2)]
    ranks, mpirun = [int(words[1]) for words in reports], int(reports[0][2])
    files = [Path(name) for name in reports[0][3:]]
    if killed != "none":
        assert len(files) == 3, "a folder, and a segment of each rank"
        assert [file.exists() for file in files] == [True] * 3
        assert len(list(tmp_path.iterdir())) == 1
    victims = {"launcher": [launcher.pid], "mpirun": [mpirun], "launcher and mpirun": [launcher.pid, mpirun],
            "rank": ranks[:1], "all": [launcher.pid, mpirun, *ranks], "none": []}  # fmt: skip
    for pid in victims[killed]:
        os.kill(pid, signal.SIGKILL)
    communicate(launcher, TIME_LIMIT_SECONDS)
    assert (launcher.returncode == 0) == (killed == "none")
    wait_until(lambda: not any(map(is_alive, [mpirun, *ranks])), TIME_LIMIT_SECONDS)
    wait_until(lambda: not any(file.exists() for file in files) and not list(tmp_path.iterdir()), TIME_LIMIT_SECONDS)


@linux
@needs_mpirun
def test_rank_ends_with_mpirun_during_a_computation(tmp_path):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    (tmp_path / "long.py").write_text(
        "import ctypes, os\n"
        "if 'OMPI_COMM_WORLD_RANK' in os.environ:\n"
        "    print('rank', os.getpid(), os.getppid(), flush=True)\n"
        "    ctypes.CDLL(None).sleep(60)\n"
    )
    launcher = start_command(build_command("run", "toy.yaml", "-n", 2, "--import", "long.py"), tmp_path)
    reports = [launcher.stdout.readline().split() for _ in range(2)]
    os.kill(int(reports[0][2]), signal.SIGKILL)
    communicate(launcher, TIME_LIMIT_SECONDS)
    assert launcher.returncode == 137
    wait_until(lambda: not any(is_alive(int(words[1])) for words in reports), TIME_LIMIT_SECONDS)


@linux
@needs_mpirun
def test_single_process_leaves_no_file(tmp_path):
    """Start without mpirun, where Open MPI 5 itself removes neither its folder nor its shared memory."""
    script = (
        "import re, neondist as nd\n"
        "assert nd.ProcessGrid().size == 1\n"
        "print(re.findall(r'/\\S*_segment.*', open('/proc/self/maps').read()))"
    )
    env = {**os.environ, **mpirun_environment(), "TMPDIR": str(tmp_path)}
    process = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert not re.findall(r"_segment\S+'", process.stdout), "the segment still has a name"
    assert not list(tmp_path.iterdir())


def test_other_mpi_libraries_get_no_folder():
    with create_temporary_job_folders(Mpirun("/x/mpiexec", "HYDRA build details: Version: 4.2.0"), {}) as job:
        assert (job.environment, job.inherited_descriptors) == ({}, ())


def test_ranks_keep_settings_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    user = {"TMPDIR": "/users", BACKING_DIR_VARIABLE: "/chosen"}
    with create_temporary_job_folders(Mpirun("/x/mpirun", "mpirun (Open MPI) 5.0.11"), user) as job:
        assert BACKING_DIR_VARIABLE not in job.environment
        env = {**user, **job.environment}
        assert Path(env["TMPDIR"]).parent == tmp_path
        restore_tmpdir(env)
        assert env == user
        unset = {"TMPDIR": "/x", USER_TMPDIR_VARIABLE: ""}
        restore_tmpdir(unset)
        assert unset == {}
    assert not list(tmp_path.iterdir())
