"""Statistics of the whole job, from the master, in the records of a run with servers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...errors import ServiceError
from ..state import TrainState
from .hook import Hook

if TYPE_CHECKING:
    from ...services.training import AsyncWorkerSpec

JOB_STATISTICS_KEY = "job"
"""Key of the statistics in a record."""


class JobStatisticsHook(Hook):
    """Query the master after each epoch for the workers, tasks, server versions, throughput and loss of the job.

    The other numbers of the record are those of the worker that writes it, except for the training loss if that worker
    has trained no minibatch of the epoch. The hook does not wait for a restarting master.
    """

    def __init__(self, worker: AsyncWorkerSpec) -> None:
        self._worker_spec = worker

    def after_epoch(self, run: TrainState) -> None:
        """Add the statistics to the record."""
        record = run.history[-1]
        statistics = self._fetch_job_statistics(run.epoch - 1) if run.is_first_rank else None
        if statistics := run.grid.world.bcast(statistics):
            record[JOB_STATISTICS_KEY] = statistics
            if math.isnan(record["train_loss"]) and statistics["train_loss"] is not None:
                record["train_loss"] = statistics["train_loss"]

    def _fetch_job_statistics(self, epoch: int) -> dict[str, Any] | None:
        from ...services.wire import ServiceClient  # gRPC

        try:
            with ServiceClient(
                self._worker_spec.master, "Recovery", self._worker_spec.token, timeout=10.0, retry_seconds=1.0
            ) as rpc:
                return dict(rpc.call("statistics", {"epoch": epoch}).mapping("statistics"))
        except ServiceError:
            return None
