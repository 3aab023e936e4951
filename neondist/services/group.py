"""Group of all servers of a job: parallel calls, and consistent checkpoints."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import ServiceError
from .message import Message
from .progress import AppliedMinibatches
from .wire import ServiceClient

T = TypeVar("T")


class DivergedServersError(ServiceError):
    """Servers have applied different gradients; they agree once workers have repeated the missing pushes."""


class ServerConnections:
    """Connections to all servers of a job; a context manager.

    Parameters
    ----------
    addresses : sequence of str
        'HOST:PORT' of each server.
    token : str
    timeout, retry_seconds : float
        As for `ServiceClient`.

    Attributes
    ----------
    clients : list of ServiceClient
    """

    def __init__(
        self, addresses: Sequence[str], token: str, timeout: float = 300.0, retry_seconds: float = 30.0
    ) -> None:
        self.clients = [ServiceClient(address, "PServer", token, timeout, retry_seconds) for address in addresses]
        self._threads = ThreadPoolExecutor(2 * len(addresses), "server-call")

    def __len__(self) -> int:
        return len(self.clients)

    def call_on_all_servers(self, function: Callable[[int], T]) -> list[T]:
        """Call a function with the index of each server, in parallel; raise the first error once all have finished."""
        futures = [self._threads.submit(function, index) for index in range(len(self.clients))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def call_method_on_all_servers(self, method: str, fields: Mapping[str, Any] | None = None) -> list[Message]:
        """Call a method of all servers with the same fields, in parallel; return the replies."""
        return self.call_on_all_servers(lambda index: self.clients[index].call(method, fields))

    def status(self) -> list[dict[str, Any]]:
        """Return the status of each server, such as its version, number of samples, and the steps of its workers."""
        return [dict(reply.fields) for reply in self.call_method_on_all_servers("status")]

    def applied_minibatches_by_server(self) -> list[AppliedMinibatches]:
        """Return the minibatches that each server has applied, in the order of the servers."""
        return [
            AppliedMinibatches.parse(reply.mapping("credits")) for reply in self.call_method_on_all_servers("credits")
        ]

    def save_checkpoint(self, name: str, timeout: float = 60.0) -> AppliedMinibatches:
        """Write a checkpoint as `ParameterClient.save` does; DivergedServersError if the servers do not agree."""
        try:
            applied_by_server, deadline = self._hold_gradients(AppliedMinibatches()), time.monotonic() + timeout
            while any(minibatches.to_json() != applied_by_server[0].to_json() for minibatches in applied_by_server):
                if time.monotonic() > deadline:
                    raise DivergedServersError(
                        f"checkpoint {name}: servers have not applied the same gradients; try again later"
                    )
                all_applied = applied_by_server[0]
                for minibatches in applied_by_server[1:]:
                    all_applied = all_applied.union(minibatches)
                time.sleep(0.02)
                applied_by_server = self._hold_gradients(all_applied)
            self.call_method_on_all_servers("save_checkpoint", {"name": name, "save": secrets.token_hex(8)})
        finally:
            self.accept_gradients_again()
        return applied_by_server[0]

    def restore_checkpoint(self, name: str) -> tuple[AppliedMinibatches, list[str]]:
        """Restore all servers from a checkpoint; return its minibatches and the new incarnations.

        Servers without a configuration take theirs from the checkpoint, which must then have been
        written by the same number of servers.
        """
        servers = len(self.clients)

        def load_server(index: int) -> tuple[AppliedMinibatches, str]:
            fields = {"name": name, "index": index, "servers": servers}
            reply = self.clients[index].call("load_checkpoint", fields)
            return AppliedMinibatches.parse(reply.mapping("credits")), reply.text("incarnation")

        loaded_by_server = self.call_on_all_servers(load_server)
        return loaded_by_server[0][0], [incarnation for _, incarnation in loaded_by_server]

    def accept_gradients_again(self) -> None:
        """Let all servers accept gradients again."""
        self.call_method_on_all_servers("release")

    def close(self) -> None:
        """Close all connections once running calls have finished."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for client in self.clients:
            client.close()

    def __enter__(self) -> ServerConnections:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hold_gradients(self, admitted: AppliedMinibatches) -> list[AppliedMinibatches]:
        replies = self.call_method_on_all_servers("hold", {"admitted": admitted.to_json()})
        return [AppliedMinibatches.parse(reply.mapping("credits")) for reply in replies]
