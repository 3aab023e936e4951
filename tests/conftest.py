"""Settings of all tests."""

import gc
import os
import signal
from pathlib import Path

import pytest
from turns import taking_turns

TESTS = Path(__file__).parent
LONG = (
    "test_under_mpirun.py", "test_under_torchrun.py", "test_kill.py", "test_storage_faults.py", "test_supervise.py",
    "test_docs_pages.py", "test_unet.py",
)  # fmt: skip
CHOICES = "NEONDIST_SEED", "NEONDIST_CASES"
DRAWING = "curves", "tiles_picture", "stage_pictures"

INSIDE = "NEONDIST_MPI_TEST" in os.environ

# generated cases are the same in every run, so that a change is what made one fail; `make hunt` draws others
os.environ.setdefault("NEONDIST_SEED", "20")

if not INSIDE:  # nothing is drawn on MPI's ranks, each of which would import it
    from hypothesis import settings

    # how long an example takes says nothing on a machine that others use too
    settings.register_profile("neondist", deadline=None, derandomize=True, max_examples=40)
    settings.load_profile("neondist")


def _nothing(number, frame):
    """Handle a signal as if it were ignored; unlike one that is ignored, no subprocess inherits that."""


# a script's background jobs ignore SIGINT, those of nohup SIGHUP, and what they start would do so for ever
for number in signal.valid_signals() - {signal.SIGPIPE, getattr(signal, "SIGXFSZ", None)}:  # Python gives these back
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, _nothing)
signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pytest_collection_modifyitems(config, items):
    """Leave out long tests of other seeds, and put files of long ones first, lest one worker waits for another."""
    if not INSIDE:
        items[:], later = taking_turns(items)
        config.hook.pytest_deselected(items=later)
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_sessionstart(session):
    """Say which networks are generated; pytest's own header is not shown with -q."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not INSIDE:
        reporter.write_line(f"NEONDIST_SEED={os.environ['NEONDIST_SEED']}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """A rank that fails alone would leave the others waiting: end them all, after saying why."""
    outcome = yield
    report = outcome.get_result()
    if INSIDE and report.failed:
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
def frozen():
    """The garbage collector does not look again at what is there for all tests: it takes half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def lean_processes(out_of_any_job):
    """Subprocesses find this checkout, but neither PyTorch nor matplotlib, which take each of them seconds to import.

    One that needs them gets NEONDIST_TESTS_HIDE="".
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEONDIST_TESTS_HIDE", "torch matplotlib")
        patch.setenv("PYTHONDONTWRITEBYTECODE", "")  # each would compile neondist again
        patch.setenv("PYTHONFAULTHANDLER", "1")  # one that hangs says where, see `processes.finish`
        # Open MPI's ranks that wait would take a core each from the other tests
        patch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
        patch.setenv("OMPI_MCA_threads_pthreads_yield_strategy", "nanosleep")
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(TESTS / "helpers" / "lean"), str(TESTS.parent)]), prepend=os.pathsep
        )
        yield


@pytest.fixture(autouse=True, scope="session")
def out_of_any_job():
    """Nothing of the batch job or of the terminal that the tests are started in reaches them."""
    job = () if INSIDE else ("NEONDIST_", "OMPI_COMM_", "PMI", "PRTE_", "SLURM_")
    terminal = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if (name.startswith(job) and name not in CHOICES) or name in terminal:
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_pictures():
    """Runs draw nothing, which takes most of a small run's time, unless a test asks for `pictures`."""
    from neondist.io.files import can_draw

    with pytest.MonkeyPatch.context() as patch:
        for module in DRAWING:
            patch.setattr(f"neondist.train.callbacks.{module}.can_draw", lambda: False)
        yield can_draw


@pytest.fixture
def captured_once():
    """Virtual ranks share what torch.export finds."""
    import torch_runs

    with torch_runs.captured_once():
        yield


@pytest.fixture
def pictures(no_pictures, monkeypatch):
    """Runs draw what they draw for users."""
    for module in DRAWING:
        monkeypatch.setattr(f"neondist.train.callbacks.{module}.can_draw", no_pictures)
