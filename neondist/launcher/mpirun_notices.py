"""Filter of mpirun's output: removes its notices about failed ranks, which report their errors themselves."""

from __future__ import annotations

import os
import re
from contextlib import suppress

_DASHED_LINE = b"-" * 60
# printed when mpirun closes the pipes of lost ranks, or replies to these ranks
_CONNECTION_WARNINGS = re.compile(
    rb"\[warn\] Epoll|\[[^\]\s]+:\d+\] (PMIX ERROR: PMIX_ERR_UNREACH|plm:ssh: Warning: setpgid\(.*failed in parent)"
)
# printed when MPI aborts a rank, usually because another rank was lost
_FATAL_LINE = re.compile(rb"\[[^\]\s]+:\d+\] \*\*\* ")
_KILLED_RANK = re.compile(rb"noticed that process rank (\d+)[^\n]*\s+exited on (signal \d+ \([^)]*\))")
# the second form: the ssh of a daemon exited
_LOST_NODE = re.compile(rb"Remote daemon: .* on node (\S+)|Remote host: +(\S+)")
_EXIT_NOTICES = (
    b"MPI_ABORT was invoked on rank",
    b"detected that one or more processes exited with non-zero status",
    b"has exited due to process rank",
    b"has lost communication with a remote daemon",
    b"A daemon failed to report back after being spawned",
    b"noticed that process rank",
    b"An MPI communication peer process has unexpectedly disconnected",
)


def copy_stream(source: int, target: int, notice_filter: NoticeFilter | None = None) -> None:
    """Copy one file descriptor to another until end of file, through an optional filter."""
    while chunk := os.read(source, 1 << 16):
        _write_all(target, notice_filter.feed(chunk) if notice_filter else chunk)
    if notice_filter:
        _write_all(target, notice_filter.flush())


class NoticeFilter:
    """Filter that holds back possible notices: lines from one rule of dashes to the next.

    Parameters
    ----------
    filters_warnings : bool
        Whether to remove one-line warnings as well, which mpirun writes only to stderr.

    Attributes
    ----------
    notices, fatal_lines : bytes
        Removed notices about exit codes, and lines of ranks that were aborted by MPI.
    has_output : bool
        Whether any other output was received.
    """

    def __init__(self, filters_warnings: bool = True) -> None:
        self.filters_warnings = filters_warnings
        self.notices, self.fatal_lines, self.has_output = b"", b"", False
        self.partial_line = b""
        self.held_lines: list[bytes] = []
        self.removed_last_notice = False

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """Nodes whose daemons mpirun has lost."""
        names = (name for pair in _LOST_NODE.findall(self.notices) for name in pair if name)
        return tuple(dict.fromkeys(name.decode(errors="replace") for name in names))

    @property
    def signals_by_rank(self) -> dict[int, str]:
        """Signals that killed ranks, as reported by mpirun."""
        return {int(rank): text.decode(errors="replace") for rank, text in _KILLED_RANK.findall(self.notices)}

    def feed(self, chunk: bytes) -> bytes:
        """Process bytes; return the output that can be written now."""
        output = b""
        for piece in chunk.replace(b"\0", b"").splitlines(keepends=True):  # mpirun ends a message with a NUL
            self.partial_line += piece
            if piece.endswith(b"\n"):
                output += self._filter_line()
            elif not self.held_lines and not self._may_be_notice():
                output += self._flush_partial_line()  # an unfinished line, such as a progress bar, must not wait
        self.has_output |= bool(output.strip())
        return output

    def flush(self) -> bytes:
        """Return the remaining output at the end of input."""
        if self._follows_notice():
            return b""
        output, self.held_lines, self.partial_line = b"".join(self.held_lines) + self.partial_line, [], b""
        self.has_output |= bool(output.strip())
        return output

    def _may_be_notice(self) -> bool:
        """Whether the partial line may be the beginning of a notice."""
        starts = (_DASHED_LINE, b"[") if self.filters_warnings else (_DASHED_LINE,)
        return self._follows_notice() or any(start.startswith(self.partial_line[: len(start)]) for start in starts)

    def _follows_notice(self) -> bool:
        return self.removed_last_notice and not self.partial_line.strip()

    def _flush_partial_line(self) -> bytes:
        output, self.partial_line, self.removed_last_notice = self.partial_line, b"", False
        return output

    def _filter_line(self) -> bytes:
        is_rule = self.partial_line.startswith(_DASHED_LINE)
        if not self.held_lines and not is_rule:
            is_warning = self.filters_warnings and _CONNECTION_WARNINGS.match(self.partial_line)
            is_fatal = self.filters_warnings and _FATAL_LINE.match(self.partial_line)
            if is_fatal or self._follows_notice() or is_warning:
                self.fatal_lines += self.partial_line if is_fatal else b""
                self.partial_line = b""
                return b""
            return self._flush_partial_line()
        self.held_lines.append(self.partial_line)
        self.partial_line = b""
        held_lines = b"".join(self.held_lines)
        is_notice = any(message in held_lines for message in _EXIT_NOTICES)
        if len(self.held_lines) == 1 or (is_notice and not is_rule):
            return b""
        self.held_lines, self.removed_last_notice = [], is_notice
        self.notices += held_lines if self.removed_last_notice else b""
        return b"" if self.removed_last_notice else held_lines


def _write_all(target: int, data: bytes) -> None:
    """Write all data; ignore a closed reader or a full disk, which must not end the job."""
    with suppress(OSError):
        while data:
            data = data[os.write(target, data) :]
