"""Connections to the processes that keep snapshots on nodes after their ranks end, until they are dismissed."""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from ..io.checkpoint.snapshots import KEEPERS
from ..system.heartbeat import NONCE, PROOF, proof, receive
from .monitor import format_address, listen

_PATIENCE = 5.0
"""seconds for a greeting, and for all processes to exit"""
_LONGEST = 256
"""bytes of a greeting"""


class Keepers:
    """Connections to the processes that keep a run's snapshots, one per node; a context manager.

    Parameters
    ----------
    addresses : sequence of str
        Addresses of this machine to listen on.

    Attributes
    ----------
    environment : dict of str to str
        Environment variables required by the ranks.
    word : str
        Message on exit: 'remove', or '' to keep the snapshots for some time.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.word = "remove"
        self._key = secrets.token_hex(16)
        self._nodes: dict[str, socket.socket] = {}
        self._wake, self._woken = socket.socketpair()
        self._listening = [listen(address, 64) for address in addresses]
        self.environment = {KEEPERS: " ".join([self._key, *map(format_address, self._listening)])}
        self._thread = threading.Thread(target=self._serve, name="keepers", daemon=True)

    def __enter__(self) -> Keepers:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wake.close()
        self._thread.join(2 * _PATIENCE)
        for connection in list(self._nodes.values()):
            if self.word:
                _dismiss(connection, self.word)
        for connection in list(self._nodes.values()):
            if self.word:
                with suppress(OSError):  # the process exits once it has removed them
                    receive(connection, 1)
            connection.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in (self._woken, *self._listening):
                selector.register(listener, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    break
                for listener in self._listening:
                    if listener in ready:
                        self._accept(listener)
        for listener in (self._woken, *self._listening):
            listener.close()

    def _accept(self, listening: socket.socket) -> None:
        """Accept a connection from a rank that proves the key; the process that keeps snapshots inherits it."""
        with suppress(OSError):
            connection = listening.accept()[0]
            connection.settimeout(_PATIENCE)
            nonce, node = secrets.token_bytes(NONCE), b""
            connection.sendall(nonce)
            if hmac.compare_digest(receive(connection, PROOF), proof(self._key, nonce, "rank")):
                connection.sendall(proof(self._key, nonce, "supervisor"))
                while not node.endswith(b"\n") and len(node) < _LONGEST and (byte := connection.recv(1)):
                    node += byte
            if not node.endswith(b"\n"):
                connection.close()
                return
            previous = self._nodes.pop(node.decode(errors="replace"), None)
            self._nodes[node.decode(errors="replace")] = connection
            if previous is not None:
                _dismiss(previous, "leave")
                previous.close()


def _dismiss(connection: socket.socket, word: str) -> None:
    with suppress(OSError):
        connection.sendall(f"{word}\n".encode())
