"""Statistics of the whole job, from the master, in the records of a run with servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ServiceError
from ..state import TrainState
from .hook import Hook

if TYPE_CHECKING:
    from ...services.training import AsyncWorkerSpec

JOB_STATISTICS_KEY = "job"
"""Key of the statistics in a record."""


class JobStatisticsHook(Hook):
    """Query the master after each epoch for workers, tasks, versions of servers and throughput of the job.

    The other numbers of the record are those of the worker that writes it. The hook does not wait for a restarting
    master.

    Parameters
    ----------
    worker : AsyncWorkerSpec
    """

    def __init__(self, worker: AsyncWorkerSpec) -> None:
        self._worker_spec = worker

    def after_epoch(self, run: TrainState) -> None:
        """Add the statistics to the record."""
        statistics = self._query_master() if run.is_first_rank else None
        if statistics := run.grid.world.bcast(statistics):
            run.history[-1][JOB_STATISTICS_KEY] = statistics

    def _query_master(self) -> dict[str, Any] | None:
        from ...services.wire import ServiceClient  # gRPC

        try:
            with ServiceClient(
                self._worker_spec.master,
                "Recovery",
                self._worker_spec.token,
                timeout=10.0,
                retry_seconds=1.0,
            ) as rpc:
                return dict(rpc.call("statistics").mapping("statistics"))
        except ServiceError:
            return None
