"""Supervision of a command: exit codes, signals, and processes that must end."""

import os
import signal
import subprocess
import sys
from argparse import Namespace

import pytest
from processes import communicate, is_alive, kill
from waiting import wait_until

from neondist import safe_path
from neondist.launcher import supervision
from neondist.launcher.launch import report_failure
from neondist.launcher.monitor import Monitor

SUPERVISOR_SCRIPT = """\
import os, sys
from neondist.launcher.supervision import supervise_command
sys.exit(supervise_command(sys.argv[1:], os.environ, ranks_handle_stop="GRACEFUL" in os.environ).exit_code)
"""


def start_supervisor(*command, **options):
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR_SCRIPT, *command], stdout=subprocess.PIPE, text=True, **options
    )


def wait_for_exit_code(process):
    """Wait for the end of a process, and return its exit code."""
    communicate(process, 60)
    return process.returncode


def make_trap_command(**actions):
    """Return a command that waits for signals and handles them by code; shells may lose signals between commands."""
    lines = [
        "import os, signal",
        *(f"signal.signal(signal.SIG{name}, lambda *_: {action})" for name, action in actions.items()),
    ]
    return [sys.executable, "-c", "\n".join([*lines, "print('ready', flush=True)", "while True: signal.pause()"])]


@pytest.mark.parametrize(("text", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
@pytest.mark.long
def test_exit_code(text, code):
    assert wait_for_exit_code(start_supervisor("sh", "-c", text)) == code


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 3), (signal.SIGHUP, 129)]
)
@pytest.mark.long
def test_signals_are_forwarded(number, code):
    """Let the output of the child identify the signal; HUP arrives as TERM."""
    actions = {name: f"(print('{name}', flush=True), os._exit(3))" for name in ("USR1", "TERM", "INT")}
    process = start_supervisor(*make_trap_command(**actions))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline().strip() == {"HUP": "TERM"}.get(name := number.name[3:], name)
    assert wait_for_exit_code(process) == code


@pytest.mark.parametrize("exit_code", [0, 4])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_losses_after_signals(name, exit_code):
    """Ranks that end without a report, since a signal ended the job, are no reason for a restart."""
    end = f"os._exit({exit_code})"
    command = make_trap_command(USR1=end, TERM=end, INT=end)
    command[-1:] = [command[-1].replace("print('ready', flush=True)", "os.kill(os.getppid(), signal." + name + ")")]
    with Monitor(1) as monitor:
        ending = supervision.supervise_command(command, os.environ, monitor=monitor)
    assert ending.stop_requested == (name in ("SIGTERM", "SIGUSR1"))
    assert bool(ending.failure_message) == (name == "SIGUSR1" and exit_code == 0)
    assert ending.exit_code == (128 + getattr(signal, name) if name != "SIGUSR1" else {0: 137, 4: 4}[exit_code])


def test_job_may_exit_with_0_after_a_signal():
    process = start_supervisor(*make_trap_command(TERM="os._exit(0)"))
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit_code(process) == 0


def test_graceful_termination():
    """Deliver every SIGTERM as SIGUSR1, and other signals unchanged; 75 is the exit code of the command."""
    command = make_trap_command(USR1="print('graceful', flush=True)", TERM="os._exit(4)", USR2="os._exit(75)")
    process = start_supervisor(*command, env={**os.environ, "GRACEFUL": "1"})
    process.stdout.readline()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "graceful\n"
    process.send_signal(signal.SIGUSR2)
    assert wait_for_exit_code(process) == 75


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_child_dies_with_its_parent():
    process = start_supervisor("sh", "-c", "echo $$; exec sleep 300")
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait(60)
        wait_until(lambda: not is_alive(child), 30)
    finally:
        kill([child])


BOUND_CHILD_SCRIPT = """\
import subprocess
from neondist import safe_path
process = subprocess.Popen(safe_path.python_command("code", "-q", ends_with_parent=True))
print(process.pid, flush=True)
process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_bound_command_dies_with_its_parent():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", BOUND_CHILD_SCRIPT], text=True, **pipes) as process:
        child = int(process.stdout.readline())
        try:
            process.stdin.write("print('bound')\n")
            process.stdin.flush()
            assert "bound" in process.stdout.readline()
            process.kill()
            wait_until(lambda: not is_alive(child), 30)
        finally:
            kill([child])


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_bound_command_without_a_parent_ends():
    words = [sys.executable, safe_path.__file__, "--parent-pid=1", "code", "-q"]
    assert subprocess.run(words, stdin=subprocess.DEVNULL).returncode == 1


def test_stderr_is_forwarded_without_mpirun_notices():
    text = r"""
rule=$(printf '%074d' 0 | tr 0 -)
echo before >&2
printf '%s\nMPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n%s\n' $rule $rule >&2
echo after >&2
exit 1
"""
    process = start_supervisor("sh", "-c", text, stderr=subprocess.PIPE)
    _, err = communicate(process, 60)
    assert (process.returncode, err) == (1, "before\nafter\n")


def test_notices_of_silently_failing_jobs_are_printed():
    rule = "-" * 74
    notice = f"{rule}\nprterun detected that one or more processes exited with non-zero status\n{rule}\n"
    process = start_supervisor("sh", "-c", 'printf "%s" "$0" >&2; exit 3', notice, stderr=subprocess.PIPE)
    _, err = communicate(process, 60)
    assert (process.returncode, err) == (3, notice)


@pytest.mark.parametrize("words", [("ended 0", "ended 0"), ("ended 3", None)])
def test_unresponsive_launcher_is_ended(words, monkeypatch):
    """End it after all ranks have ended, or one has failed while the other runs."""
    monkeypatch.setattr(supervision, "_MPIRUN_EXIT_TIMEOUT", 0.5)
    launcher = (
        "import os, time\n"
        "from neondist.system import heartbeat\n"
        f"for rank, word in enumerate({words}):\n"
        "    if os.fork() == 0:\n"
        "        os.environ.update(PMIX_RANK=str(rank), NEONDIST_LAUNCHED='2')\n"
        "        heartbeat.connect_to_supervisor(os.environ)\n"
        "        heartbeat.send_to_supervisor(os.environ, word) if word else time.sleep(60)\n"
        "        os._exit(0)\n"
        "time.sleep(60)\n"
    )
    with Monitor(2) as monitor:
        env = {**os.environ, **monitor.environment}
        ending = supervision.supervise_command([sys.executable, "-c", launcher], env, monitor=monitor)
    assert ending == supervision.JobEnding(3 if None in words else 0)


def test_launcher_that_exits_before_its_ranks():
    """Emulate mpirun, which exits with 0 if the daemon of a node is killed."""
    with Monitor(2) as monitor:
        ending = supervision.supervise_command(["true"], os.environ, monitor=monitor)
    assert ending.exit_code == 137
    assert ending.failure_message.startswith("rank 0 of 2 exited without reporting an error")


@pytest.mark.parametrize(
    ("stops", "ending"),
    [
        (True, supervision.JobEnding(143, stop_requested=True)),
        (False, supervision.JobEnding(143, stop_requested=True)),
        (True, supervision.JobEnding(130)),
        (True, supervision.JobEnding(75, stop_requested=True)),
    ],
)
def test_stop_without_checkpoint_is_reported(stops, ending, capsys):
    """Report that SIGTERM, as sent to every process of a job, ended the ranks before their checkpoint."""
    assert report_failure(ending, Namespace(stops=stops)) == ending.exit_code
    expected = "error: SIGTERM ended the ranks before they had written a checkpoint; continue with --resume\n"
    assert capsys.readouterr().err == (expected if stops and ending.exit_code == 143 else "")
