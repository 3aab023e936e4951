"""A session: a script's own training loop with roles, hooks, checkpoints and an end that all ranks agree on."""

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
from ..models import ScriptModel
from ..registry.arguments import checked
from ..registry.ranges import Count, Index, NotNegative, Positive
from ..train import Hook
from ..train.callbacks.checkpoint import CheckpointSchedule
from .evaluation import EvaluatorRole
from .state import state_of
from .training import KEEP, TrainingRole


class DistributedSession:
    """A context in which a script trains by its own loop, and goes on where an earlier session ended; collective.

    On entry the newest checkpoint of `checkpoint_dir`, if there is one, is restored on every rank: weights, the
    optimiser's arrays and settings, states of schedulers, the step, the position in the data set of `batches`, and
    PyTorch's random numbers. On exit the last state is written. The files are those of `FitExperiment.run`, and any
    number of ranks reads them.

    In a cluster with parameter servers each worker trains by itself: its gradients go to the servers, which apply them
    as they come, and their new values come back. The master gives them the model, or that of the checkpoint, and writes
    the checkpoints; other workers wait for it on entry. `global_step` counts the updates of all workers. Where the
    master ends its session, all end theirs after the step under way, and the servers end after them. The job's token
    is in NEONDIST_TOKEN. The optimiser's arrays are on the servers and end with them.

    In the task of an evaluator the same loop evaluates: `should_stop` waits for the next checkpoint of the job and
    loads it, `run` calls a function that evaluates and writes what it returns to 'evaluation/metrics.jsonl'.

    Parameters
    ----------
    task_spec : TaskSpecDef, optional
        Default: `TaskSpec()`, from the environment.
    model : optional
        A built neondist model; what `ndt.distribute` returns; or a list of one of these with its optimiser and other
        objects that have `state_dict` and `load_state_dict`, such as schedulers. A DistributedOptimizer is found by its
        module. None: steps are counted and hooks called, and nothing else is kept.
    checkpoint_dir : path, optional
        Default: nothing is restored or written.
    hooks : sequence of Hook
        The order of calls is theirs. A TensorBoard or MLflow among them shows summaries by step.
    chief_only_hooks : sequence of Hook
        Called on one rank, the first of the master's task; they must not communicate.
    save_checkpoint_secs, save_checkpoint_steps : optional
        A checkpoint is written when one of them is over. The newest is checkpoint.h5; the last five stay as
        checkpoint-STEP.h5.
    save_summaries_steps, save_summaries_secs : optional
        When the mean loss and the speed are written to summaries.jsonl and loggers; default: never.
    stop_grace_period_secs : float
        How long to wait, at the end, for ranks that have not left their loop, or other workers of servers, before the
        job is ended.
    log_step_count_steps : int, optional
        How often to print step, loss and speed; None: never.

    Raises
    ------
    ConfigError
        On every rank: the model is not built or not distributed, or an object has no state that files can hold; or
        servers cannot update the model, or the job's token is missing.
    DataError
        On entry: the checkpoint is damaged, or of another model.
    OutputError
        On entry: another job writes to `checkpoint_dir`, or nothing can be written there.
    ServiceError
        Servers, or the master, do not come, or end before this worker.

    Examples
    --------
    >>> with nd.DistributedSession(model=model, checkpoint_dir="ckpt", hooks=[nd.StopAtStepHook(1000)]) as session:
    ...     for x, y in session.batches(dataset, batch_size=128):
    ...         loss = session.run(model.train_batch, x, y)  # doctest: +SKIP
    """

    @checked
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
        self.task_spec = TaskSpec() if task_spec is None else task_spec
        for name, given in (("hooks", hooks), ("chief_only_hooks", chief_only_hooks)):
            if isinstance(given, Hook):
                raise ConfigError(f"{name}: expected a list of hooks; write {name}=[{type(given).__name__}(...)]")
        if self.task_spec.is_ps():
            raise ConfigError("task_spec: a parameter server has no session; call task_spec.create_server() alone")
        state = self.state = state_of(model)
        folder = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._inside = False
        self._role: TrainingRole | EvaluatorRole
        if self.task_spec.is_evaluator():
            self._role = EvaluatorRole(state, folder, hooks)
            return
        if isinstance(state.model, ScriptModel):
            state.model.check_trains()
        writes = bool(state.grid.world.bcast(self.task_spec.is_master()))
        chief = writes and state.first_rank
        minutes = None if save_checkpoint_secs is None else save_checkpoint_secs / 60
        schedule = CheckpointSchedule(save_checkpoint_steps, None, minutes, KEEP)
        self._warn_alone()
        servers = None
        if self.task_spec.num_ps:
            from .servers import JobServers  # gRPC

            servers = JobServers(self.task_spec, state, stop_grace_period_secs, os.environ)
        self._role = TrainingRole(
            state,
            folder,
            writes,
            [*hooks, *(chief_only_hooks if chief else ())],
            schedule,
            log_step_count_steps,
            (save_summaries_steps, save_summaries_secs),
            stop_grace_period_secs,
            servers,
        )

    def _warn_alone(self) -> None:
        task = self.task_spec
        if task.num_workers > 1 and not task.num_ps and self.state.grid.size == 1:
            warnings.warn(
                f"{task.type} {task.index} of a job of {task.num_workers} trains alone: build the model on"
                " nd.ProcessGrid(task_spec.create_server(), replicas=None)",
                stacklevel=4,
            )

    def __enter__(self) -> DistributedSession:
        self._role.enter()
        self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        self._role.exit(error)

    @property
    def global_step(self) -> int:
        """Steps so far, those of earlier sessions included; of an evaluator, that of the checkpoint at hand.

        With parameter servers: updates of all workers, as of this worker's last step.
        """
        return self.state.step

    @property
    def batch_size(self) -> int:
        """Samples, over all replicas, of the batch that `batches` has yielded last."""
        return self._training().batch_size

    def should_stop(self) -> bool:
        """Tell whether the loop is to end; the same on every rank.

        In an evaluator: wait for the next checkpoint and load it; collective.
        """
        self._check_inside()
        return self._role.should_stop()

    def request_stop(self, reason: str = "the script has asked for it") -> None:
        """Ask, on this rank or on several, that all ranks stop after the step that is run next, or under way.

        Until then `should_stop` is false on all.
        """
        self.state.request_stop(reason)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, which is one step of training; collective.

        Hooks are called, and all ranks learn whether to stop. A step that fails on a rank ends the session there, and
        nothing is written.

        Parameters
        ----------
        function : callable
            Such as `model.train_batch`. If it returns a number, hooks and logs have it as the loss. In an evaluator a
            function that evaluates, and returns a number or a mapping of names to numbers.
        """
        self._check_inside()
        return self._role.run(function, *args, **kwargs)

    def batches(
        self, dataset: Dataset, batch_size: Count, epochs: Count | None = None, seed: Index | None = None
    ) -> Generator[tuple[Any, Any]]:
        """Yield this rank's images and targets, each for one `run`, from where the checkpoint was until it is to stop.

        The order of an epoch is that of an experiment. An optimiser's schedule of a neondist model is followed.

        Parameters
        ----------
        dataset : Dataset
            Opened on the grid of the model. If it was divided by `shard` among as many replicas as the grid has, each
            replica reads its own samples, and what larger shards have more is left out.
        batch_size : int
            Samples of a batch, over all replicas; the last one of an epoch may be smaller: see `session.batch_size`.
        epochs : int, optional
            Default: until a hook or `request_stop` ends the session.
        seed : int, optional
            Of the order; default the model's, or 0.

        Yields
        ------
        x : array (n, *tile, C), local
        targets : array
        """
        self._check_inside()
        return self._training().batches(dataset, batch_size, epochs, seed)

    def _training(self) -> TrainingRole:
        if not isinstance(self._role, TrainingRole):
            raise ConfigError("batches: are for training; an evaluator reads its data itself, in the function of run")
        return self._role

    def _check_inside(self) -> None:
        if not self._inside:
            raise NotReadyError("the session is not open: use `with nd.DistributedSession(...) as session:`")
