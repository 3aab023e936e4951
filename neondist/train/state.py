"""State of a training run, as seen by hooks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..comm import ProcessGrid
from ..data import Dataset
from ..data.base import SPLITS
from ..errors import DataError
from ..io.checkpoint.texts import parse_json, require_json_integer, suggest_another_checkpoint
from ..metrics import Misclassification
from ..models import Trainable
from ..parallel import ControlFlag
from ..terminal.console import counted
from .checkpoint_field_metadata import field_metadata_texts, restore_field_normalisation
from .class_names import class_name_texts

if TYPE_CHECKING:
    from ..services.master_client import MasterClient


SERVER_UPDATES_TEXT = "server updates"
"""Name of the checkpoint text that contains the number of updates by parameter servers."""
RESERVED_METRIC_NAMES = {
    "epoch", "step", "split", "samples", "loss", "seconds", "samples_per_second", "bytes_sent", "bytes_summed",
    "loss_scale", "skipped_steps", "job", *(f"{split}_{value}" for split in SPLITS for value in ("loss", "error")),
}  # fmt: skip
"""Names of the other values of an epoch or an evaluation."""


class EpochRecord(dict[str, Any]):
    """One epoch's numbers by name.

    The names are epoch, step and train_loss; validation_loss and validation_error if there is a validation split;
    test_loss and test_error if there is a test split; NAME or validation_NAME for other metrics of the test or the
    validation split, which may be lists; seconds, samples_per_second, bytes_sent and bytes_summed; and, with precision
    float16, the current loss_scale, and skipped_steps, the number of steps whose gradients overflowed.
    """

    @property
    def selection_split(self) -> str:
        """Split for model selection: 'validation', or 'test' if there is no validation split, or else 'train'."""
        return next((name for name in ("validation", "test") if f"{name}_loss" in self), "train")

    def selection_value(self, loss_or_error: str) -> Any:
        """Return 'loss' or 'error' of the selection split; None if there is none."""
        return self.get(f"{self.selection_split}_{loss_or_error}")


def nonfinite_to_none(value: Any) -> Any:
    """Replace non-finite values with None, for JSON, in a number, a list or a mapping."""
    if isinstance(value, Mapping):
        return {name: nonfinite_to_none(item) for name, item in value.items()}
    if isinstance(value, list):
        return [nonfinite_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_evaluation_results(sample_count: int, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of an evaluation as `neondist evaluate` prints them: 'samples', 'loss', 'error', and others.

    Non-finite values are None.
    """
    rest = nonfinite_to_none(results)
    return {"samples": sample_count, "loss": rest.pop("loss"), "error": rest.pop(Misclassification.name, None), **rest}


@dataclass
class EpochTotals:
    """Sums over the current epoch so far.

    Attributes
    ----------
    loss : sum of the losses of the samples
    seconds : time spent on the epoch
    bytes_sent_before_resume, bytes_summed_before_resume : bytes that all ranks sent, and reduced, before a resume
    bytes_sent, bytes_summed : bytes that this rank has sent, and reduced, since then
    skipped_samples : samples of steps with a non-finite loss, which are not included in `loss`
    samples_of_other_workers : samples of other workers, which are not included in `loss` either, minus this worker's
        samples of earlier epochs, which are included
    """

    loss: float = 0.0
    seconds: float = 0.0
    bytes_sent_before_resume: int = 0
    bytes_sent: int = 0
    skipped_samples: int = 0
    bytes_summed_before_resume: int = 0
    bytes_summed: int = 0
    samples_of_other_workers: int = 0

    def sent_and_summed_bytes_of_all_ranks(self, grid: ProcessGrid) -> tuple[int, int]:
        """Return the bytes that all ranks have sent and reduced. Collective."""
        sent_by_rank, summed_by_rank = zip(*grid.world.allgather((self.bytes_sent, self.bytes_summed)), strict=True)
        return self.bytes_sent_before_resume + sum(sent_by_rank), self.bytes_summed_before_resume + sum(summed_by_rank)


@dataclass(frozen=True)
class Stop:
    """Reason and exit code of a run that ends before its last epoch; with exit code 0, the run counts as complete."""

    reason: str
    exit_code: int = 75


