"""Processes that keep snapshots on nodes, beyond the life of their ranks: the supervisor says when these can go."""

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
"""seconds for a greeting, and for the end of all"""
_LONGEST = 256
"""bytes of a greeting"""


class Keepers:
    """Connections of the processes that keep a run's snapshots, one a node; a context manager.

    Parameters
    ----------
    addresses : sequence of str
        Addresses of this machine to listen on.

    Attributes
    ----------
    environment : dict of str to str
        Variables that the ranks need.
    word : str
        What they are told at the end: 'remove'; nothing: to keep the snapshots for some time.
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
        for each in list(self._nodes.values()):
            if self.word:
                _dismiss(each, self.word)
        for each in list(self._nodes.values()):
            if self.word:
                with suppress(OSError):  # it ends once it has removed them
                    receive(each, 1)
            each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in (self._woken, *self._listening):
                selector.register(one, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    break
                for one in self._listening:
                    if one in ready:
                        self._accept(one)
        for one in (self._woken, *self._listening):
            one.close()

    def _accept(self, listening: socket.socket) -> None:
        """Take a connection of a rank that proves the key, and of the process that has it from then on."""
        with suppress(OSError):
            made = listening.accept()[0]
            made.settimeout(_PATIENCE)
            nonce, node = secrets.token_bytes(NONCE), b""
            made.sendall(nonce)
            if hmac.compare_digest(receive(made, PROOF), proof(self._key, nonce, "rank")):
                made.sendall(proof(self._key, nonce, "supervisor"))
                while not node.endswith(b"\n") and len(node) < _LONGEST and (more := made.recv(1)):
                    node += more
            if not node.endswith(b"\n"):
                made.close()
                return
            before = self._nodes.pop(node.decode(errors="replace"), None)
            self._nodes[node.decode(errors="replace")] = made
            if before is not None:
                _dismiss(before, "leave")
                before.close()


def _dismiss(connection: socket.socket, word: str) -> None:
    with suppress(OSError):
        connection.sendall(f"{word}\n".encode())
