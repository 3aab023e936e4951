"""Processes forked from one that has imported everything: as new ones are, but sooner."""

import signal
import subprocess
import sys
import threading

import pytest
from processes import alive, finish, kill
from test_supervise import gone

from neondist.launcher.fork_server import open_fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")

SUPERVISOR = """\
import gc, os, signal, subprocess, sys
import psutil
import neondist.cli
from neondist.launcher.fork_server import open_fork_server

TOKEN = {"NEONDIST_TOKEN": "0123456789abcdef", "PATH": os.environ["PATH"]}
print("written once, although it is in a buffer when the server is forked")
with open_fork_server(lambda: None) as server:
    [copy] = psutil.Process().children()
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
    one = server.start(["check", "nothing.yaml"], {**os.environ, "HERE": "1"}, "check")
    assert one.wait() == 2
    service = server.start(["serve", "ps"], TOKEN, "serve ps", subprocess.PIPE)
    assert service.stdout.readline().startswith("PServer at 127.0.0.1:")
    process = psutil.Process(service.pid)
    assert (process.name(), process.ppid(), os.getsid(service.pid)) == ("serve ps", os.getpid(), service.pid)
    assert os.readlink(f"/proc/{service.pid}/fd/0") == os.devnull
    try:
        service.wait(0.05)
    except subprocess.TimeoutExpired:
        service.terminate()
    assert service.wait() == -signal.SIGTERM
    silent = server.start(["check", "--help"], TOKEN, "silent", subprocess.DEVNULL)
    assert silent.wait() == 0
    last = server.start(["serve", "ps"], TOKEN, "serve ps", subprocess.PIPE)
    last.stdout.readline()
    if sys.argv[1] == "end":
        copy.kill()
        assert server.start(["serve", "ps"], TOKEN, "serve ps", subprocess.PIPE) is None
        last.kill()
        assert last.wait() == last.poll() == -signal.SIGKILL
    else:
        print(last.pid, copy.pid, flush=True)
        signal.pause()
assert not psutil.Process().children()
"""

LATE = """\
import os, subprocess, sys, time
import psutil
import neondist.cli
from neondist.launcher.fork_server import open_fork_server

for goes_on in (True, False):
    with open_fork_server(lambda: None, patience=0.2) as server:
        [copy] = psutil.Process().children()
        copy.suspend()
        assert server.start(["check", "nothing.yaml"], os.environ, "late") is None
        if goes_on:
            copy.resume()
            while copy.status() != psutil.STATUS_ZOMBIE:  # it has forked, and found that nobody asks any more
                time.sleep(0.01)
            [late] = [one for one in psutil.Process().children() if one != copy]
            while late.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
        assert server.start(["check", "nothing.yaml"], os.environ, "another", subprocess.PIPE) is None
    assert not psutil.Process().children()
"""


def start(how, **more):
    words = [sys.executable, "-c", SUPERVISOR, how]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_forked_processes_are_children_with_their_own_environment_output_and_exit_code():
    out, err = finish(start("end"))
    assert out == "written once, although it is in a buffer when the server is forked\n"
    assert "nothing.yaml: no such file" in err.splitlines()[0]
    assert len(err.splitlines()) == 1, err


def test_forked_processes_end_with_the_supervisor():
    with start("wait") as process:
        process.stdout.readline()
        pids = [int(word) for word in process.stdout.readline().split()]
        try:
            assert all(map(alive, pids))
            process.send_signal(signal.SIGKILL)
            assert all(map(gone, pids))
        finally:
            kill(pids)


def test_a_process_that_is_forked_too_late_neither_runs_nor_is_taken_for_another():
    """The copy is stopped while it is asked; then it goes on, or does not."""
    process = subprocess.Popen([sys.executable, "-c", LATE], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (finish(process), process.returncode) == ((b"", b""), 0)


def fails():
    raise ImportError("torch")


def test_there_is_no_server_beside_threads_or_without_what_is_imported():
    with open_fork_server(fails) as server:
        assert server is None
    ended = threading.Event()
    beside = threading.Thread(target=ended.wait)
    beside.start()
    with open_fork_server(lambda: None) as server:
        ended.set()
        assert server is None
    beside.join()
