"""Services over gRPC: a host and a client, which exchange messages (`message.Message`) in chunks.

A service is a class with a name and methods:

    class Clock(Service):
        name = "Clock"

        def methods(self) -> Mapping[str, ServiceMethod]:
            return {"add": self.add}

        def add(self, request: Message) -> Message:
            return Message({"sum": request.number("a") + request.number("b")})

    with ServiceHost([Clock()], "127.0.0.1:0", token) as host:
        with ServiceClient(host.address, "Clock", token) as clock:
            clock.call("add", {"a": 1, "b": 2}).number("sum")

A method may raise `MessageError` for an invalid request, or any `UserError` to reject one: callers get a `ServiceError`
with the same message. After a `ServiceUnavailableError`, callers retry. Each call runs in a thread of the host, so
methods must protect shared state.
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
from functools import partial
from itertools import chain
from typing import Any

from ..errors import ConfigError, ServiceError, ServiceUnavailableError, UserError
from ..system.heartbeat import has_port
from ..terminal.console import say
from ..version import __version__
from .message import CHUNK_BYTES, Message, MessageArray, MessageError, ProtocolVersionError, decode, encode

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's messages are also raised as errors
import grpc

TOKEN_VARIABLE = "NEONDIST_TOKEN"
MAX_ARRAY_BYTES = 4 << 30
"""Default limit of a message's arrays in bytes."""
MAX_CALL_SECONDS = 3600.0
"""Longest deadline of a call in seconds; calls without a deadline are rejected."""
_TOKEN_METADATA_KEY = "neondist-token"
_MAX_DETAIL_LENGTH = 1500
_COMMON_OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK_BYTES + 4096),
    ("grpc.max_send_message_length", CHUNK_BYTES + 4096),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 64 << 20),
]
_HOST_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # two servers on one port would share calls
    ("grpc.http2.max_ping_strikes", 0),  # a loaded machine delays pings, which then arrive in bursts
    ("grpc.keepalive_permit_without_calls", 1),
]
_CLIENT_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # a loaded machine responds late
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_UNAVAILABLE_CODES = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
_QUIET_RETRY_SECONDS = 5.0
"""Seconds of retries after which a client prints a warning: more than a restart on the same machine takes."""
_RETRY_CODES = *_UNAVAILABLE_CODES, grpc.StatusCode.ABORTED

Reply = Message | list[bytes]
"""Reply of a method, or the encoded chunks of a reply that several callers receive."""
ServiceMethod = Callable[[Message], Reply]


class Service(ABC):
    """Base class of services, whose methods other processes of the job call.

    Attributes
    ----------
    name : str
        Name of the service, such as 'PServer'.
    """

    name: str

    @abstractmethod
    def methods(self) -> Mapping[str, ServiceMethod]:
        """Return the methods by name; 'hello' is predefined."""


def create_token() -> str:
    """Return a new secret token for a job."""
    return secrets.token_urlsafe(32)


def read_token(environ: Mapping[str, str]) -> str:
    """Return the job's token from the environment.

    Raises
    ------
    ConfigError
        The token is missing, or too short to be a secret.
    """
    token = environ.get(TOKEN_VARIABLE, "")
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{TOKEN_VARIABLE}: expected a secret of at least 16 printable ASCII characters, the same for all processes"
            " of a job; create one, for example with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


