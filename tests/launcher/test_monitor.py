"""Ranks and their supervisor: words, losses, leases, and connections of others."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from processes import finish

from neondist.launcher import monitor as monitor_module
from neondist.launcher.monitor import Monitor
from neondist.system.heartbeat import NONCE, SUPERVISOR, proof, receive, split_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
RANK = """
import os, sys, time
from neondist.system.heartbeat import connect, send
connect(os.environ)
assert "NEONDIST_SUPERVISOR" not in os.environ
print("ready", flush=True)
for word in sys.argv[1:]:
    input()
    send(os.environ, word)
input()
os._exit(0)
"""


class Ranks:
    """Processes that are ranks of a monitor, and say a word with each line that they are given."""

    def __init__(self, monitor):
        self.monitor, self.started = monitor, []

    def start(self, rank, *words):
        env = {**os.environ, **self.monitor.environment, "PMIX_RANK": str(rank), "NEONDIST_LAUNCHED": "2"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        made = subprocess.Popen([sys.executable, "-c", RANK, *words], env=env, text=True, **pipes)
        self.started.append(made)
        assert made.stdout.readline() == "ready\n", made.stderr.read()
        return made


def tell(process):
    process.stdin.write("\n")
    process.stdin.flush()


def wait(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def monitor():
    with Monitor(2, lease=2.5) as made:
        yield made


@pytest.fixture
def ranks(monitor):
    made = Ranks(monitor)
    yield made
    for one in made.started:
        one.kill()
        one.communicate()


def test_words_and_a_good_end(monitor, ranks):
    both = [ranks.start(rank, "listens", "ended 0") for rank in (0, 1)]
    assert not monitor.all_listen()
    for one in both:
        tell(one)
    wait(lambda: monitor.all_listen())
    assert monitor.unreported_ranks() == [0, 1]
    for one in both * 2:
        tell(one)
    monitor.settle()
    assert (monitor.unreported_ranks(), monitor.loss, monitor.code) == ([], "", 0)
    assert monitor.ending is not None


def test_a_killed_rank_is_lost_and_the_other_can_be_ended(monitor, ranks):
    one, other = (ranks.start(rank) for rank in (0, 1))
    other.send_signal(signal.SIGKILL)
    wait(lambda: monitor.loss)
    assert monitor.loss.startswith(f"rank 1 of 2 on {os.uname().nodename} exited without reporting an error")
    assert monitor.lost == 1
    monitor.end_ranks()
    finish(one, 60)
    assert one.returncode == -signal.SIGKILL


def test_a_rank_that_has_failed_is_none_that_is_lost(monitor, ranks):
    """Nor are those that the launcher ends then."""
    one, other = ranks.start(0, "ended 2"), ranks.start(1)
    tell(one)
    wait(lambda: monitor.code)
    other.kill()
    one.kill()
    monitor.settle()
    assert (monitor.loss, monitor.code) == ("", 2)


def test_a_stopped_rank_loses_its_lease_and_is_ended(monitor, ranks):
    one, other = (ranks.start(rank) for rank in (0, 1))
    one.send_signal(signal.SIGSTOP)
    wait(lambda: monitor.loss)
    assert monitor.loss.startswith(f"no heartbeat from rank 0 of 2 on {os.uname().nodename} for 2.5 s")
    monitor.end_ranks()
    for each in (one, other):
        finish(each, 60)
        assert each.returncode == -signal.SIGKILL


def test_ranks_that_are_silent_at_about_the_same_time_are_lost_together(monkeypatch):
    monkeypatch.setattr(monitor_module, "BEAT", 0.1)
    monkeypatch.setattr(monitor_module, "_TICK", 0.02)
    with Monitor(3, lease=1.0) as monitor, contextlib.ExitStack() as stack:
        quiet = [stack.enter_context(greeted(monitor, f"{rank} 1 node{rank}\n".encode())) for rank in (0, 1, 2)]
        end = time.monotonic() + 0.3
        while not monitor.loss:
            for one in quiet[1 if time.monotonic() < end else 2 :]:
                with contextlib.suppress(OSError):
                    one.sendall(b"\n")
            time.sleep(0.01)
        assert monitor.silent == (0, 1)
        assert monitor.loss.startswith("no heartbeat from rank 0 of 3 on node0, rank 1 of 3 on node1 for 1 s")


def connected(monitor):
    return socket.create_connection(split_address(monitor.environment[SUPERVISOR].split()[1]), timeout=60)


def greeted(monitor, greeting):
    """Return a connection with the right key and a greeting."""
    made = connected(monitor)
    nonce, key = receive(made, NONCE), monitor.environment[SUPERVISOR].split()[0]
    made.sendall(proof(key, nonce, "rank"))
    assert receive(made, 32) == proof(key, nonce, "supervisor")
    made.sendall(greeting)
    return made


def test_who_has_not_the_key_learns_and_changes_nothing(monitor):
    for data in (b"x" * 32, proof("other", b"0" * NONCE, "rank") + b"0 1 node\n", os.urandom(5000)):
        with connected(monitor) as made:
            assert len(receive(made, NONCE)) == NONCE
            made.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                assert receive(made, 1) == b""
    assert monitor.members == {}


@pytest.mark.parametrize(
    "greeting", [b"2 1 node\n", b"-1 1 node\n", b"x\n", b"0 1 a\x1bb\n", b"0" * 600, b"1 1 node\n"]
)
def test_greetings_of_no_rank(monitor, greeting):
    first = greeted(monitor, b"1 1 node\nlistens\n")
    wait(lambda: 1 in monitor.members)
    with greeted(monitor, greeting) as made:
        assert receive(made, 1) == b""
    assert list(monitor.members) == [1]
    assert not monitor.loss
    first.close()


def test_a_supervisor_that_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    env = {**os.environ, SUPERVISOR: f"key 127.0.0.1:{port}", "PMIX_RANK": "1", "NEONDIST_LAUNCHED": "2"}
    done = subprocess.run([sys.executable, "-c", RANK], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot reach the process that started it, at 127.0.0.1:{port}" in done.stderr
