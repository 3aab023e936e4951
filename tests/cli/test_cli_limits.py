"""Options that watch over a run, and a run that is asked to stop."""

import argparse
import os
import re
import signal
import subprocess
import sys

import pytest
from cli_runs import EXPERIMENT, call, losses, needs_mpirun, neondist, own, start
from processes import finish

from neondist.cli import main
from neondist.cli.arguments import parser
from neondist.cli.run import duration
from neondist.launcher.launch import rank_args

LONG = ("--set", "epochs=100000")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    (tmp_path / "tell.py").write_text("import os, pathlib\npathlib.Path(f'pid{os.getpid()}').touch()\n")
    return tmp_path


TIMES = {
    "90": 90, "2.5": 2.5, "3h30m": 12600, "1.5h": 5400, "45m10s": 2710, "1d2h": 93600, "20s": 20,
    "01:30:00": 5400, "00:00:05": 5, "12:30": 45000, "1-12:00:00": 129600,
}  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), TIMES.items())
def test_duration(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "h", "3x", "30m3h", "1:99:00", "01:00:00:00", "nan", "1e3", "٣"])
def test_what_is_no_duration(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected 3h30m"):
        duration(text)


def test_ranks_are_told_the_options():
    told = parser().parse_args(rank_args(parser().parse_args(["run", "a.yaml", "-n", "4", "--time-limit", "3h30m"])))
    assert told.time_limit == 12600


@pytest.mark.long
def test_time_limit(folder):
    code, out, err = call(neondist("run", "toy.yaml", *LONG, "--time-limit", "4s"), folder)
    assert (code, err) == (75, "")
    assert "the time limit of 4 s is close; --resume continues from here" in out
    assert "checkpoint.h5" in out


def test_debug_halo_gives_the_same_numbers(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    found = []
    for more in ([], ["--debug-halo", "--overwrite"]):
        assert main(["run", "toy.yaml", "--set", "epochs=1", *more]) == 0
        found.append(losses(capsys.readouterr().out))
    assert found[0] == found[1] != []


def stop(folder, number, whom, *more):
    """Signal a job of two ranks in its second epoch, the launcher (0) or a rank; return code and output."""
    words = neondist("run", "toy.yaml", "-n", 2, *LONG, "--import", "tell.py", *more)
    process = start(words, folder)
    out = ""
    for line in process.stdout:
        out += line
        if line.startswith("epoch "):
            break
    pids = sorted((int(path.name[3:]) for path in folder.glob("pid*")), key=lambda pid: pid != process.pid)
    os.kill(pids[whom], number)
    rest, err = finish(process, 60)
    assert (process.returncode, own(err)) == (75, "")
    for path in folder.glob("pid*"):
        path.unlink()
    return out + rest


@needs_mpirun
@pytest.mark.long
def test_signals_stop_all_ranks_with_a_checkpoint(folder):
    """SIGTERM to the launcher, which mpirun alone would make a SIGKILL; then SIGUSR1 to a rank."""
    assert re.search(r"received SIG\w+; --resume continues from here", stop(folder, signal.SIGTERM, 0))
    assert "received SIGUSR1" in stop(folder, signal.SIGUSR1, 2, "--resume")


KILL = "import os, signal\nos.kill(os.getpid(), signal.{})\n"


@pytest.mark.parametrize("words", [(), ("--virtual", 2), ("-n", 2)])
@pytest.mark.long
def test_a_signal_while_the_command_starts(folder, words):
    """Code of the user's is imported before anything is loaded: with -n, mpirun is not started at all."""
    if "-n" in words:
        pytest.importorskip("mpi4py")
    (folder / "kill.py").write_text(KILL.format("SIGUSR1"))
    code, out, err = call(neondist("run", "toy.yaml", *LONG, "--import", "kill.py", *words), folder)
    assert (code, err) == (75, "")
    assert "received SIGUSR1" in out


@needs_mpirun
@pytest.mark.long
def test_a_signal_while_the_ranks_start(folder):
    text = "import os, signal\nif 'OMPI_COMM_WORLD_RANK' in os.environ:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    (folder / "kill.py").write_text(text)
    code, out, err = call(neondist("run", "toy.yaml", *LONG, "--import", "kill.py", "-n", 2), folder)
    assert (code, err) == (75, "")
    assert "stopped at step 0: received SIGTERM" in out


@pytest.mark.long
def test_virtual_ranks_stop(folder):
    process = start(neondist("run", "toy.yaml", *LONG, "--virtual", 2), folder)
    assert "2 ranks" in process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, err = finish(process, 60)
    assert (process.returncode, err) == (75, "")
    assert "received SIGTERM" in out


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_before_anything_is_imported(folder, name):
    """Ctrl-C ends the command without a traceback, and SIGTERM one that has nothing to write."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("Ctrl-C is ignored here, and so by whatever is started from here")
    early = KILL.format(name) + "import sys; sys.path.pop(0); del sys.modules['numpy']; import numpy\n"
    (folder / "early").mkdir()
    (folder / "early" / "numpy.py").write_text(early)
    path = os.pathsep.join([str(folder / "early"), os.environ["PYTHONPATH"]])
    code, out, err = call(neondist("check", "toy.yaml"), folder / "early", PYTHONPATH=path)
    assert (code, out, err) == (130 if name == "SIGINT" else -15, "", "")


def test_an_interruption_that_python_swallows_comes_again():
    code = """
import signal, time, weakref
from neondist.system.signals import Signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have it ignored
signals = Signals(whole_process=True).listen()
signals.cleans_up = True
class Thing: pass
thing = Thing()
watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    time.sleep(60)
except KeyboardInterrupt:
    print("in order")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("in order\n", "")