@dataclass
class TrainState:
    """The state of a training run; the same on every rank.

    Attributes
    ----------
    model, dataset
        Built model and opened data set.
    epochs : int
        Number of epochs after which the run ends.
    batch_size : int
        Samples of a whole batch, over all replicas.
    epoch : int
        Number of complete epochs.
    samples_seen : int
        Samples of the current epoch so far, including those before a resume.
    loss : float
        Mean loss of the last batch.
    history : list of EpochRecord
        One record per complete epoch, including those before a resume.
    stop : Stop or None
        Set by hooks, on every rank in the same hook call, to end the run: a checkpoint is written, and `--resume`
        continues from this step.
    totals : EpochTotals
        Sums over the current epoch.
    start_messages : list of str
        Messages to print at the start.
    server_updates : int or None
        If the run resumes from a checkpoint of a run with parameter servers: the number of their updates, by all
        workers, which the optimiser counts instead of this worker's steps.
    master_client : MasterClient or None
        Client of the master that assigns tasks to asynchronous workers. None: train whole epochs.
    """

    model: Trainable
    dataset: Dataset
    epochs: int
    batch_size: int
    epoch: int = 0
    samples_seen: int = 0
    loss: float = float("nan")
    history: list[EpochRecord] = field(default_factory=list)
    stop: Stop | None = None
    totals: EpochTotals = field(default_factory=EpochTotals)
    start_messages: list[str] = field(default_factory=list)
    server_updates: int | None = None
    master_client: MasterClient | None = None

    @property
    def grid(self) -> ProcessGrid:
        """The grid of the ranks of the run."""
        return self.model.grid

    @property
    def step(self) -> int:
        """Number of updates of the parameters so far."""
        return self.model.step

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is rank 0, which prints and writes files."""
        return self.grid.rank == 0

    @property
    def epoch_size(self) -> int:
        """Number of samples of an epoch."""
        return len(self.dataset.train)

    def request_stop(self, reason: str) -> None:
        """Request that the run end, as complete, on all ranks after the next step; `reason` is ignored."""
        self.model.sync.flags.own_flags[ControlFlag.STOP] = 1

    def has_stop_request(self) -> bool:
        """Return whether this rank has a stop request, which all ranks receive in the next step."""
        requests = [ControlFlag.SIGTERM, ControlFlag.SIGUSR1, ControlFlag.TIME_LIMIT, ControlFlag.STOP]
        return bool(self.model.sync.flags.own_flags[requests].any())

    def receive_stop_requests(self) -> None:
        """Stop if a rank requested a stop in the completed step."""
        if self.stop is None and self.model.sync.flags.count_ranks(ControlFlag.STOP):
            self.stop = Stop("requested by a rank", exit_code=0)

    def require_epoch_size(self, expected_samples: int) -> None:
        """Raise DataError unless the epoch to continue has this number of samples."""
        if self.epoch_size != expected_samples:
            raise DataError(
                f"was written in the middle of an epoch of {counted(expected_samples, 'sample')}, but the data set has"
                f" {self.epoch_size}; resume with the same data"
            )

    def checkpoint_texts(self) -> dict[str, str]:
        """Return the texts of a checkpoint: normalisation, fields and names of classes. Collective."""
        train_split = self.dataset.train
        factor, offset = train_split.factor_and_subtrahend
        images = {"shape": self.dataset.sample_shape, "factor": factor, "offset": offset, "fill": train_split.fill}
        texts = {"images": json.dumps(images), **class_name_texts(self.dataset)}
        if (remote := self.model.whole_model.remote_update) is not None:
            texts[SERVER_UPDATES_TEXT] = str(remote.version)
        return texts | field_metadata_texts(getattr(train_split, "fields", None))

    def restore_checkpoint_texts(self, texts: Mapping[str, str]) -> None:
        """Restore the number of server updates; raise ValueError if the texts do not match the data set."""
        if SERVER_UPDATES_TEXT in texts:
            with suggest_another_checkpoint():
                updates = require_json_integer("'server updates'", parse_json(texts[SERVER_UPDATES_TEXT], int))
            self.server_updates = updates
        fields = getattr(self.dataset.train, "fields", None)  # missing in user-defined splits
        if fields is not None:
            restore_field_normalisation(texts, fields)
