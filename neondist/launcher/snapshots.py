"""Connections to the processes that keep snapshots on nodes after the ranks end, until this process dismisses them."""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from ..io.checkpoint.snapshots import SUPERVISOR_ENV
from ..system.heartbeat import NONCE_BYTES, PROOF_BYTES, compute_proof, receive_bytes
from .monitor import format_address, listen

_GREETING_TIMEOUT = 5.0
"""seconds for a greeting, and for all processes to exit"""
_MAX_GREETING_BYTES = 256


class SnapshotKeepers:
    """Connections to the processes that keep a run's snapshots, one per node; a context manager.

    Parameters
    ----------
    addresses : sequence of str
        Addresses of this machine to listen on.

    Attributes
    ----------
    environment : dict of str to str
        Environment variables required by the ranks.
    exit_message : str
        Message on exit: 'remove', or '' to keep the snapshots for some time.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.exit_message = "remove"
        self._key = secrets.token_hex(16)
        self._connection_by_node: dict[str, socket.socket] = {}
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._listeners = [listen(address, 64) for address in addresses]
        self.environment = {SUPERVISOR_ENV: " ".join([self._key, *map(format_address, self._listeners)])}
        self._thread = threading.Thread(target=self._serve, name="keepers", daemon=True)

    def __enter__(self) -> SnapshotKeepers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._wake_sender.close()
        self._thread.join(2 * _GREETING_TIMEOUT)
        for connection in list(self._connection_by_node.values()):
            if self.exit_message:
                _send_exit_message(connection, self.exit_message)
        for connection in list(self._connection_by_node.values()):
            if self.exit_message:
                with suppress(OSError):  # the process exits once it has removed the snapshots
                    receive_bytes(connection, 1)
            connection.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in (self._wake_receiver, *self._listeners):
                selector.register(listener, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wake_receiver in ready:
                    break
                for listener in self._listeners:
                    if listener in ready:
                        self._accept(listener)
        for listener in (self._wake_receiver, *self._listeners):
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection if the rank has the key; the process that keeps snapshots inherits the connection."""
        with suppress(OSError):
            connection = listener.accept()[0]
            connection.settimeout(_GREETING_TIMEOUT)
            nonce, node = secrets.token_bytes(NONCE_BYTES), b""
            connection.sendall(nonce)
            if hmac.compare_digest(receive_bytes(connection, PROOF_BYTES), compute_proof(self._key, nonce, "rank")):
                connection.sendall(compute_proof(self._key, nonce, "supervisor"))
                while not node.endswith(b"\n") and len(node) < _MAX_GREETING_BYTES and (byte := connection.recv(1)):
                    node += byte
            if not node.endswith(b"\n"):
                connection.close()
                return
            old_connection = self._connection_by_node.pop(node.decode(errors="replace"), None)
            self._connection_by_node[node.decode(errors="replace")] = connection
            if old_connection is not None:
                _send_exit_message(old_connection, "leave")
                old_connection.close()


def _send_exit_message(connection: socket.socket, message: str) -> None:
    with suppress(OSError):
        connection.sendall(f"{message}\n".encode())
