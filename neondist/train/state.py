"""State of a training run, as seen by hooks."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..comm import ProcessGrid
from ..data import Dataset
from ..errors import DataError
from ..metrics import Misclassification
from ..models import Trainable
from ..parallel import Flag
from ..terminal.console import counted
from .checkpoint_fields import field_texts, restore_fields

if TYPE_CHECKING:
    from ..services.master_client import MasterClient


class Record(dict[str, Any]):
    """One epoch's numbers by name.

    epoch, step, train_loss; validation_loss and validation_error where there is a validation split, test_loss and
    test_error where there is a test split; further metrics of the test split by their names, of the validation split as
    validation_NAME, numbers or lists of them; seconds, samples_per_second, bytes_sent, bytes_summed; with precision
    float16 loss_scale, as it is then, and skipped_steps, in which gradients have overflowed.
    """

    @classmethod
    def upgrade(cls, record: Mapping[str, Any]) -> Record:
        """Return a record written by any version; in 0.1 numbers of the test split were named valid_*."""
        return cls({_current_name(name): value for name, value in record.items()})

    def __missing__(self, name: str) -> Any:
        """Return a number by its name of version 0.1, with a warning."""
        if (new := _current_name(name)) not in self:
            raise KeyError(name)
        warnings.warn(f"'{name}' of a record is now called '{new}'", DeprecationWarning, stacklevel=2)
        return self[new]

    @property
    def selection_split(self) -> str:
        """Split for model selection: 'validation', or 'test' if there is no validation split."""
        return "validation" if "validation_loss" in self else "test"

    def selection_value(self, number: str) -> Any:
        """Return 'loss' or 'error' of the selection split; None if there is none."""
        return self.get(f"{self.selection_split}_{number}")


def replace_nonfinite(value: Any) -> Any:
    """Return a number of a record, or a list of them, with None for non-finite values, for JSON."""
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_results(samples: int, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of an evaluation as `neondist evaluate` prints them: 'samples', 'loss', 'error', and others.

    Non-finite values are None.
    """
    rest = {name: replace_nonfinite(value) for name, value in results.items()}
    return {"samples": samples, "loss": rest.pop("loss"), "error": rest.pop(Misclassification.name, None), **rest}


def _current_name(name: str) -> str:
    return f"test_{name.removeprefix('valid_')}" if name in ("valid_loss", "valid_error") else name


@dataclass
class EpochTotals:
    """Sums over an epoch so far.

    Attributes
    ----------
    loss : of all samples
    seconds : spent on the epoch
    sent_before, summed_before : bytes that all ranks sent, and reduced, before a resume
    sent, summed : bytes that this rank has sent, and reduced, since
    skipped : samples that are not in `loss`: of other workers, and of steps in which something was not finite
    """

    loss: float = 0.0
    seconds: float = 0.0
    sent_before: int = 0
    sent: int = 0
    skipped: int = 0
    summed_before: int = 0
    summed: int = 0

    def bytes_of_all_ranks(self, grid: ProcessGrid) -> tuple[int, int]:
        """Return the bytes that all ranks have sent and reduced; collective."""
        sent, summed = zip(*grid.world.allgather((self.sent, self.summed)), strict=True)
        return self.sent_before + sum(sent), self.summed_before + sum(summed)


@dataclass(frozen=True)
class Stop:
    """Reason and exit code of a run that ends before its last epoch; with code 0 it is complete."""

    reason: str
    exit_code: int = 75


@dataclass
class TrainState:
    """The state of a training run; the same on every rank.

    Attributes
    ----------
    model, dataset : the model and the data set, built and opened
    epochs : epochs after which the run ends
    batch_size : samples of a whole batch, over all replicas
    epoch : epochs that are complete
    samples_seen : samples of the present epoch so far, those before a resume included
    loss : mean loss of the last batch
    history : one record per complete epoch, those before a resume included
    stop : set on every rank in the same hook call to end the run there: a checkpoint is written, and `--resume`
        continues from this step
    totals : sums over the present epoch
    start_messages : messages to print at the start
    master_client : of a worker of an asynchronous job, which trains tasks; None: whole epochs
    """

    model: Trainable
    dataset: Dataset
    epochs: int
    batch_size: int
    epoch: int = 0
    samples_seen: int = 0
    loss: float = float("nan")
    history: list[Record] = field(default_factory=list)
    stop: Stop | None = None
    totals: EpochTotals = field(default_factory=EpochTotals)
    start_messages: list[str] = field(default_factory=list)
    master_client: MasterClient | None = None

    @property
    def grid(self) -> ProcessGrid:
        """The ranks of the run."""
        return self.model.grid

    @property
    def step(self) -> int:
        """Updates of the parameters so far."""
        return self.model.step

    @property
    def first_rank(self) -> bool:
        """Whether this is rank 0, the one that prints and writes files."""
        return self.grid.rank == 0

    @property
    def epoch_size(self) -> int:
        """Samples of an epoch."""
        return len(self.dataset.train)

    def request_stop(self, reason: str) -> None:
        """Request, on one rank or more, that the run ends on all ranks after the next step, as complete."""
        self.model.sync.flags.own_flags[Flag.STOP] = 1

    def has_stop_request(self) -> bool:
        """Whether this rank has a stop request, which all ranks receive in the next step."""
        return bool(self.model.sync.flags.own_flags[[Flag.SIGTERM, Flag.SIGUSR1, Flag.TIME_LIMIT, Flag.STOP]].any())

    def receive_stop_requests(self) -> None:
        """Stop if a rank requested it in the completed step."""
        if self.stop is None and self.model.sync.flags.count_ranks(Flag.STOP):
            self.stop = Stop("requested by a rank", exit_code=0)

    def check_epoch_samples(self, samples: int) -> None:
        """Raise DataError unless the epoch to continue has this number of samples."""
        if self.epoch_size != samples:
            raise DataError(
                f"was written in the middle of an epoch of {counted(samples, 'sample')}, but the data set has"
                f" {self.epoch_size};"
                " resume with the same data"
            )

    def checkpoint_texts(self) -> dict[str, str]:
        """Return the texts of a checkpoint: normalisation and fields; collective."""
        train = self.dataset.train
        factor, offset = train.factor_and_subtrahend
        images = {"shape": self.dataset.sample_shape, "factor": factor, "offset": offset, "fill": train.fill}
        return {"images": json.dumps(images), **field_texts(getattr(train, "fields", None))}

    def restore_texts(self, texts: Mapping[str, str]) -> None:
        """Continue with texts of a checkpoint; ValueError if they do not match."""
        fields = getattr(self.dataset.train, "fields", None)  # what is only like a split may not have it
        if fields is not None:
            restore_fields(texts, fields)
