"""Ranks and their supervisor: messages, losses, leases, and foreign connections."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from processes import communicate
from waiting import wait_until

from neondist.launcher import monitor as monitor_module
from neondist.launcher.monitor import Monitor
from neondist.system.heartbeat import NONCE_BYTES, SUPERVISOR_VARIABLE, compute_proof, receive_bytes, split_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
RANK_SCRIPT = """
import os, sys, time
from neondist.system.heartbeat import connect_to_supervisor, send_to_supervisor
connect_to_supervisor(os.environ)
assert "NEONDIST_SUPERVISOR" not in os.environ
print("ready", flush=True)
for word in sys.argv[1:]:
    input()
    send_to_supervisor(os.environ, word)
input()
os._exit(0)
"""


class RankProcesses:
    """Processes that act as ranks of a monitor, and send one word per line of input."""

    def __init__(self, monitor):
        self.monitor, self.started = monitor, []

    def start(self, rank, *words):
        env = {**os.environ, **self.monitor.environment, "PMIX_RANK": str(rank), "NEONDIST_LAUNCHED": "2"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", RANK_SCRIPT, *words], env=env, text=True, **pipes)
        self.started.append(process)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        return process


def send_next_word(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def monitor():
    with Monitor(2, lease=2.5) as monitor:
        yield monitor


@pytest.fixture
def ranks(monitor):
    ranks = RankProcesses(monitor)
    yield ranks
    for process in ranks.started:
        process.kill()
        process.communicate()


def test_status_messages_and_normal_exit(monitor, ranks):
    processes = [ranks.start(rank, "listens", "ended 0") for rank in (0, 1)]
    assert not monitor.all_ranks_handle_sigusr1()
    for process in processes:
        send_next_word(process)
    wait_until(lambda: monitor.all_ranks_handle_sigusr1())
    assert monitor.ranks_without_exit_code() == [0, 1]
    for process in processes * 2:
        send_next_word(process)
    monitor.drain_connections()
    assert (monitor.ranks_without_exit_code(), monitor.failure_message, monitor.exit_code) == ([], "", 0)
    assert monitor.job_end_time is not None


def test_killed_rank_is_lost_and_others_can_be_ended(monitor, ranks):
    first, second = (ranks.start(rank) for rank in (0, 1))
    second.send_signal(signal.SIGKILL)
    wait_until(lambda: monitor.failure_message)
    assert monitor.failure_message.startswith(f"rank 1 of 2 on {os.uname().nodename} exited without reporting an error")
    assert monitor.lost_rank == 1
    monitor.kill_remaining_ranks()
    communicate(first, 60)
    assert first.returncode == -signal.SIGKILL


def test_failed_rank_is_not_lost(monitor, ranks):
    """Report neither it nor ranks that the launcher ends afterwards."""
    first, second = ranks.start(0, "ended 2"), ranks.start(1)
    send_next_word(first)
    wait_until(lambda: monitor.exit_code)
    wait_until(lambda: monitor.job_end_time)  # even if it does not exit
    second.kill()
    first.kill()
    monitor.drain_connections()
    assert (monitor.failure_message, monitor.exit_code) == ("", 2)


def test_stopped_rank_loses_its_lease_and_is_ended(monitor, ranks):
    first, second = (ranks.start(rank) for rank in (0, 1))
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: monitor.failure_message)
    assert monitor.failure_message.startswith(f"no heartbeat from rank 0 of 2 on {os.uname().nodename} for 2.5 s")
    monitor.kill_remaining_ranks()
    for process in (first, second):
        communicate(process, 60)
        assert process.returncode == -signal.SIGKILL


def test_rank_that_never_connects_is_lost(monkeypatch):
    """It was stopped, or waits for a file system, before its first heartbeat."""
    monkeypatch.setattr(monitor_module, "_SELECT_TIMEOUT", 0.02)
    with Monitor(3, start_timeout=0.5) as monitor, greet(monitor, b"1 1 node1\n"):
        wait_until(lambda: monitor.failure_message)
        assert (monitor.lost_rank, monitor.silent_ranks) == (0, (0, 2))
        assert monitor.failure_message.startswith("no heartbeat from rank 0 of 3, rank 2 of 3 for 0.5 s: stopped, or")


def test_ranks_silent_at_about_the_same_time_are_lost_together(monkeypatch):
    monkeypatch.setattr(monitor_module, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(monitor_module, "_SELECT_TIMEOUT", 0.02)
    with Monitor(3, lease=1.0) as monitor, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(greet(monitor, f"{rank} 1 node{rank}\n".encode())) for rank in (0, 1, 2)]
        end = time.monotonic() + 0.3
        while not monitor.failure_message:
            for connection in connections[1 if time.monotonic() < end else 2 :]:
                with contextlib.suppress(OSError):
                    connection.sendall(b"\n")
            time.sleep(0.01)
        assert monitor.silent_ranks == (0, 1)
        assert monitor.failure_message.startswith(
            "no heartbeat from rank 0 of 3 on node0, rank 1 of 3 on node1 for 1 s"
        )


def connect(monitor):
    return socket.create_connection(split_address(monitor.environment[SUPERVISOR_VARIABLE].split()[1]), timeout=60)


def greet(monitor, greeting):
    """Return a connection with the right key, after a greeting."""
    connection = connect(monitor)
    nonce, key = receive_bytes(connection, NONCE_BYTES), monitor.environment[SUPERVISOR_VARIABLE].split()[0]
    connection.sendall(compute_proof(key, nonce, "rank"))
    assert receive_bytes(connection, 32) == compute_proof(key, nonce, "supervisor")
    connection.sendall(greeting)
    return connection


def test_connections_without_the_key_are_rejected(monitor):
    for data in (b"x" * 32, compute_proof("other", b"0" * NONCE_BYTES, "rank") + b"0 1 node\n", os.urandom(5000)):
        with connect(monitor) as connection:
            assert len(receive_bytes(connection, NONCE_BYTES)) == NONCE_BYTES
            connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                assert receive_bytes(connection, 1) == b""
    assert monitor.rank_states == {}


@pytest.mark.parametrize(
    "greeting", [b"2 1 node\n", b"-1 1 node\n", b"x\n", b"0 1 a\x1bb\n", b"0" * 600, b"1 1 node\n"]
)
def test_invalid_greetings(monitor, greeting):
    first = greet(monitor, b"1 1 node\nlistens\n")
    wait_until(lambda: 1 in monitor.rank_states)
    with greet(monitor, greeting) as connection:
        assert receive_bytes(connection, 1) == b""
    assert list(monitor.rank_states) == [1]
    assert not monitor.failure_message
    first.close()


def test_unreachable_supervisor():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {**os.environ, SUPERVISOR_VARIABLE: f"key 127.0.0.1:{port}", "PMIX_RANK": "1", "NEONDIST_LAUNCHED": "2"}
    process = subprocess.run([sys.executable, "-c", RANK_SCRIPT], env=env, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert f"cannot reach the process that started it, at 127.0.0.1:{port}" in process.stderr
