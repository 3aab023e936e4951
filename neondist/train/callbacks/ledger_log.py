"""ledger.jsonl: messages and reductions of each epoch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

from ...comm import all_or_none
from ...errors import DataError
from ...io.files import append_text, short_reason, write_text
from ...io.regular_file import open_regular
from ...runtime.observers.ledger import Ledger
from ..state import TrainState
from .hook import Hook

LedgerEntryKey: TypeAlias = tuple[str, str, str, int | str]


class LedgerLog(Hook):
    """Write, on rank 0, one JSON object per line for each epoch, pass, kind, layer, direction, sender and receiver.

    Fields: epoch, rank, pass ('training' or 'evaluation'), kind, layer, direction ('forward' or 'backward'), peer,
    messages, bytes. The kinds 'halo', 'redistribution' (part of a redistributed array) and, in PyTorch modules, 'ring'
    (keys and values of ring attention) are messages to the rank `peer`. A 'sum' is reduced over a group of ranks:
    `peer` is 'world' (all), 'tiles' (of one replica) or 'replicas' (the same tile in all replicas). Its bytes are the
    size of the rank's array, even if the MPI library sends more (a ring of P ranks, 2 (P - 1) / P times as many). For
    sums over the whole model, `layer` is 'gradients' or 'loss'.

    The training bytes of an epoch add up to `bytes_sent` (halos) and `bytes_summed` (all others) in metrics.jsonl. For
    a resumed epoch, the ledger has only the bytes since the run was resumed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch_start_ledger: Ledger = Counter()
        self.training_end_ledger: Ledger = Counter()

    def before_run(self, run: TrainState) -> None:
        """Rewrite the file with the lines of the epochs that were complete before the run continues."""
        self.epoch_start_ledger = self.training_end_ledger = run.model.whole_model.ledger()
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                lines = _read_lines(self.path) if run.epoch else []
                write_text(self.path, "".join(f"{line}\n" for line in lines if _epoch_or_infinity(line) <= run.epoch))

    def after_step(self, run: TrainState) -> None:
        """Record the ledger after the epoch's last step, before the evaluation."""
        if run.samples_seen == len(run.dataset.train):
            self.training_end_ledger = run.model.whole_model.ledger()

    def after_epoch(self, run: TrainState) -> None:
        """Append the epoch's lines. Collective."""
        ledger = run.model.whole_model.ledger()
        training, evaluation = (self.training_end_ledger - self.epoch_start_ledger, ledger - self.training_end_ledger)
        own_entries = [*_ledger_entries("training", training), *_ledger_entries("evaluation", evaluation)]
        self.epoch_start_ledger = ledger
        entries_by_rank = run.grid.world.allgather(own_entries)
        with all_or_none(run.grid.world):
            if run.is_first_rank:
                by_rank = enumerate(entries_by_rank)
                records = ({"epoch": run.epoch, "rank": at, **entry} for at, entries in by_rank for entry in entries)
                append_text(self.path, "".join(json.dumps(record) + "\n" for record in records))


def _ledger_entries(pass_name: str, ledger: Ledger) -> list[dict[str, Any]]:
    """Return one entry per layer, direction and receiver, summed over message sizes."""
    message_counts: Counter[LedgerEntryKey] = Counter()
    sent_bytes: Counter[LedgerEntryKey] = Counter()
    for account, count in ledger.items():
        message_counts[account[:4]] += count
        sent_bytes[account[:4]] += count * account.nbytes
    return [
        {"pass": pass_name, **dict(zip(("kind", "layer", "direction", "peer"), key, strict=True))}
        | {"messages": count, "bytes": sent_bytes[key]}
        for key, count in message_counts.items()
    ]


def _read_lines(path: Path) -> list[str]:
    try:
        with open_regular(path) as file:
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        problem = f"cannot be read ({short_reason(error)}); check its permissions, or remove it"
        raise DataError(f"{path}: {problem}") from error


def _epoch_or_infinity(line: str) -> float:
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # an incomplete line
