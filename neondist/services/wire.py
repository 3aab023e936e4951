"""Services over gRPC: a host that listens, and a client that calls; messages as `message` writes them, in chunks.

A service is a class with a name and methods:

    class Clock(Service):
        name = "Clock"

        def methods(self) -> Mapping[str, Method]:
            return {"add": self.add}

        def add(self, request: Message) -> Message:
            return Message({"sum": request.number("a") + request.number("b")})

    with ServiceHost([Clock()], "127.0.0.1:0", token) as host:
        with ServiceClient(host.address, "Clock", token) as clock:
            clock.call("add", {"a": 1, "b": 2}).number("sum")

A method may raise `MessageError` where a request is invalid, and any `UserError` to refuse it: callers get a
`ServiceError` with its message. After a `ServiceUnavailableError` callers try again. Each call runs in a thread of the
host, so methods guard what they share.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from types import TracebackType
from typing import Any

from ..errors import ConfigError, ServiceError, ServiceUnavailableError, UserError
from ..version import __version__
from .message import CHUNK, Arrays, Message, MessageError, ProtocolError, decode, encode

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it has to say comes as an error, too
import grpc

TOKEN = "NEONDIST_TOKEN"
"""The environment variable that hands the job's token to its processes."""
LIMIT = 4 << 30
"""Default limit of a message's arrays in bytes."""
LONGEST_CALL = 3600.0
"""Seconds; a call without a deadline, or with a later one, is refused."""
_KEY = "neondist-token"
_DETAILS = 1500
_COMMON = [
    ("grpc.max_receive_message_length", CHUNK + 4096),
    ("grpc.max_send_message_length", CHUNK + 4096),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 64 << 20),
]
_HOST = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # two servers on one port would share its calls
    ("grpc.http2.max_ping_strikes", 0),  # a loaded machine delays pings, which then seem too many
    ("grpc.keepalive_permit_without_calls", 1),
]
_CLIENT = [
    *_COMMON,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # that an attempt may take; a loaded machine answers late
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_ABSENT = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
_RETRIED = *_ABSENT, grpc.StatusCode.ABORTED

Method = Callable[[Message], Message]


class Service(ABC):
    """Methods that other processes of the job call.

    Attributes
    ----------
    name : str
        Of the service, such as 'PServer'.
    """

    name: str

    @abstractmethod
    def methods(self) -> Mapping[str, Method]:
        """Return the methods by the names under which they are called; 'hello' is there already."""


def create_token() -> str:
    """Return a new secret token for a job."""
    return secrets.token_urlsafe(32)


def read_token(environ: Mapping[str, str]) -> str:
    """Return the job's token from the environment.

    Raises
    ------
    ConfigError
        It is missing, or too short to be a secret.
    """
    token = environ.get(TOKEN, "")
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{TOKEN}: expected a secret of at least 16 letters and digits, the same for all processes of a job; create"
            " one, for example with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


class ServiceHost:
    """A process's listening end; a context manager.

    Parameters
    ----------
    services : iterable of Service
    address : str
        'HOST:PORT' of this machine to listen on; port 0: any free one.
    token : str
        Calls without it are refused unread.
    limit : int
        Largest size of a request's arrays in bytes.
    threads : int
        Calls at a time, those that wait for something included; further ones are refused, and clients try again.

    Attributes
    ----------
    address : str
        With the port that was chosen.

    Raises
    ------
    ConfigError
        The address is not of this machine, or in use.
    """

    def __init__(
        self, services: Iterable[Service], address: str, token: str, limit: int = LIMIT, threads: int = 256
    ) -> None:
        host = _check_free(address)
        self._server = grpc.server(
            ThreadPoolExecutor(threads, "service"), options=_HOST, maximum_concurrent_rpcs=threads
        )
        methods = {
            f"/neondist.{service.name}/{name}": _StreamHandler(method, limit)
            for service in services
            for name, method in {"hello": _hello, **service.methods()}.items()
        }
        self._server.add_generic_rpc_handlers((_Methods(methods, token),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:  # since it was found free
            raise ConfigError(f"{address}: in use; choose another port") from None
        self.address = f"{host}:{port}"
        self._server.start()

    def wait(self) -> None:
        """Wait until the host is stopped, or the process interrupted."""
        self._server.wait_for_termination()

    def stop(self, grace: float = 1.0) -> None:
        """Refuse new calls, and end those that have not ended within `grace` seconds."""
        self._server.stop(grace).wait()

    def __enter__(self) -> ServiceHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ServiceClient:
    """A connection to one service; a context manager.

    Parameters
    ----------
    address : str
        'HOST:PORT'.
    service : str
        Its name.
    token : str
    timeout : float
        Seconds that a call may take.
    patience : float
        Seconds for which unanswered calls are retried, as while a server restarts. Methods must accept that a
        request arrives twice.
    limit : int
        Largest size of a reply's arrays in bytes.
    """

    def __init__(
        self,
        address: str,
        service: str,
        token: str,
        timeout: float = 300.0,
        patience: float = 30.0,
        limit: int = LIMIT,
    ) -> None:
        self.address, self.service, self.timeout, self.patience = address, service, timeout, patience
        self._limit, self._metadata = limit, ((_KEY, token),)
        self._channel = grpc.insecure_channel(address, options=_CLIENT)
        self._threads = ThreadPoolExecutor(4, f"{service}-client")
        self._closed = threading.Event()

    def call(
        self,
        method: str,
        fields: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Arrays] | None = None,
        timeout: float | None = None,
    ) -> Message:
        """Call a method and return its reply.

        Raises
        ------
        ServiceError
            The service refuses the call, or is of another version.
        ServiceUnavailableError
            No answer within `patience` or `timeout`.
        """
        message, timeout = Message(fields or {}, arrays or {}), self.timeout if timeout is None else timeout
        given_up, pause = time.monotonic() + self.patience, 0.02
        while True:
            try:
                return self._attempt(method, message, timeout)
            except grpc.RpcError as error:
                if error.code() not in _RETRIED or time.monotonic() + pause > given_up or self._closed.is_set():
                    raise self._error(method, error) from None
                self._closed.wait(pause)
                pause = min(2 * pause, 0.5)
            except MessageError as error:
                raise ServiceError(f"{self.service} at {self.address}: {method}: invalid reply: {error}") from None

    def submit(
        self, method: str, fields: Mapping[str, Any] | None = None, arrays: Mapping[str, Arrays] | None = None
    ) -> Future[Message]:
        """Call a method in a thread; the arrays must stay as they are until the future is done."""
        return self._threads.submit(self.call, method, fields, arrays)

    def hello(self) -> None:
        """Check that the service is there, and of this version.

        Raises
        ------
        ServiceError
        """
        theirs = self.call("hello").text("version")
        if theirs != __version__:
            here = f"this process {__version__}; install one version"
            raise ServiceError(f"{self.service} at {self.address} has neondist {theirs}, {here}")

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._closed.set()
        self._channel.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attempt(self, method: str, message: Message, timeout: float) -> Message:
        path, chunks = f"/neondist.{self.service}/{method}", encode(message)
        first, second = next(chunks), next(chunks, None)
        if second is None:  # saves the thread that sends a stream
            call = self._channel.unary_stream(path)(first, timeout=timeout, metadata=self._metadata)
        else:
            stream = self._channel.stream_stream(path)
            call = stream(chain((first, second), chunks), timeout=timeout, metadata=self._metadata)
        try:
            return decode(call, self._limit)
        finally:
            call.cancel()

    def _error(self, method: str, error: Any) -> ServiceError:
        code, who = error.code(), f"{self.service} at {self.address}"
        if code in _ABSENT or code == grpc.StatusCode.CANCELLED:
            return ServiceUnavailableError(f"{who}: no answer; check its address and that it is running")
        if code == grpc.StatusCode.ABORTED:
            return ServiceUnavailableError(f"{who}: {error.details()}")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return ServiceUnavailableError(f"{who}: {method}: no answer in time")
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return ServiceError(f"{who}: the token was rejected; give all processes of a job the same {TOKEN}")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return ServiceError(f"{who}: no method '{method}'; install the same version of neondist for all processes")
        return ServiceError(f"{who}: {error.details()}")


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of 'HOST:PORT'.

    Raises
    ------
    ConfigError
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"address '{address}': expected HOST:PORT, such as 10.0.0.1:7001")
    return host, int(port)


def _check_free(address: str) -> str:
    """Return the host of an address without a listener."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise ConfigError(
            f"{address}: cannot listen ({error.strerror or error}); choose another port or host"
        ) from None
    return host


def _hello(request: Message) -> Message:
    return Message({"version": __version__, "process": os.getpid()})


class _Methods(grpc.GenericRpcHandler):
    """Table of methods; without the token there are none."""

    def __init__(self, methods: Mapping[str, Any], token: str) -> None:
        self._methods, self._token = methods, token.encode()

    def service(self, details: Any) -> Any:
        given = b""
        for key, value in details.invocation_metadata or ():
            if key == _KEY:
                given = value.encode() if isinstance(value, str) else value
        if not hmac.compare_digest(given, self._token):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return self._methods.get(details.method)


def _refuse(requests: Any, context: Any) -> Iterator[bytes]:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
    yield b""


class _StreamHandler(grpc.RpcMethodHandler):
    """One method, as gRPC calls it: messages in chunks both ways."""

    request_streaming = response_streaming = True
    request_deserializer = response_serializer = None
    unary_unary = unary_stream = stream_unary = None

    def __init__(self, method: Method, limit: int) -> None:
        self._method, self._limit = method, limit

    def stream_stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Yield the reply."""
        code, text = grpc.StatusCode.INVALID_ARGUMENT, ""
        remaining = context.time_remaining()
        if remaining is None or remaining > LONGEST_CALL:
            context.abort(code, f"a deadline of at most {LONGEST_CALL:g} s is needed")
        try:
            reply = encode(self._method(decode(requests, self._limit)))
        except ProtocolError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            text = f"{error}; install the same version of neondist everywhere"
        except MessageError as error:
            text = f"invalid request: {error}"
        except ServiceUnavailableError as error:
            code, text = grpc.StatusCode.ABORTED, str(error)
        except UserError as error:
            code, text = grpc.StatusCode.FAILED_PRECONDITION, str(error)
        except grpc.RpcError:  # the caller is gone
            return
        except Exception:
            traceback.print_exc(file=sys.stderr)
            code, text = grpc.StatusCode.INTERNAL, "failed; see its output"
        if text:
            context.abort(code, text[:_DETAILS])
        yield from reply