class ServiceHost:
    """Server side of services; a context manager.

    Parameters
    ----------
    services : iterable of Service
    address : str
        'HOST:PORT' of this machine to listen on; port 0 selects a free port.
    token : str
        Calls without this token are rejected unread.
    max_bytes : int
        Largest size of a request's arrays in bytes.
    threads : int
        Maximum number of concurrent calls, including calls that wait; further calls are rejected, and clients retry.

    Attributes
    ----------
    address : str
        Address with the selected port.

    Raises
    ------
    ConfigError
        The address does not belong to this machine, or is in use.
    """

    def __init__(
        self,
        services: Iterable[Service],
        address: str,
        token: str,
        max_bytes: int = MAX_ARRAY_BYTES,
        threads: int = 256,
    ) -> None:
        host = _require_free_address(address)
        self._server = grpc.server(
            ThreadPoolExecutor(threads, "service"), options=_HOST_OPTIONS, maximum_concurrent_rpcs=threads
        )
        methods = {
            f"/neondist.{service.name}/{name}": grpc.stream_stream_rpc_method_handler(
                partial(_answer_call, method, max_bytes)
            )
            for service in services
            for name, method in {"hello": _report_version, **service.methods()}.items()
        }
        self._server.add_generic_rpc_handlers((_AuthenticatedMethods(methods, token),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:  # the port was taken after the check
            raise ConfigError(f"{address}: is already in use; choose another port") from None
        self.address = f"{host}:{port}"
        self._server.start()

    def wait_until_stopped(self) -> None:
        """Block until the host is stopped or the process is interrupted."""
        self._server.wait_for_termination()

    def stop(self, grace: float = 1.0) -> None:
        """Reject new calls, and cancel those that have not finished within `grace` seconds."""
        self._server.stop(grace).wait()

    def __enter__(self) -> ServiceHost:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class ServiceClient:
    """Connection to a service; a context manager.

    Parameters
    ----------
    address : str
        'HOST:PORT'.
    service : str
        Name of the service.
    token : str
    timeout : float
        Seconds for each attempt of a call.
    retry_seconds : float
        Seconds for which failed calls are retried, such as while a server restarts. Methods must tolerate repeated
        requests.
    max_bytes : int
        Largest size of a reply's arrays in bytes.
    """

    def __init__(
        self,
        address: str,
        service: str,
        token: str,
        timeout: float = 300,
        retry_seconds: float = 30,
        max_bytes: int = MAX_ARRAY_BYTES,
    ) -> None:
        self.address, self.service, self.timeout, self.retry_seconds = address, service, timeout, retry_seconds
        self._max_bytes, self._metadata = max_bytes, ((_TOKEN_METADATA_KEY, token),)
        self._channel = grpc.insecure_channel(address, options=_CLIENT_OPTIONS)
        self._threads = ThreadPoolExecutor(4, f"{service}-client")
        self._closed, self._has_reported_retries = threading.Event(), False

    def call(
        self,
        method: str,
        fields: Mapping[str, Any] | None = None,
        arrays: Mapping[str, MessageArray] | None = None,
        timeout: float | None = None,
    ) -> Message:
        """Call a method and return its reply.

        Raises
        ------
        ServiceError
            The service rejects the call, or has another version of neondist.
        ServiceUnavailableError
            The service does not respond within `retry_seconds` or `timeout`.
        """
        message, timeout = Message(fields or {}, arrays or {}), self.timeout if timeout is None else timeout
        start, pause = time.monotonic(), 0.02
        while True:
            try:
                reply, self._has_reported_retries = self._call_once(method, message, timeout), False
                return reply
            except grpc.RpcError as error:
                elapsed_seconds = time.monotonic() + pause - start
                if error.code() not in _RETRY_CODES or elapsed_seconds > self.retry_seconds or self._closed.is_set():
                    raise self._translate_error(method, error) from None
                if elapsed_seconds > _QUIET_RETRY_SECONDS and not self._has_reported_retries:
                    self._has_reported_retries = True
                    peer = f"{self.service} at {self.address}"
                    say(f"warning: no answer from {peer}; retrying for {self.retry_seconds:g} s", sys.stderr)
                self._closed.wait(pause)
                pause = min(2 * pause, 0.5)
            except MessageError as error:
                problem = f"{method}: invalid reply ({error}); install the same version of neondist"
                raise ServiceError(f"{self.service} at {self.address}: {problem}") from None

    def submit(
        self, method: str, fields: Mapping[str, Any] | None = None, arrays: Mapping[str, MessageArray] | None = None
    ) -> Future[Message]:
        """Call a method in a thread; the arrays must not change until the future is done."""
        return self._threads.submit(self.call, method, fields, arrays)

    def check_service_version(self) -> None:
        """Check that the service is reachable and has this version of neondist; ServiceError if not."""
        version = self.call("hello").text("version")
        if version != __version__:
            remedy = f"but this process has {__version__}; install the same version"
            raise ServiceError(f"{self.service} at {self.address} has neondist {version}, {remedy}")

    def close(self) -> None:
        """Close the connection, and cancel running calls."""
        self._closed.set()
        self._channel.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call_once(self, method: str, message: Message, timeout: float) -> Message:
        path, chunks = f"/neondist.{self.service}/{method}", encode(message)
        first_chunk, second_chunk = next(chunks), next(chunks, None)
        if second_chunk is None:  # a single chunk needs no thread that sends a stream
            reply_chunks = self._channel.unary_stream(path)(first_chunk, timeout=timeout, metadata=self._metadata)
        else:
            stream = self._channel.stream_stream(path)
            reply_chunks = stream(chain((first_chunk, second_chunk), chunks), timeout=timeout, metadata=self._metadata)
        try:
            return decode(reply_chunks, self._max_bytes)
        finally:
            reply_chunks.cancel()

    def _translate_error(self, method: str, error: Any) -> ServiceError:
        code, peer = error.code(), f"{self.service} at {self.address}"
        if code in _UNAVAILABLE_CODES or code == grpc.StatusCode.CANCELLED:
            return ServiceUnavailableError(f"{peer}: no answer; check its address and that it is running")
        if code == grpc.StatusCode.ABORTED:
            return ServiceUnavailableError(f"{peer}: {error.details()}")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return ServiceUnavailableError(f"{peer}: {method}: no answer in time; check the load of the service")
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return ServiceError(f"{peer}: the token was rejected; give all processes the same {TOKEN_VARIABLE}")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return ServiceError(f"{peer}: no method '{method}'; install the same version of neondist for all processes")
        return ServiceError(f"{peer}: {error.details()}")


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of 'HOST:PORT'; ConfigError if it is invalid."""
    if not has_port(address):
        raise ConfigError(f"address '{address}': expected HOST:PORT or [IPV6]:PORT, such as 10.0.0.1:7001")
    host, _, port = address.rpartition(":")
    return host, int(port)


def _require_free_address(address: str) -> str:
    """Return the host of an address; ConfigError unless it is free."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(sockaddr)
    except OSError as error:
        raise ConfigError(
            f"{address}: cannot listen ({error.strerror or error}); choose another port or host"
        ) from None
    return host


def _report_version(request: Message) -> Message:
    return Message({"version": __version__, "process": os.getpid()})


class _AuthenticatedMethods(grpc.GenericRpcHandler):
    """Handlers of the methods, only for calls with the token."""

    def __init__(self, methods: Mapping[str, Any], token: str) -> None:
        self._methods, self._token = methods, token.encode()

    def service(self, details: Any) -> Any:
        token = b""
        for key, value in details.invocation_metadata or ():
            if key == _TOKEN_METADATA_KEY:
                token = value.encode() if isinstance(value, str) else value
        if not hmac.compare_digest(token, self._token):
            return grpc.stream_stream_rpc_method_handler(_reject_call)
        return self._methods.get(details.method)


def _reject_call(requests: Any, context: Any) -> Iterator[bytes]:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
    yield b""


def _answer_call(
    method: ServiceMethod, max_request_bytes: int, requests: Iterator[bytes], context: Any
) -> Iterator[bytes]:
    """Yield the reply of a method to a request, both messages in chunks."""
    code, error_text = grpc.StatusCode.INVALID_ARGUMENT, ""
    remaining_seconds = context.time_remaining()
    if remaining_seconds is None or remaining_seconds > MAX_CALL_SECONDS:
        context.abort(code, f"a deadline of at most {MAX_CALL_SECONDS:g} s is needed")
    try:
        reply = method(decode(requests, max_request_bytes))
        chunks = encode(reply) if isinstance(reply, Message) else reply
    except ProtocolVersionError as error:
        code = grpc.StatusCode.FAILED_PRECONDITION
        error_text = f"{error}; install the same version of neondist everywhere"
    except MessageError as error:
        error_text = f"invalid request: {error}"
    except ServiceUnavailableError as error:
        code, error_text = grpc.StatusCode.ABORTED, str(error)
    except UserError as error:
        code, error_text = grpc.StatusCode.FAILED_PRECONDITION, str(error)
    except grpc.RpcError:  # the caller has disconnected
        return
    except Exception:
        traceback.print_exc(file=sys.stderr)
        code, error_text = grpc.StatusCode.INTERNAL, "the call failed; see the output of the service"
    if error_text:
        context.abort(code, error_text[:_MAX_DETAIL_LENGTH])
    yield from chunks
