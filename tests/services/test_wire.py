"""Services over gRPC: replies, errors, tokens, limits, and hostile input."""

import contextlib
import os
import random
import socket
import threading

import grpc
import numpy as np
import pytest

from neondist import ConfigError
from neondist.errors import ServiceError, ServiceUnavailableError
from neondist.services import wire
from neondist.services.message import CHUNK_BYTES, HEADER, MAGIC, PROTOCOL_VERSION, Message, encode
from neondist.services.wire import Service, ServiceClient, ServiceHost, create_token, read_token, split_address

TOKEN = create_token()


class Echo(Service):
    """Service that returns its requests, and counts them."""

    name = "Echo"

    def __init__(self):
        self.calls = 0
        self.release = threading.Event()

    def methods(self):
        return {"echo": self.echo, "refuse": self.refuse, "fail": self.fail, "block": self.block}

    def echo(self, request):
        self.calls += 1
        return Message(request.fields, request.arrays)

    def refuse(self, request):
        raise ConfigError(f"field {request.integer('field')} is wrong")

    def fail(self, request):
        raise RuntimeError("a defect")

    def block(self, request):
        self.release.wait(30)
        return Message()


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def host(echo):
    with ServiceHost([echo], "127.0.0.1:0", TOKEN, max_bytes=8 * CHUNK_BYTES) as host:
        yield host


@pytest.fixture
def client(host):
    with ServiceClient(host.address, "Echo", TOKEN, retry_seconds=0.2) as client:
        yield client


def test_arrays_of_several_chunks(client):
    client.check_service_version()
    array = np.random.default_rng(0).normal(size=(400, 700))
    futures = [client.submit("echo", {"n": n}, {"x": array + n}) for n in range(3)]
    for n, future in enumerate(futures):
        assert future.result().fields == {"n": n}
        np.testing.assert_array_equal(future.result().arrays["x"], array + n)


def test_errors_arrive_as_one_message(client, capfd):
    with pytest.raises(ServiceError, match="field 3 is wrong"):
        client.call("refuse", {"field": 3})
    with pytest.raises(ServiceError, match="invalid request: field 'field': expected int, got str"):
        client.call("refuse", {"field": "3"})
    with pytest.raises(ServiceError, match="the call failed; see the output of the service"):
        client.call("fail")
    assert "a defect" in capfd.readouterr().err
    with pytest.raises(ServiceError, match="no method 'other'"):
        client.call("other")


@pytest.mark.parametrize(
    "token", ["", "x", TOKEN[:-1], TOKEN + "x", create_token()], ids=["none", "short", "cut", "longer", "other"]
)
def test_calls_without_the_token_are_rejected(host, echo, token):
    with ServiceClient(host.address, "Echo", token, retry_seconds=0) as client:
        for method in ("echo", "hello", "other"):
            with pytest.raises(ServiceError, match="the token was rejected"):
                client.call(method, {}, {"x": np.zeros(2 * CHUNK_BYTES)})
    assert echo.calls == 0


def call_raw(channel, path, chunks, token=TOKEN, timeout=10.0):
    """Return the status code and details of a call that sends raw bytes."""
    metadata = () if token is None else (("neondist-token", token),)
    call = channel.stream_stream(path)(iter(chunks), timeout=timeout, metadata=metadata)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code().name, call.details()


