"""Processes forked from a server that has imported the package."""

import gc
import signal
import subprocess
import sys
import threading

import pytest
from processes import communicate, is_alive, kill
from waiting import wait_until

from neondist.launcher.fork_server import open_fork_server
from neondist.system.collector import exempt_new_objects_from_gc

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")

SUPERVISOR_SCRIPT = """\
import gc, os, signal, subprocess, sys
import psutil
import neondist.cli
from neondist.launcher.fork_server import open_fork_server

TOKEN = {"NEONDIST_TOKEN": "0123456789abcdef", "PATH": os.environ["PATH"]}
print("written once, although it is in a buffer when the server is forked")
with open_fork_server(lambda: None) as server:
    [copy] = psutil.Process().children()
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
    check = server.start(["check", "nothing.yaml"], {**os.environ, "HERE": "1"}, "check")
    assert check.wait() == 2
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

LATE_FORK_SCRIPT = """\
import os, subprocess, sys, time
import psutil
import neondist.cli
from neondist.launcher.fork_server import open_fork_server

for resumes in (True, False):
    with open_fork_server(lambda: None, timeout=0.2) as server:
        [copy] = psutil.Process().children()
        copy.suspend()
        assert server.start(["check", "nothing.yaml"], os.environ, "late") is None
        if resumes:
            copy.resume()
            while copy.status() != psutil.STATUS_ZOMBIE:  # it has forked for an abandoned request
                time.sleep(0.01)
            [late] = [child for child in psutil.Process().children() if child != copy]
            while late.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
        assert server.start(["check", "nothing.yaml"], os.environ, "another", subprocess.PIPE) is None
    assert not psutil.Process().children()
"""


def start_supervisor(mode, **options):
    words = [sys.executable, "-c", SUPERVISOR_SCRIPT, mode]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_forked_processes_behave_as_children():
    out, err = communicate(start_supervisor("end"))
    assert out == "written once, although it is in a buffer when the server is forked\n"
    assert "nothing.yaml: no such file" in err.splitlines()[0]
    assert len(err.splitlines()) == 1, err


def test_forked_processes_end_with_the_supervisor():
    with start_supervisor("wait") as process:
        process.stdout.readline()
        pids = [int(word) for word in process.stdout.readline().split()]
        try:
            assert all(map(is_alive, pids))
            process.send_signal(signal.SIGKILL)
            wait_until(lambda: not any(map(is_alive, pids)))
        finally:
            kill(pids)


def test_late_forks_are_discarded():
    """Suspend the server during a request, and resume it or not."""
    process = subprocess.Popen([sys.executable, "-c", LATE_FORK_SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (communicate(process), process.returncode) == ((b"", b""), 0)


def fail_import():
    raise ImportError("torch")


def test_no_server_with_threads_or_failed_imports():
    with open_fork_server(fail_import) as server:
        assert server is None
    finished = threading.Event()
    thread = threading.Thread(target=finished.wait)
    thread.start()
    with open_fork_server(lambda: None) as server:
        finished.set()
        assert server is None
    thread.join()


def test_objects_of_later_blocks_are_collected():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with exempt_new_objects_from_gc():
        assert gc.isenabled()
        created = [[] for _ in range(1000)]
    assert gc.get_freeze_count() <= frozen < frozen + len(created)
