"""ledger.jsonl: every message of an epoch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..files import write_text
from ..models.ledger import Ledger
from .hooks import Hook
from .run import Run


class LedgerLog(Hook):
    """Write, on rank 0, one JSON object per line for each epoch, pass, layer, direction, sender and receiver.

    Fields: epoch, pass ('training' or 'evaluation'), layer, direction ('forward' or 'backward'), rank, peer, messages,
    bytes. The bytes of an epoch's training add up to `bytes_sent` in metrics.jsonl, except in an epoch that was stopped
    and resumed, of which the ledger has what was sent since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before: Ledger = Counter()
        self.trained: Ledger = Counter()

    def before_run(self, run: Run) -> None:
        """Begin the file anew, with the lines of the epochs that the run continues from."""
        self.before = self.trained = run.model.ledger()
        if run.first_rank:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() and run.epoch else []
            write_text(self.path, "".join(f"{line}\n" for line in lines if _epoch(line) <= run.epoch))

    def after_step(self, run: Run) -> None:
        """Close the books of the training before the evaluation begins."""
        if run.seen == len(run.dataset.train):
            self.trained = run.model.ledger()

    def after_epoch(self, run: Run) -> None:
        """Append the epoch's lines; collective."""
        now = run.model.ledger()
        mine = [*_entries("training", self.trained - self.before), *_entries("evaluation", now - self.trained)]
        self.before = now
        everyone = run.grid.world.allgather(mine)
        if run.first_rank:
            with self.path.open("a", encoding="utf-8") as file:
                for rank, entries in enumerate(everyone):
                    for entry in entries:
                        file.write(json.dumps({"epoch": run.epoch, "rank": rank, **entry}) + "\n")


def _entries(kind: str, ledger: Ledger) -> list[dict[str, Any]]:
    """Return one entry for each layer, direction and receiver, whatever the sizes of the messages."""
    messages: Counter[tuple[str, str, int]] = Counter()
    sent: Counter[tuple[str, str, int]] = Counter()
    for account, count in ledger.items():
        messages[account[:3]] += count
        sent[account[:3]] += count * account.nbytes
    return [
        {"pass": kind, "layer": layer, "direction": direction, "peer": peer, "messages": count, "bytes": sent[key]}
        for key, count in messages.items()
        for layer, direction, peer in [key]
    ]


def _epoch(line: str) -> float:
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that was not written to its end
