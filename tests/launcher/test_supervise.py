"""Exit codes, signals, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import alive, finish, kill

from neondist import safe_path
from neondist.launcher import supervise as supervising
from neondist.launcher.monitor import Monitor

PARENT = """\
import os, sys
from neondist.launcher.supervise import supervise
sys.exit(supervise(sys.argv[1:], os.environ, graceful="GENTLY" in os.environ).code)
"""


def start(*command, **more):
    return subprocess.Popen([sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, text=True, **more)


def code_of(process):
    """Return the exit code of a process, as soon as it ends."""
    finish(process, 60)
    return process.returncode


def trapping(**what):
    """Return a command that waits, and does for each signal what is told; a shell may lose one between two commands."""
    lines = ["import os, signal", *(f"signal.signal(signal.SIG{name}, lambda *_: {do})" for name, do in what.items())]
    return sys.executable, "-c", "\n".join([*lines, "print('ready', flush=True)", "while True: signal.pause()"])


def gone(pid, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not alive(pid):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(("text", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
@pytest.mark.long
def test_exit_code(text, code):
    assert code_of(start("sh", "-c", text)) == code


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 3), (signal.SIGHUP, 4)]
)
@pytest.mark.long
def test_signals_are_forwarded(number, code):
    """The child tells which signal it got: USR1 and HUP (as TERM) by its own code."""
    process = start(*trapping(USR1="os._exit(3)", TERM="os._exit(4)", INT="os._exit(5)"))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert code_of(process) == code


def test_a_job_that_ends_well_in_spite_of_a_signal_is_done():
    process = start(*trapping(TERM="os._exit(0)"))
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert code_of(process) == 0


def test_asked_gently():
    """Every SIGTERM arrives as SIGUSR1; 75 is the command's own. Others arrive as they are."""
    command = trapping(USR1="print('gently', flush=True)", TERM="os._exit(4)", USR2="os._exit(75)")
    process = start(*command, env={**os.environ, "GENTLY": "1"})
    process.stdout.readline()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "gently\n"
    process.send_signal(signal.SIGUSR2)
    assert code_of(process) == 75


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_the_child_dies_with_its_parent():
    process = start("sh", "-c", "echo $$; exec sleep 300")
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait(60)
        assert gone(child, seconds=30)
    finally:
        kill([child])


BOUND = """\
import subprocess
from neondist import safe_path
process = subprocess.Popen(safe_path.command("code", "-q", bound=True))
print(process.pid, flush=True)
process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_command_of_neondist_dies_with_its_parent():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", BOUND], text=True, **pipes) as process:
        child = int(process.stdout.readline())
        try:
            process.stdin.write("print('bound')\n")
            process.stdin.flush()
            assert "bound" in process.stdout.readline()
            process.kill()
            assert gone(child, seconds=30)
        finally:
            kill([child])


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_command_whose_parent_is_dead_ends():
    words = [sys.executable, safe_path.__file__, "--parent=1", "code", "-q"]
    assert subprocess.run(words, stdin=subprocess.DEVNULL).returncode == 1


def test_stderr_comes_through_without_mpiruns_notices():
    text = r"""
rule=$(printf '%074d' 0 | tr 0 -)
echo before >&2
printf '%s\nMPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n%s\n' $rule $rule >&2
echo after >&2
exit 1
"""
    process = start("sh", "-c", text, stderr=subprocess.PIPE)
    _, err = finish(process, 60)
    assert (process.returncode, err) == (1, "before\nafter\n")


def test_a_job_that_fails_without_a_word_is_told_of_by_mpirun():
    rule = "-" * 74
    notice = f"{rule}\nprterun detected that one or more processes exited with non-zero status\n{rule}\n"
    process = start("sh", "-c", 'printf "%s" "$0" >&2; exit 3', notice, stderr=subprocess.PIPE)
    _, err = finish(process, 60)
    assert (process.returncode, err) == (3, notice)


@pytest.mark.parametrize("words", [("ended 0", "ended 0"), ("ended 3", None)])
def test_a_launcher_that_does_not_see_its_ranks_end_is_ended(words, monkeypatch):
    """Where all have, and where one has failed while the other runs on."""
    monkeypatch.setattr(supervising, "_UNNOTICED", 0.5)
    blind = (
        "import os, time\n"
        "from neondist.system import heartbeat\n"
        f"for rank, word in enumerate({words}):\n"
        "    if os.fork() == 0:\n"
        "        os.environ.update(PMIX_RANK=str(rank), NEONDIST_LAUNCHED='2')\n"
        "        heartbeat.connect(os.environ)\n"
        "        heartbeat.send(os.environ, word) if word else time.sleep(60)\n"
        "        os._exit(0)\n"
        "time.sleep(60)\n"
    )
    with Monitor(2) as monitor:
        env = {**os.environ, **monitor.environment}
        ending = supervising.supervise([sys.executable, "-c", blind], env, monitor=monitor)
    assert ending == supervising.Ending(3 if None in words else 0)


def test_a_launcher_that_ends_well_without_its_ranks_has_lost_them():
    """So does mpirun when the daemon of a node is killed."""
    with Monitor(2) as monitor:
        ending = supervising.supervise(["true"], os.environ, monitor=monitor)
    assert ending.code == 137
    assert ending.loss.startswith("rank 0 of 2 exited without reporting an error")
