"""mpirun's output, less its own messages that a rank ended with an error: the rank has said why."""

from __future__ import annotations

import os
import re
from contextlib import suppress

_RULE = b"-" * 60
# mpirun closing pipes of, or answering, ranks that are gone
_EVENTS = re.compile(
    rb"\[warn\] Epoll|\[[^\]\s]+:\d+\] (PMIX ERROR: PMIX_ERR_UNREACH|plm:ssh: Warning: setpgid\(.*failed in parent)"
)
# MPI's own end of a rank: because another one is gone, as a rule
_OF_MPI = re.compile(rb"\[[^\]\s]+:\d+\] \*\*\* ")
_SIGNAL = re.compile(rb"noticed that process rank (\d+)[^\n]*\s+exited on (signal \d+ \([^)]*\))")
_LOST_NODE = re.compile(rb"Remote daemon: .* on node (\S+)")
_ENDINGS = (
    b"MPI_ABORT was invoked on rank",
    b"detected that one or more processes exited with non-zero status",
    b"has exited due to process rank",
    b"has lost communication with a remote daemon",
    b"noticed that process rank",
    b"An MPI communication peer process has unexpectedly disconnected",
)


def copy(source: int, target: int, messages: Filter | None = None) -> None:
    """Copy one file descriptor to another until it ends, without what the filter leaves out."""
    while chunk := os.read(source, 1 << 16):
        _write(target, messages.feed(chunk) if messages else chunk)
    if messages:
        _write(target, messages.flush())


class Filter:
    """Holds back what may become a message: lines from one rule of dashes to the next.

    Attributes
    ----------
    left_out : messages about exit codes
    of_mpi : lines of ranks that MPI has ended
    spoken : whether anything else has come
    """

    def __init__(self) -> None:
        self.left_out, self.of_mpi, self.spoken = b"", b"", False
        self.line = b""
        self.block: list[bytes] = []
        self.dropped = False

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """The nodes whose daemons mpirun has lost."""
        found = [name.decode(errors="replace") for name in _LOST_NODE.findall(self.left_out)]
        return tuple(dict.fromkeys(found))

    @property
    def signals(self) -> dict[int, str]:
        """The signals that have ended ranks, as far as mpirun says so."""
        return {int(rank): text.decode(errors="replace") for rank, text in _SIGNAL.findall(self.left_out)}

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be passed on, now that these bytes have come."""
        out = b""
        for piece in chunk.replace(b"\0", b"").splitlines(keepends=True):  # mpirun ends a message with a NUL
            self.line += piece
            if piece.endswith(b"\n"):
                out += self._whole_line()
            elif not self.block and not self._may_go():
                out += self._pass()  # an unfinished line, such as a progress bar, must not wait
        self.spoken |= bool(out.strip())
        return out

    def flush(self) -> bytes:
        """Return the rest: no more will come."""
        if self._after_message():
            return b""
        out, self.block, self.line = b"".join(self.block) + self.line, [], b""
        self.spoken |= bool(out.strip())
        return out

    def _may_go(self) -> bool:
        """Return whether the line so far may be the beginning of what is left out."""
        return self._after_message() or any(start.startswith(self.line[: len(start)]) for start in (_RULE, b"["))

    def _after_message(self) -> bool:
        return self.dropped and not self.line.strip()

    def _pass(self) -> bytes:
        out, self.line, self.dropped = self.line, b"", False
        return out

    def _whole_line(self) -> bytes:
        rule = self.line.startswith(_RULE)
        if not self.block and not rule:
            fatal = _OF_MPI.match(self.line)
            if fatal or self._after_message() or _EVENTS.match(self.line):
                self.of_mpi += self.line if fatal else b""
                self.line = b""
                return b""
            return self._pass()
        self.block.append(self.line)
        self.line = b""
        if not rule or len(self.block) == 1:
            return b""
        block, self.block = b"".join(self.block), []
        self.dropped = any(message in block for message in _ENDINGS)
        self.left_out += block if self.dropped else b""
        return b"" if self.dropped else block


def _write(target: int, data: bytes) -> None:
    """Write all; nothing if the reader is gone or the disk is full: the job must not wait, or end, for that."""
    with suppress(OSError):
        while data:
            data = data[os.write(target, data) :]
