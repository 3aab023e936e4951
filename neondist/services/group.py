"""All servers of a job: calls to each of them at once, and checkpoints of all together."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import ServiceError
from .progress import Credits
from .wire import ServiceClient

T = TypeVar("T")


class UnequalServersError(ServiceError):
    """Servers have not applied the same gradients; they have when workers have pushed again what some of them lack."""


class ServerGroup:
    """Connections to all servers of a job; a context manager.

    Parameters
    ----------
    addresses : sequence of str
        'HOST:PORT' of each server.
    token : str
    timeout, patience : float
        As of `ServiceClient`.

    Attributes
    ----------
    clients : list of ServiceClient
    """

    def __init__(self, addresses: Sequence[str], token: str, timeout: float = 300.0, patience: float = 30.0) -> None:
        self.clients = [ServiceClient(one, "PServer", token, timeout, patience) for one in addresses]
        self._threads = ThreadPoolExecutor(2 * len(addresses), "server-call")

    def __len__(self) -> int:
        return len(self.clients)

    def each(self, function: Callable[[int], T]) -> list[T]:
        """Call a function for each server at once; raise the first error when all have ended."""
        futures = [self._threads.submit(function, at) for at in range(len(self.clients))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def status(self) -> list[dict[str, Any]]:
        """Return the counts of each server."""
        return [dict(reply.fields) for reply in self.each(lambda at: self.clients[at].call("status"))]

    def credits(self) -> list[Credits]:
        """Return the minibatches that each server has applied."""
        replies = self.each(lambda at: self.clients[at].call("credits"))
        return [Credits.parse(reply.mapping("credits")) for reply in replies]

    def save(self, name: str, patience: float = 60.0) -> Credits:
        """Write a checkpoint of all servers, and return the minibatches that are in it.

        Gradients wait meanwhile. One that some servers have applied is taken by the others first.

        Raises
        ------
        UnequalServersError
            Servers do not agree within `patience` seconds, as where a worker was lost between two of them; try again
            when its minibatch has been computed once more.
        """
        try:
            held, end = self._hold(Credits()), time.monotonic() + patience
            while any(one.described() != held[0].described() for one in held):
                if time.monotonic() > end:
                    raise UnequalServersError(
                        f"checkpoint {name}: servers have not applied the same gradients; try again later"
                    )
                union = held[0]
                for one in held[1:]:
                    union = union.union(one)
                time.sleep(0.02)
                held = self._hold(union)
            fields = {"name": name, "save": secrets.token_hex(8)}
            self.each(lambda at: self.clients[at].call("save_checkpoint", fields))
        finally:
            self.release()
        return held[0]

    def restore(self, name: str) -> tuple[Credits, list[str]]:
        """Let all servers hold what a checkpoint of as many servers has.

        Returns
        -------
        credits : Credits
            The minibatches that are in it.
        incarnations : list of str
            Of each server: workers' gradients of values from before are refused.
        """
        servers = len(self.clients)

        def load(at: int) -> tuple[Credits, str]:
            fields = {"name": name, "index": at, "servers": servers}
            reply = self.clients[at].call("load_checkpoint", fields)
            return Credits.parse(reply.mapping("credits")), reply.text("incarnation")

        loaded = self.each(load)
        return loaded[0][0], [incarnation for _, incarnation in loaded]

    def release(self) -> None:
        """Let all servers take gradients again."""
        self.each(lambda at: self.clients[at].call("release"))

    def close(self) -> None:
        """Close all connections, when calls under way have ended."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for client in self.clients:
            client.close()

    def __enter__(self) -> ServerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hold(self, admitted: Credits) -> list[Credits]:
        fields = {"admitted": admitted.described()}
        replies = self.each(lambda at: self.clients[at].call("hold", fields))
        return [Credits.parse(reply.mapping("credits")) for reply in replies]
