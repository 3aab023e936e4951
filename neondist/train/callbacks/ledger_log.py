"""ledger.jsonl: every message and every sum of an epoch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

from ...comm import all_or_none
from ...errors import DataError
from ...io.files import append, reason, write_text
from ...io.regular_file import open_regular
from ...runtime.observers.ledger import Ledger
from ..state import TrainState
from .hook import Hook

Key: TypeAlias = tuple[str, str, str, int | str]


class LedgerLog(Hook):
    """Write, on rank 0, one JSON object per line for each epoch, pass, kind, layer, direction, sender and receiver.

    Fields: epoch, rank, pass ('training' or 'evaluation'), kind, layer, direction ('forward' or 'backward'), peer,
    messages, bytes. A 'halo' goes to the rank `peer`, as does a 'redistribution', a part of a redistributed vector.
    A 'sum' is made with a group of ranks, `peer` is 'world' (all), 'tiles' (of one replica) or 'replicas' (the same
    tile in all replicas), and its bytes are those of the array that the rank gives, once: how a library passes it on is
    its own affair (a ring of P ranks sends 2 (P - 1) / P of them). Sums of the whole model have the layers 'gradients'
    and 'loss'.

    The bytes of an epoch's training add up to `bytes_sent` (halos) and `bytes_summed` (all others) in metrics.jsonl,
    except in an epoch that was stopped and resumed, of which the ledger has what was sent since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before: Ledger = Counter()
        self.trained: Ledger = Counter()

    def before_run(self, run: TrainState) -> None:
        """Rewrite the file with the lines of the epochs that the run continues from."""
        self.before = self.trained = run.model.whole.ledger()
        with all_or_none(run.grid.world):
            if run.first_rank:
                lines = _lines(self.path) if run.epoch else []
                write_text(self.path, "".join(f"{line}\n" for line in lines if _epoch(line) <= run.epoch))

    def after_step(self, run: TrainState) -> None:
        """Close the books of the training before the evaluation begins."""
        if run.samples_seen == len(run.dataset.train):
            self.trained = run.model.whole.ledger()

    def after_epoch(self, run: TrainState) -> None:
        """Append the epoch's lines; collective."""
        now = run.model.whole.ledger()
        mine = [*_entries("training", self.trained - self.before), *_entries("evaluation", now - self.trained)]
        self.before = now
        everyone = run.grid.world.allgather(mine)
        with all_or_none(run.grid.world):
            if run.first_rank:
                told = ({"epoch": run.epoch, "rank": at, **one} for at, each in enumerate(everyone) for one in each)
                append(self.path, "".join(json.dumps(entry) + "\n" for entry in told))


def _entries(during: str, ledger: Ledger) -> list[dict[str, Any]]:
    """Return one entry for each layer, direction and receiver, whatever the sizes of the messages."""
    messages: Counter[Key] = Counter()
    sent: Counter[Key] = Counter()
    for account, count in ledger.items():
        messages[account[:4]] += count
        sent[account[:4]] += count * account.nbytes
    return [
        {"pass": during, **dict(zip(("kind", "layer", "direction", "peer"), key, strict=True))}
        | {"messages": count, "bytes": sent[key]}
        for key, count in messages.items()
    ]


def _lines(path: Path) -> list[str]:
    """Return the lines of the earlier run; DataError if the file is there and cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); check its permissions, or remove it") from error


def _epoch(line: str) -> float:
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that was not written to its end
