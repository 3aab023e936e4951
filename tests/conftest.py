"""Configuration of all tests."""

import gc
import os
import signal
from pathlib import Path

import pytest
from case_selection import select_tests

TESTS = Path(__file__).parent
LONG_FILES = (
    "test_under_mpirun.py", "test_under_torchrun.py", "test_kill.py", "test_storage_faults.py", "test_supervision.py",
    "test_docs_pages.py", "test_unet.py",
)  # fmt: skip
SELECTION_VARIABLES = "NEONDIST_SEED", "NEONDIST_CASES"
PLOTTING_CALLBACKS = "curves_picture", "tiles_picture", "stage_pictures"

UNDER_MPI = "NEONDIST_MPI_TEST" in os.environ

# generated cases are identical in every run, so that failures are caused by changes; `make hunt` draws others
os.environ.setdefault("NEONDIST_SEED", "20")

if not UNDER_MPI:  # tests under MPI do not use hypothesis, whose import takes time on every rank
    from hypothesis import settings

    # times are not reliable on a shared machine
    settings.register_profile("neondist", deadline=None, derandomize=True, max_examples=40)
    settings.load_profile("neondist")


def _ignore_signal(number, frame):
    """Ignore a signal without effect on subprocesses, which inherit SIG_IGN."""


# background jobs of scripts ignore SIGINT, those of nohup SIGHUP, and subprocesses would inherit that
# Python itself ignores SIGPIPE and SIGXFSZ, and restores them in subprocesses
for signal_number in signal.valid_signals() - {signal.SIGPIPE, getattr(signal, "SIGXFSZ", None)}:
    if signal.getsignal(signal_number) == signal.SIG_IGN:
        signal.signal(signal_number, _ignore_signal)
signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pytest_collection_modifyitems(config, items):
    """Deselect long tests of other seeds, and run files with long tests first, so that workers finish together."""
    if not UNDER_MPI:
        items[:], deselected = select_tests(items)
        config.hook.pytest_deselected(items=deselected)
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


def pytest_sessionstart(session):
    """Print the seed, because pytest's header is hidden by -q."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not UNDER_MPI:
        reporter.write_line(f"NEONDIST_SEED={os.environ['NEONDIST_SEED']}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Abort all ranks after a failure on one, since the others would wait for it."""
    outcome = yield
    report = outcome.get_result()
    if UNDER_MPI and report.failed:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            from neondist.torch.exchange.transport import world

            job = world()
        else:
            from mpi4py import MPI

            from neondist.comm.mpi import MPITransport

            job = MPITransport(MPI.COMM_WORLD)
        print(f"\nrank {job.rank}: {item.nodeid}\n{report.longreprtext}", flush=True)
        job.abort(1)


@pytest.fixture(autouse=True, scope="module")
def frozen_objects():
    """Freeze existing objects, because their garbage collection takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def subprocess_environment(clean_environment):
    """Let subprocesses import this checkout, but hide PyTorch and matplotlib, whose import takes seconds.

    Subprocesses that need them set NEONDIST_TESTS_HIDE="".
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("NEONDIST_TESTS_HIDE", "torch matplotlib")
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")  # or each would compile neondist
        monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # stacks of a process that hangs, see `processes.communicate`
        # waiting ranks of Open MPI would occupy a core each
        monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
        monkeypatch.setenv("OMPI_MCA_threads_pthreads_yield_strategy", "nanosleep")
        monkeypatch.setenv(
            "PYTHONPATH", os.pathsep.join([str(TESTS / "helpers" / "lean"), str(TESTS.parent)]), prepend=os.pathsep
        )
        yield


@pytest.fixture(autouse=True, scope="session")
def clean_environment():
    """Hide the environment of the batch job and the terminal that run the tests."""
    job = () if UNDER_MPI else ("NEONDIST_", "OMPI_COMM_", "PMI", "PRTE_", "SLURM_")
    terminal = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in list(os.environ):
            if (name.startswith(job) and name not in SELECTION_VARIABLES) or name in terminal:
                monkeypatch.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_plotting():
    """Disable plots, which take most of the time of a small run, unless a test uses `plotting`."""
    from neondist.io.files import has_matplotlib

    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in PLOTTING_CALLBACKS:
            monkeypatch.setattr(f"neondist.train.callbacks.{module}.has_matplotlib", lambda: False)
        yield has_matplotlib


@pytest.fixture
def shared_captures():
    """Let virtual ranks share the results of torch.export."""
    import torch_runs

    with torch_runs.share_captures():
        yield


@pytest.fixture
def plotting(no_plotting, monkeypatch):
    """Enable the plots of runs."""
    for module in PLOTTING_CALLBACKS:
        monkeypatch.setattr(f"neondist.train.callbacks.{module}.has_matplotlib", no_plotting)
