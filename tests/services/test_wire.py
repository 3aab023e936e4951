"""Services over real gRPC: replies, errors, tokens, limits, and hostile input."""

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
from neondist.services.message import CHUNK, HEADER, MAGIC, PROTOCOL, Message, encode
from neondist.services.wire import Service, ServiceClient, ServiceHost, create_token, read_token, split_address

TOKEN = create_token()


class Echo(Service):
    """Repeats what it is given, and counts."""

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
    with ServiceHost([echo], "127.0.0.1:0", TOKEN, limit=8 * CHUNK) as host:
        yield host


@pytest.fixture
def client(host):
    with ServiceClient(host.address, "Echo", TOKEN, patience=0.2) as client:
        yield client


def test_arrays_of_several_chunks_come_back(client):
    client.hello()
    array = np.random.default_rng(0).normal(size=(400, 700))
    found = [client.submit("echo", {"n": n}, {"x": array + n}) for n in range(3)]
    for n, future in enumerate(found):
        assert future.result().fields == {"n": n}
        np.testing.assert_array_equal(future.result().arrays["x"], array + n)


def test_errors_arrive_as_one_message(client, capfd):
    with pytest.raises(ServiceError, match="field 3 is wrong"):
        client.call("refuse", {"field": 3})
    with pytest.raises(ServiceError, match="invalid request: field 'field': expected int, got str"):
        client.call("refuse", {"field": "3"})
    with pytest.raises(ServiceError, match="failed; see its output"):
        client.call("fail")
    assert "a defect" in capfd.readouterr().err
    with pytest.raises(ServiceError, match="no method 'other'"):
        client.call("other")


@pytest.mark.parametrize(
    "token", ["", "x", TOKEN[:-1], TOKEN + "x", create_token()], ids=["none", "short", "cut", "longer", "other"]
)
def test_without_the_token_nothing_is_called(host, echo, token):
    with ServiceClient(host.address, "Echo", token, patience=0) as client:
        for method in ("echo", "hello", "other"):
            with pytest.raises(ServiceError, match="the token was rejected"):
                client.call(method, {}, {"x": np.zeros(2 * CHUNK)})
    assert echo.calls == 0


def raw_call(channel, path, chunks, token=TOKEN, timeout=10.0):
    """Return the status code and details of a call that sends these bytes."""
    metadata = () if token is None else (("neondist-token", token),)
    call = channel.stream_stream(path)(iter(chunks), timeout=timeout, metadata=metadata)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code().name, call.details()


def test_oversized_and_truncated_requests_are_refused(host, echo, client):
    whole = b"".join(encode(Message({}, {"x": np.zeros(100)})))
    huge = HEADER.pack(MAGIC, PROTOCOL, 0, 2, 8 * CHUNK + 1) + b"{}"
    other = HEADER.pack(MAGIC, PROTOCOL + 1, 0, 2, 0) + b"{}"
    with grpc.insecure_channel(host.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        path = "/neondist.Echo/echo"
        assert raw_call(channel, path, [huge])[0] == "INVALID_ARGUMENT"
        assert raw_call(channel, path, [whole[:-1]]) == ("INVALID_ARGUMENT", "invalid request: truncated")
        assert raw_call(channel, path, []) == ("INVALID_ARGUMENT", "invalid request: truncated header")
        assert raw_call(channel, path, [bytes(2 * CHUNK)])[0] == "RESOURCE_EXHAUSTED"
        code, details = raw_call(channel, path, [other])
        assert (code, "install the same version of neondist" in details) == ("FAILED_PRECONDITION", True)
        assert raw_call(channel, path, [whole], timeout=None)[0] == "INVALID_ARGUMENT"
        assert raw_call(channel, path, [whole], token=None)[0] == "UNAUTHENTICATED"
    assert echo.calls == 0
    assert client.call("echo", {"a": 1}).fields == {"a": 1}


def test_random_messages_are_refused(host, echo, client):
    """A sample; tools/random_messages.py sends 10,000."""
    from random_messages import send

    assert send(host.address, "/neondist.Echo/echo", TOKEN, 200, seed=int(os.environ["NEONDIST_SEED"])) == 200
    assert echo.calls == 0
    assert client.call("echo", {"a": 1}).fields == {"a": 1}


def test_bytes_that_are_not_http_leave_the_server_alive(host, client):
    draw = random.Random(2)
    for _ in range(50):
        with socket.create_connection(split_address(host.address)) as connection:
            connection.sendall(draw.randbytes(draw.randint(0, 400)))
    assert client.call("echo", {"a": 1}).fields == {"a": 1}


def test_an_address_in_use_or_of_another_machine_is_named(host):
    with pytest.raises(ConfigError, match=f"{host.address}: cannot listen"):
        ServiceHost([], host.address, TOKEN)
    with pytest.raises(ConfigError, match="cannot listen"):
        ServiceHost([], "192.0.2.1:0", TOKEN)
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        ServiceHost([], "7001", TOKEN)


def test_a_missing_server_is_named_within_patience_and_deadline(host, echo):
    with ServiceClient(host.address, "Echo", TOKEN, timeout=0.2, patience=0) as client:
        with pytest.raises(ServiceUnavailableError, match="no answer in time"):
            client.call("block")
        echo.release.set()
        host.stop(0)
        with pytest.raises(ServiceUnavailableError, match="no answer; check its address"):
            client.call("echo")


def test_calls_go_on_with_a_server_that_is_started_again(echo):
    host = ServiceHost([echo], "127.0.0.1:0", TOKEN)
    with ServiceClient(host.address, "Echo", TOKEN, patience=20) as client:
        assert client.call("echo", {"n": 1}).integer("n") == 1
        host.stop(0)
        waiting = client.submit("echo", {"n": 2})
        with ServiceHost([echo], host.address, TOKEN):
            assert waiting.result().integer("n") == 2


def forward(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def test_a_server_that_is_slow_to_take_a_connection_is_waited_for(host):
    """The machine has accepted it, as where the process is stopped for a while, or others have its cores."""
    with (
        socket.create_server(("127.0.0.1", 0)) as slow,
        ServiceClient(f"127.0.0.1:{slow.getsockname()[1]}", "Echo", TOKEN, patience=0) as client,
        contextlib.ExitStack() as ends,
    ):
        reply = client.submit("echo", {"n": 1})
        threading.Event().wait(0.3)
        near = ends.enter_context(slow.accept()[0])
        far = ends.enter_context(socket.create_connection(split_address(host.address)))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=forward, args=pair, daemon=True).start()
        assert reply.result().integer("n") == 1


def test_a_token_is_a_secret():
    assert read_token({"NEONDIST_TOKEN": TOKEN}) == TOKEN
    for environ in ({}, {"NEONDIST_TOKEN": ""}, {"NEONDIST_TOKEN": "short"}, {"NEONDIST_TOKEN": "line\n" * 9}):
        with pytest.raises(ConfigError, match="NEONDIST_TOKEN: expected a secret"):
            read_token(environ)


class Old(Echo):
    """A service of another version."""

    def methods(self):
        return {"hello": lambda request: Message({"version": "0.0.1"})}


def test_a_server_of_another_version_is_named():
    with (
        ServiceHost([Old()], "127.0.0.1:0", TOKEN) as host,
        ServiceClient(host.address, "Echo", TOKEN) as client,
        pytest.raises(ServiceError, match=r"has neondist 0\.0\.1, this process .*; install one version"),
    ):
        client.hello()
