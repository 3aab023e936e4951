"""Limits of a run, and signals that stop it."""

import argparse
import os
import re
import signal
import subprocess
import sys

import pytest
from availability import needs_mpirun
from cli_runs import build_command, parse_losses, run_command, start_command, strip_mpirun_notices, strip_progress_lines
from processes import communicate

from neondist.cli import main
from neondist.cli.arguments import create_parser
from neondist.cli.run import parse_duration_seconds
from neondist.launcher.launch import rank_args

LONG_RUN_OPTIONS = ("--set", "epochs=100000")


DURATIONS = {
    "90": 90, "2.5": 2.5, "3h30m": 12600, "1.5h": 5400, "45m10s": 2710, "1d2h": 93600, "20s": 20,
    "01:30:00": 5400, "00:00:05": 5, "1-12:00:00": 129600,
}  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), DURATIONS.items())
def test_duration(text, seconds):
    assert parse_duration_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "-5", "h", "3x", "30m3h", "1:99:00", "01:00:00:00", "12:30", "nan", "1e3", "٣"]
)
def test_invalid_durations(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected 3h30m"):
        parse_duration_seconds(text)


def test_ranks_receive_the_time_limit():
    arguments = create_parser().parse_args(
        rank_args(create_parser().parse_args(["run", "a.yaml", "-n", "4", "--time-limit", "3h30m"]))
    )
    assert arguments.time_limit == 12600


@pytest.mark.long
def test_time_limit(folder):
    code, out, err = run_command(build_command("run", "toy.yaml", *LONG_RUN_OPTIONS, "--time-limit", "4s"), folder)
    assert (code, err) == (75, "")
    assert "the time limit of 4 s is close; --resume continues from here" in out
    assert "checkpoint.h5" in out


def test_debug_halo_does_not_change_losses(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    results = []
    for options in ([], ["--debug-halo", "--overwrite"]):
        assert main(["run", "toy.yaml", "--set", "epochs=1", *options]) == 0
        results.append(parse_losses(capsys.readouterr().out))
    assert results[0] == results[1] != []


def stop_run(folder, list_pids, number, process_index, *options):
    """Signal the launcher (0) or a rank of a job in its second epoch; return the output."""
    words = build_command("run", "toy.yaml", "-n", 2, *LONG_RUN_OPTIONS, "--import", "write_pid.py", *options)
    process = start_command(words, folder)
    out = ""
    for line in process.stdout:
        out += line
        if line.startswith("epoch "):
            break
    running = sorted(list_pids(), key=lambda pid: pid != process.pid)
    os.kill(running[process_index], number)
    remainder, err = communicate(process, 60)
    assert (process.returncode, strip_progress_lines(strip_mpirun_notices(err))) == (75, "")
    for path in folder.glob("pid*"):
        path.unlink()
    return out + remainder


@needs_mpirun
@pytest.mark.long
def test_signals_stop_all_ranks_with_a_checkpoint(folder, pids):
    """Send SIGTERM to the launcher, which mpirun alone would turn into SIGKILL, then SIGUSR1 to a rank."""
    assert re.search(r"received SIG\w+; --resume continues from here", stop_run(folder, pids, signal.SIGTERM, 0))
    assert "received SIGUSR1" in stop_run(folder, pids, signal.SIGUSR1, 2, "--resume")


KILL_STATEMENT = "import os, signal\nos.kill(os.getpid(), signal.{})\n"


@pytest.mark.parametrize("words", [(), ("--virtual", 2), ("-n", 2)])
@pytest.mark.long
def test_signal_before_training(folder, words):
    """Send the signal from an imported module, before any data are loaded and before mpirun starts."""
    if "-n" in words:
        pytest.importorskip("mpi4py")
    (folder / "kill.py").write_text(KILL_STATEMENT.format("SIGUSR1"))
    code, out, err = run_command(
        build_command("run", "toy.yaml", *LONG_RUN_OPTIONS, "--import", "kill.py", *words), folder
    )
    assert (code, err) == (75, "")
    assert "received SIGUSR1" in out


@needs_mpirun
@pytest.mark.long
def test_signal_before_mpi_starts(folder):
    text = "import os, signal\nif 'OMPI_COMM_WORLD_RANK' in os.environ:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    (folder / "kill.py").write_text(text)
    code, out, err = run_command(
        build_command("run", "toy.yaml", *LONG_RUN_OPTIONS, "--import", "kill.py", "-n", 2), folder
    )
    assert (code, err) == (75, "")
    assert "stopped at step 0: received SIGTERM" in out


@pytest.mark.long
def test_virtual_ranks_stop(folder):
    process = start_command(build_command("run", "toy.yaml", *LONG_RUN_OPTIONS, "--virtual", 2), folder)
    assert "2 ranks" in process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, err = communicate(process, 60)
    assert (process.returncode, strip_progress_lines(err)) == (75, "")
    assert "received SIGTERM" in out


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_before_imports(folder, name):
    """Expect no traceback after SIGINT, and the default action of SIGTERM."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("SIGINT is ignored here and in subprocesses")
    early = KILL_STATEMENT.format(name) + "import sys; sys.path.pop(0); del sys.modules['numpy']; import numpy\n"
    (folder / "early").mkdir()
    (folder / "early" / "numpy.py").write_text(early)
    path = os.pathsep.join([str(folder / "early"), os.environ["PYTHONPATH"]])
    code, out, err = run_command(build_command("check", "toy.yaml"), folder / "early", PYTHONPATH=path)
    assert (code, out, err) == (130 if name == "SIGINT" else -15, "", "")


def test_swallowed_interrupt_is_raised_again():
    code = """
import signal, time, weakref
from neondist.system.signals import SignalRecorder
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs may ignore it
signals = SignalRecorder(owns_process=True).install_signal_handlers()
signals.needs_cleanup = True
class Thing: pass
thing = Thing()
watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    time.sleep(60)
except KeyboardInterrupt:
    print("in order")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (process.stdout, process.stderr) == ("in order\n", "")
