"""Session for a script's own training loop: roles, hooks, checkpoints and a coordinated stop on all ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..cluster import TaskSpec, TaskSpecDef
from ..data import Dataset
from ..errors import ConfigError, NotReadyError
from ..models import TrainingScriptAdapter
from ..registry.arguments import type_checked
from ..registry.ranges import Count, Index, NotNegative, Positive
from ..terminal.script_errors import install_script_error_hook
from ..train import Hook
from ..train.callbacks.checkpoint import CheckpointSchedule
from .evaluation import EvaluatorRole
from .state import create_session_state
from .training import KEPT_CHECKPOINTS, TrainingRole


class DistributedSession:
    """Context of a training loop with checkpoints, hooks and resumption. Collective.

    On entry the newest checkpoint in `checkpoint_dir`, if any, is restored on every rank: weights, the optimiser's
    arrays and settings, states of schedulers, the step, the position in the data set of `batches`, and PyTorch's random
    states. On exit without an error the final state is written. The files are those of `FitExperiment.run`, and can be
    read on any number of ranks.

    In a cluster with parameter servers each worker trains independently: it sends gradients to the servers, which apply
    them on arrival, and receives updated values. The master initialises the servers with the model or a checkpoint, and
    writes the checkpoints; on entry the other workers wait until the servers are initialised. `global_step` counts the
    updates of all workers. When the master ends its session, all workers end theirs after the current step, and then
    the servers exit. The job's token is read from NEONDIST_TOKEN. The optimiser's arrays exist only on the servers.

    In an evaluator task the same loop evaluates: `should_stop` waits for the next checkpoint of the job and loads it,
    and `run` calls an evaluation function and writes its result to 'evaluation/metrics.jsonl'.

    Parameters
    ----------
    task_spec : TaskSpecDef, optional
        Default: `TaskSpec()`, from the environment.
    model : optional
        A built neondist model, a module returned by `ndt.distribute`, or a list of one of these with its optimiser and
        other objects with `state_dict` and `load_state_dict`, such as schedulers. A DistributedOptimizer is found
        through its module. None: the session only counts steps and calls hooks.
    checkpoint_dir : path, optional
        Default: no checkpoints.
    hooks : sequence of Hook
        Called in this order. A TensorBoard or MLflow hook logs summaries by step.
    chief_only_hooks : sequence of Hook
        Called only on the first rank of the master task; they must not communicate.
    save_checkpoint_secs, save_checkpoint_steps : optional
        Intervals between checkpoints; the first to elapse applies. Default: 600 seconds. The newest is checkpoint.h5;
        the last five are kept as checkpoint-STEP.h5.
    save_summaries_steps, save_summaries_secs : optional
        Intervals at which mean loss and speed are written to summaries.jsonl and loggers. Default: never.
    stop_grace_period_secs : float
        Time to wait at the end for other workers, and for ranks still in their loop, before the job is aborted.
    log_step_count_steps : int, optional
        Interval in steps for printing step, loss and speed; None: never.

    Raises
    ------
    ConfigError
        On every rank: the model is not built or not distributed, the state of an object cannot be stored in files,
        servers cannot update the model, or the job's token is missing.
    DataError
        On entry: the checkpoint is damaged or belongs to another model.
    OutputError
        On entry: another job is writing to `checkpoint_dir`, or the folder is not writable.
    ServiceError
        The servers or the master are not reachable, or exit before this worker.

    Examples
    --------
    >>> with nd.DistributedSession(model=model, checkpoint_dir="ckpt", hooks=[nd.StopAtStepHook(1000)]) as session:
    ...     for x, y in session.batches(dataset, batch_size=128):
    ...         loss = session.run(model.train_batch, x, y, session.batch_size)  # doctest: +SKIP
    """

    @type_checked
    def __init__(
        self,
        task_spec: TaskSpecDef | None = None,
        model: Any = None,
        checkpoint_dir: str | Path | None = None,
        hooks: Sequence[Hook] = (),
        chief_only_hooks: Sequence[Hook] = (),
        save_checkpoint_secs: Positive | None = 600,
        save_checkpoint_steps: Count | None = None,
        save_summaries_steps: Count | None = None,
        save_summaries_secs: Positive | None = None,
        stop_grace_period_secs: NotNegative = 120,
        log_step_count_steps: Count | None = 100,
    ) -> None:
        install_script_error_hook()
        self.task_spec = TaskSpec() if task_spec is None else task_spec
        for name, argument in (("hooks", hooks), ("chief_only_hooks", chief_only_hooks)):
            if isinstance(argument, Hook):
                raise ConfigError(f"{name}: expected a list of hooks; write {name}=[{type(argument).__name__}(...)]")
        if self.task_spec.is_ps():
            raise ConfigError("task_spec: a parameter server has no session; call only task_spec.create_server()")
        state = self.state = create_session_state(model)
        folder = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._is_open = False
        self._role: TrainingRole | EvaluatorRole
        if self.task_spec.is_evaluator():
            self._role = EvaluatorRole(state, folder, hooks)
            return
        if isinstance(state.model, TrainingScriptAdapter):
            state.model.check_checkpointable()
        writes_checkpoints = bool(state.grid.world.bcast(self.task_spec.is_master()))
        is_chief = writes_checkpoints and state.is_first_rank
        interval_minutes = None if save_checkpoint_secs is None else save_checkpoint_secs / 60
        schedule = CheckpointSchedule(save_checkpoint_steps, None, interval_minutes, KEPT_CHECKPOINTS)
        self._warn_single_worker()
        servers = None
        if self.task_spec.num_ps:
            from .servers import JobServersClient  # gRPC

            servers = JobServersClient(self.task_spec, state, stop_grace_period_secs, os.environ)
        self._role = TrainingRole(
            state,
            folder,
            writes_checkpoints,
            [*hooks, *(chief_only_hooks if is_chief else ())],
            schedule,
            log_step_count_steps,
            (save_summaries_steps, save_summaries_secs),
            stop_grace_period_secs,
            servers,
        )

    def _warn_single_worker(self) -> None:
        task = self.task_spec
        if task.num_workers > 1 and not task.num_ps and self.state.grid.size == 1:
            warnings.warn(
                f"{task.type} {task.index} of a job of {task.num_workers} trains alone: build the model on"
                " nd.ProcessGrid(task_spec.create_server(), replicas=None)",
                stacklevel=4,
            )

    def __enter__(self) -> DistributedSession:
        self._role.enter()
        self._is_open = True
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._role.exit(error)

    @property
    def global_step(self) -> int:
        """Number of steps, including those of earlier sessions; in an evaluator, the step of the current checkpoint.

        With parameter servers: updates by all workers, as of this worker's last step.
        """
        return self.state.step

    @property
    def batch_size(self) -> int:
        """Number of samples, over all replicas, in the last batch yielded by `batches`."""
        return self._require_training().batch_size

    def should_stop(self) -> bool:
        """Return whether the loop should end; the same on every rank.

        In an evaluator, wait for the next checkpoint and load it. Collective.
        """
        self._require_open()
        return self._role.should_stop()

    def request_stop(self, reason: str = "requested by the script") -> None:
        """Request, on one or several ranks, that all ranks stop after the current or next step.

        Until then `should_stop` returns False on all ranks. A session of one rank stops without another step.
        """
        self.state.request_stop(reason)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one training step and return `function(*args, **kwargs)`. Collective.

        Call the hooks, and share stop requests between ranks. A step that fails on a rank ends the session there
        without writing a checkpoint. So does NonFiniteError, raised on every rank if a step with a NaN or infinite
        loss leaves a module's parameter NaN or infinite.

        Parameters
        ----------
        function : callable
            A training step such as `model.train_batch`. A returned number is the loss for hooks and logs. In an
            evaluator: an evaluation function that returns a number or a mapping of names to numbers.
        """
        self._require_open()
        return self._role.run(function, *args, **kwargs)

    def batches(
        self, dataset: Dataset, batch_size: Count, epochs: Count | None = None, seed: Index | None = None
    ) -> Generator[tuple[Any, Any]]:
        """Yield this rank's part of one batch for each `run`, from the restored position until the session stops.

        Samples of an epoch are ordered as in an experiment. For a neondist model, its optimiser's schedule is applied.

        Parameters
        ----------
        dataset : Dataset
            A data set opened on the model's grid. If it was divided into as many shards as the grid has replicas, each
            replica reads its own samples, and surplus samples of larger shards are dropped.
        batch_size : int
            Samples per batch, over all replicas; the last batch of an epoch may be smaller: see `session.batch_size`.
        epochs : int, optional
            Default: until a hook or `request_stop` ends the session.
        seed : int, optional
            Seed of the order. Default: the model's seed, or 0.

        Yields
        ------
        x : array (n, *tile, C), local
        targets : array

        Raises
        ------
        ConfigError
            In an evaluator, or if `batch_size` is not a multiple of the number of replicas that read shards.
        DataError
            If the data set has another number of samples than the data set of the restored epoch.
        """
        self._require_open()
        return self._require_training().batches(dataset, batch_size, epochs, seed)

    def _require_training(self) -> TrainingRole:
        if not isinstance(self._role, TrainingRole):
            raise ConfigError(
                "session.batches and session.batch_size are available only to training tasks; in an evaluator, pass the"
                " data to the function that session.run calls"
            )
        return self._role

    def _require_open(self) -> None:
        if not self._is_open:
            raise NotReadyError("the session is not open: use `with nd.DistributedSession(...) as session:`")
