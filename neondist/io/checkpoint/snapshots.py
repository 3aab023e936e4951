"""Snapshots: checkpoint files in the shared memory of two nodes, newer than the last checkpoint on disk.

Rank 0 writes snapshots; its buddy, the first rank of another node, receives copies, so that a run survives the loss of
either node. Each complete snapshot replaces the previous one. A process on each of these nodes removes the snapshots at
the request of the supervisor, or some time after the supervisor was killed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

from ...comm import Message, Transport, all_or_none
from ...system.heartbeat import connect_to_first_address
from ..files import DraftFile, convert_file_errors
from ..regular_file import open_regular
from .pieces import ArrayPart
from .write import write_checkpoint

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "neondist-snapshots-"  # prefix of a run's snapshot folder, followed by the run's key
SUPERVISOR_ENV = "NEONDIST_SNAPSHOTS"
"""Environment variable of ranks, 'KEY HOST:PORT ...': the supervisor that requests the removal of snapshots."""
ORPHAN_SECONDS = 600  # seconds that snapshots outlive a killed supervisor, so that a resumed run finds them
# If the input ends without a word, the supervisor was killed: the files are removed after ORPHAN_SECONDS, unless
# another process claims them.
_CLEANUP_SCRIPT = """read word; second=0
while [ -z "$word" ]; do
    [ "$(cat "$2" 2>/dev/null)" = "$3" ] || exit
    [ $second -ge "$4" ] && word=remove; second=$((second + 1)); sleep 1
done
[ "$word" = remove ] && rm -rf -- "$1"
"""


def snapshot_folder(run_key: str) -> Path:
    """Return the folder of a run's snapshots on a node."""
    return SHARED_MEMORY / f"{FOLDER_PREFIX}{run_key}"


class SnapshotStore:
    """Snapshots of a run on its nodes; all methods but `path` are collective.

    Parameters
    ----------
    run_key : str
        Key of the run.
    world : Transport
        All ranks.
    node : str, optional
        This rank's node; default: its host name.

    Attributes
    ----------
    writer_ranks : list of int
        Rank 0, and its buddy if there is another node.
    """

    def __init__(self, run_key: str, world: Transport, node: str | None = None) -> None:
        self.world, self.folder = world, snapshot_folder(run_key)
        self.node = re.sub(r"[^\w.]", "_", node or socket.gethostname())
        node_by_rank = world.allgather(self.node)
        self._first_rank_of_nodes = [node_by_rank.index(node) for node in dict.fromkeys(node_by_rank)]
        self.writer_ranks = self._first_rank_of_nodes[:2]
        self._folder_claimed = False

    def path(self, step: int) -> Path:
        """Return the file of a step on this node."""
        return self.folder / f"{self.node}-{step:010d}.h5"

    def steps_and_node_ranks(self) -> list[tuple[int, int]]:
        """Return (step, first rank of a node that has it) of all snapshots, the newest first."""
        own_steps = (
            [int(path.stem[-10:]) for path in self._snapshot_files_of_node()]
            if self.world.rank in self._first_rank_of_nodes
            else []
        )
        steps_of_ranks = enumerate(self.world.allgather(own_steps))
        return sorted(((step, rank) for rank, steps in steps_of_ranks for step in steps), reverse=True)

    def write(self, pieces: Sequence[ArrayPart], texts: Mapping[str, str], step: int) -> None:
        """Write a snapshot, which replaces the previous one; parameters as in `write_checkpoint`.

        Raises
        ------
        OutputError
            On every rank, if the shared memory of a node is full; the previous snapshot is kept.
        """
        with all_or_none(self.world):
            if self.world.rank in self.writer_ranks and not self._folder_claimed:
                self._claim_folder()
        write_checkpoint(self.path(step), pieces, texts, self.world)
        if len(self.writer_ranks) > 1:
            self._copy_to_node(self.path(step), *self.writer_ranks)
        if self.world.rank in self.writer_ranks:
            self._remove_files([path for path in self._snapshot_files_of_node() if path != self.path(step)])

    def remove_all_snapshots(self) -> None:
        """Remove all snapshots of the run on the nodes of this job."""
        if self.world.rank in self._first_rank_of_nodes:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._folder_claimed = False

    def _snapshot_files_of_node(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.node}-{'[0-9]' * 10}.h5"))

    def _remove_files(self, paths: Sequence[Path]) -> None:
        for path in paths:
            with suppress(OSError):
                path.unlink()

    def _claim_folder(self) -> None:
        """Create the folder, and start the process that removes it."""
        with convert_file_errors(self.folder, "snapshots cannot be written"):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            claim_file, token = self.folder / f"{self.node}.claim", secrets.token_hex(8)
            claim_file.write_text(token)
        self._folder_claimed = True
        key, *addresses = os.environ.get(SUPERVISOR_ENV, "").split() or [""]
        supervisor = connect_to_first_address(key, addresses)
        if supervisor is None:
            return
        with supervisor:
            supervisor.sendall(f"{self.node}\n".encode())
            subprocess.Popen(
                ["/bin/sh", "-c", _CLEANUP_SCRIPT, "sh", str(self.folder), str(claim_file), token, str(ORPHAN_SECONDS)],
                stdin=supervisor.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath)},  # not the environment of a rank
                start_new_session=True,
            )

    def _copy_to_node(self, path: Path, source_rank: int, target_rank: int) -> None:
        rank, file_bytes = self.world.rank, np.empty(0, np.uint8)
        size = int(self.world.bcast(path.stat().st_size if rank == source_rank else 0, source_rank))
        draft: DraftFile | None = None
        with ExitStack() as stack:
            with all_or_none(self.world), convert_file_errors(path, "the copy of a snapshot cannot be written"):
                if rank == source_rank:
                    file = stack.enter_context(open_regular(path))
                    file_bytes = np.frombuffer(mmap(file.fileno(), size, access=ACCESS_READ), np.uint8)
                elif rank == target_rank:
                    draft = DraftFile(path)
                    stack.callback(draft.discard)
                    os.posix_fallocate(draft.file.fileno(), 0, size)  # mapped memory cannot report OSError
                    file_bytes = np.frombuffer(mmap(draft.file.fileno(), size), np.uint8)
            all_bytes = (slice(0, size),)
            self.world.create_exchange(
                [Message(target_rank, file_bytes, all_bytes)] if rank == source_rank else [],
                [Message(source_rank, file_bytes, all_bytes)] if rank == target_rank else [],
            ).run()
            with all_or_none(self.world), convert_file_errors(path, "the copy of a snapshot cannot be written"):
                if draft is not None:
                    draft.finish()
