"""Start of the command: closed standard streams, forms of Python's option -m, and missing variables."""

import os
import subprocess
import sys

import pytest
from availability import needs_mpirun
from cli_runs import build_command

FORMS_OF_OPTION_M = [
    ["-m", "neondist"],
    ["-mneondist"],
    ["-um", "neondist"],
    ["-W", "ignore", "-Xdev", "-umneondist"],
    ["-Ximporttime", "-m", "neondist"],
]


@pytest.mark.parametrize("words", FORMS_OF_OPTION_M, ids=" ".join)
def test_forms_of_the_option_m(words):
    done = subprocess.run([sys.executable, *words, "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("neondist ")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.long
def test_closed_standard_streams(folder, closed):
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *build_command("check", "toy.yaml")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert ("planned peak" in done.stdout) == (closed == "2>&-")
    assert "preparing" not in done.stdout


@pytest.mark.long
def test_run_with_a_broken_matplotlib(folder):
    (folder / "matplotlib").mkdir()
    (folder / "matplotlib" / "__init__.py").write_text("raise AttributeError('_ARRAY_API not found')")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    env["NEONDIST_TESTS_HIDE"] = ""
    done = subprocess.run(
        build_command("run", "toy.yaml"), cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: no pictures are drawn: matplotlib cannot be imported (AttributeError: _ARR") == 1


@needs_mpirun
@pytest.mark.long
def test_mpi_without_home():
    env = {name: value for name, value in os.environ.items() if name != "HOME"}
    code = "import neondist as nd; print(nd.ProcessGrid().size)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


BLOCKING_HOOK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "mpi4py", "h5py", "matplotlib", "PIL", "cupy"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
import neondist as nd
from neondist.io.files import has_matplotlib
from neondist.launcher.launch import require_mpirun

model = nd.Convnet([nd.FCLayer(2)], cost=nd.CrossEntropy(), optimizer=nd.SGD(0.1))  # backend: auto
model.build((2, 2, 1), 1)
model.train_batch([[[[1], [0]], [[0], [1]]]], [1])
assert model.context.backend.name == "numpy" and not has_matplotlib()
assert [backend.name for backend in nd.available() if backend.usable] == ["numpy"]
try:
    require_mpirun({})
except nd.LaunchError as error:
    assert "needs mpi4py" in str(error)
try:
    nd.Photographs()
except nd.DataError as error:
    assert "need Pillow" in str(error)
"""


@pytest.mark.long
def test_home_folder_that_cannot_be_written():
    """Draw pictures without the warning of matplotlib about its cache."""
    pytest.importorskip("matplotlib")
    code = "from neondist.io.files import has_matplotlib; assert has_matplotlib()"
    unset = "MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"
    env = {name: value for name, value in os.environ.items() if name not in unset} | {
        "HOME": "/proc",
        "NEONDIST_TESTS_HIDE": "",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_hooks_that_block_optional_packages():
    done = subprocess.run([sys.executable, "-c", BLOCKING_HOOK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