def test_oversized_and_truncated_requests_are_rejected(host, echo, client):
    encoded = b"".join(encode(Message({}, {"x": np.zeros(100)})))
    huge = HEADER.pack(MAGIC, PROTOCOL_VERSION, 0, 2, 8 * CHUNK_BYTES + 1) + b"{}"
    other_version = HEADER.pack(MAGIC, PROTOCOL_VERSION + 1, 0, 2, 0) + b"{}"
    with grpc.insecure_channel(host.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        path = "/neondist.Echo/echo"
        assert call_raw(channel, path, [huge])[0] == "INVALID_ARGUMENT"
        assert call_raw(channel, path, [encoded[:-1]]) == (
            "INVALID_ARGUMENT",
            "invalid request: the message ends before all bytes that its header declares",
        )
        assert call_raw(channel, path, []) == ("INVALID_ARGUMENT", "invalid request: the header is truncated")
        assert call_raw(channel, path, [bytes(2 * CHUNK_BYTES)])[0] == "RESOURCE_EXHAUSTED"
        code, details = call_raw(channel, path, [other_version])
        assert (code, "install the same version of neondist" in details) == ("FAILED_PRECONDITION", True)
        assert call_raw(channel, path, [encoded], timeout=None)[0] == "INVALID_ARGUMENT"
        assert call_raw(channel, path, [encoded], token=None)[0] == "UNAUTHENTICATED"
    assert echo.calls == 0
    assert client.call("echo", {"a": 1}).fields == {"a": 1}


def test_random_messages_are_rejected(host, echo, client):
    """Send a sample; tools/random_messages.py sends 10,000."""
    from random_messages import send_messages

    assert send_messages(host.address, "/neondist.Echo/echo", TOKEN, 200, seed=int(os.environ["NEONDIST_SEED"])) == 200
    assert echo.calls == 0
    assert client.call("echo", {"a": 1}).fields == {"a": 1}


def test_server_survives_other_protocols(host, client):
    rng = random.Random(2)
    for _ in range(50):
        with socket.create_connection(split_address(host.address)) as connection:
            connection.sendall(rng.randbytes(rng.randint(0, 400)))
    assert client.call("echo", {"a": 1}).fields == {"a": 1}


def test_unusable_addresses_are_reported(host):
    with pytest.raises(ConfigError, match=f"{host.address}: cannot listen"):
        ServiceHost([], host.address, TOKEN)
    with pytest.raises(ConfigError, match="cannot listen"):
        ServiceHost([], "192.0.2.1:0", TOKEN)
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        ServiceHost([], "7001", TOKEN)


def test_missing_server_is_reported_in_time(host, echo):
    with ServiceClient(host.address, "Echo", TOKEN, timeout=0.2, retry_seconds=0) as client:
        with pytest.raises(ServiceUnavailableError, match="no answer in time"):
            client.call("block")
        echo.release.set()
        host.stop(0)
        with pytest.raises(ServiceUnavailableError, match="no answer; check its address"):
            client.call("echo")


def test_calls_survive_a_restart_of_the_server(echo):
    host = ServiceHost([echo], "127.0.0.1:0", TOKEN)
    with ServiceClient(host.address, "Echo", TOKEN, retry_seconds=20) as client:
        assert client.call("echo", {"n": 1}).integer("n") == 1
        host.stop(0)
        waiting = client.submit("echo", {"n": 2})
        with ServiceHost([echo], host.address, TOKEN):
            assert waiting.result().integer("n") == 2


def test_long_retries_are_reported_once(host, monkeypatch, capsys):
    monkeypatch.setattr(wire, "_QUIET_RETRY_SECONDS", 0.05)
    host.stop(0)
    with ServiceClient(host.address, "Echo", TOKEN, retry_seconds=0.5) as client:
        for call in (client.submit("echo"), client.submit("echo")):
            with pytest.raises(ServiceUnavailableError):
                call.result()
    printed = [line for line in capsys.readouterr().err.splitlines() if " Echo " in line]  # by this client
    assert printed == [f"warning: no answer from Echo at {host.address}; retrying for 0.5 s"]


def forward(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def test_slow_server_is_awaited(host):
    """Delay the server after the system has accepted its connection, as when it is suspended or has no core."""
    with (
        socket.create_server(("127.0.0.1", 0)) as slow,
        ServiceClient(f"127.0.0.1:{slow.getsockname()[1]}", "Echo", TOKEN, retry_seconds=0) as client,
        contextlib.ExitStack() as stack,
    ):
        reply = client.submit("echo", {"n": 1})
        threading.Event().wait(0.3)
        client_side = stack.enter_context(slow.accept()[0])
        server_side = stack.enter_context(socket.create_connection(split_address(host.address)))
        for pair in ((client_side, server_side), (server_side, client_side)):
            threading.Thread(target=forward, args=pair, daemon=True).start()
        assert reply.result().integer("n") == 1


def test_tokens_are_secrets():
    assert read_token({"NEONDIST_TOKEN": TOKEN}) == TOKEN
    for environ in ({}, {"NEONDIST_TOKEN": ""}, {"NEONDIST_TOKEN": "short"}, {"NEONDIST_TOKEN": "line\n" * 9}):
        with pytest.raises(ConfigError, match="NEONDIST_TOKEN: expected a secret"):
            read_token(environ)


class OutdatedEcho(Echo):
    """Service of another version."""

    def methods(self):
        return {"hello": lambda request: Message({"version": "0.0.1"})}


def test_other_versions_are_reported():
    with (
        ServiceHost([OutdatedEcho()], "127.0.0.1:0", TOKEN) as host,
        ServiceClient(host.address, "Echo", TOKEN) as client,
        pytest.raises(ServiceError, match=r"has neondist 0\.0\.1, but this process has .*; install the same version"),
    ):
        client.check_service_version()
