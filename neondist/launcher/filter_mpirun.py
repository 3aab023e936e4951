"""Filter of mpirun's output: removes its notices about failed ranks, which report their errors themselves."""

from __future__ import annotations

import os
import re
from contextlib import suppress

_RULE = b"-" * 60
# mpirun closes pipes of lost ranks, or replies to them
_EVENTS = re.compile(
    rb"\[warn\] Epoll|\[[^\]\s]+:\d+\] (PMIX ERROR: PMIX_ERR_UNREACH|plm:ssh: Warning: setpgid\(.*failed in parent)"
)
# MPI aborts a rank, usually because another was lost
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
    """Copy one file descriptor to another until end of file, through an optional filter."""
    while chunk := os.read(source, 1 << 16):
        _write(target, messages.feed(chunk) if messages else chunk)
    if messages:
        _write(target, messages.flush())


class Filter:
    """Holds back possible notices: lines from one rule of dashes to the next.

    Attributes
    ----------
    notices : removed notices about exit codes
    from_mpi : lines of ranks that were aborted by MPI
    has_output : whether any other output was received
    """

    def __init__(self) -> None:
        self.notices, self.from_mpi, self.has_output = b"", b"", False
        self.line = b""
        self.block: list[bytes] = []
        self.dropped = False

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """Nodes whose daemons mpirun has lost."""
        names = [name.decode(errors="replace") for name in _LOST_NODE.findall(self.notices)]
        return tuple(dict.fromkeys(names))

    @property
    def signals(self) -> dict[int, str]:
        """Signals that killed ranks, as reported by mpirun."""
        return {int(rank): text.decode(errors="replace") for rank, text in _SIGNAL.findall(self.notices)}

    def feed(self, chunk: bytes) -> bytes:
        """Process bytes; return the output that can be written now."""
        out = b""
        for piece in chunk.replace(b"\0", b"").splitlines(keepends=True):  # mpirun ends a message with a NUL
            self.line += piece
            if piece.endswith(b"\n"):
                out += self._process_line()
            elif not self.block and not self._may_be_notice():
                out += self._release_line()  # an unfinished line, such as a progress bar, must not wait
        self.has_output |= bool(out.strip())
        return out

    def flush(self) -> bytes:
        """Return the remaining output at the end of input."""
        if self._follows_notice():
            return b""
        out, self.block, self.line = b"".join(self.block) + self.line, [], b""
        self.has_output |= bool(out.strip())
        return out

    def _may_be_notice(self) -> bool:
        """Whether the partial line may be the beginning of a notice."""
        return self._follows_notice() or any(start.startswith(self.line[: len(start)]) for start in (_RULE, b"["))

    def _follows_notice(self) -> bool:
        return self.dropped and not self.line.strip()

    def _release_line(self) -> bytes:
        out, self.line, self.dropped = self.line, b"", False
        return out

    def _process_line(self) -> bytes:
        rule = self.line.startswith(_RULE)
        if not self.block and not rule:
            fatal = _OF_MPI.match(self.line)
            if fatal or self._follows_notice() or _EVENTS.match(self.line):
                self.from_mpi += self.line if fatal else b""
                self.line = b""
                return b""
            return self._release_line()
        self.block.append(self.line)
        self.line = b""
        if not rule or len(self.block) == 1:
            return b""
        block, self.block = b"".join(self.block), []
        self.dropped = any(message in block for message in _ENDINGS)
        self.notices += block if self.dropped else b""
        return b"" if self.dropped else block


def _write(target: int, data: bytes) -> None:
    """Write all data; ignore a closed reader or a full disk, which must not end the job."""
    with suppress(OSError):
        while data:
            data = data[os.write(target, data) :]
