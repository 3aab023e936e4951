"""Training of a replica as a worker of an asynchronous job, with updates by parameter servers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.namespace import namespace
from ..comm import Transport, all_or_none
from ..errors import ConfigError, ServiceError
from ..models import RemoteUpdate, TrainableModel
from ..strategies import ParameterSpec, Strategy, StrategyBuilder
from .client import ParameterClient, PulledValues
from .master_client import RETRY_SECONDS, MasterClient
from .placement import place_parameters
from .progress import AppliedMinibatches
from .state import StartingState, SyncPolicy
from .updates import check_server_optimizer
from .wire import read_token

SERVERS_VARIABLE, MASTER_VARIABLE, WORKER_VARIABLE = "NEONDIST_SERVERS", "NEONDIST_MASTER", "NEONDIST_WORKER"
"""Environment variables of a worker: addresses of the servers, address of the master, index of the worker."""
POLICY_VARIABLE = "NEONDIST_SYNC_POLICY"
"""Environment variable of a worker: JSON of the `SyncPolicy`, if it overrides the strategy's policy."""


@dataclass(frozen=True)
class AsyncWorkerSpec:
    """Assignment of this process's replica to a worker of an asynchronous job.

    Attributes
    ----------
    index : int
    servers : tuple of str
        Addresses of the servers.
    master : str
        Address of the master.
    token : str
    policy : SyncPolicy, optional
        Policy for the application of gradients. Default: the strategy's policy.
    """

    index: int
    servers: tuple[str, ...]
    master: str
    token: str
    policy: SyncPolicy | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AsyncWorkerSpec | None:
        """Return the assignment described by the environment; None if the process is not a worker."""
        if not environ.get(SERVERS_VARIABLE):
            return None
        try:
            index, master = int(environ[WORKER_VARIABLE]), environ[MASTER_VARIABLE]
        except (KeyError, ValueError):
            problem = f"is set; also set {WORKER_VARIABLE} to an integer and {MASTER_VARIABLE} to an address"
            raise ConfigError(f"{SERVERS_VARIABLE} {problem}") from None
        try:
            policy = SyncPolicy.parse(json.loads(environ[POLICY_VARIABLE])) if environ.get(POLICY_VARIABLE) else None
        except (ValueError, AttributeError):
            raise ConfigError(f"{POLICY_VARIABLE}: is not a valid SyncPolicy; unset this variable") from None
        return cls(index, tuple(environ[SERVERS_VARIABLE].split(",")), master, read_token(environ), policy)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for `from_environment`, without the token."""
        policy = {} if self.policy is None else {POLICY_VARIABLE: json.dumps(self.policy.to_json())}
        worker_variables = {MASTER_VARIABLE: self.master, WORKER_VARIABLE: str(self.index)}
        return {SERVERS_VARIABLE: ",".join(self.servers), **worker_variables, **policy}

    @property
    def name(self) -> str:
        """Name of the worker for services."""
        return worker_name(self.index)


def worker_name(index: int) -> str:
    """Return the name of a worker by its index."""
    return f"worker-{index:05d}"


class ServerUpdate(RemoteUpdate):
    """Updates of all parameters by servers, with which the first rank communicates.

    Parameters
    ----------
    worker : AsyncWorkerSpec
    strategy : StrategyBuilder or Strategy
        Asynchronous strategy of all parameters.
    model : TrainableModel
        Built model, whose parameters are replicated on every rank or sharded over the tiles.
    world : Transport
        The ranks of this worker.
    updates : int
        Number of updates that led to the model's values.
    master_client : MasterClient, optional
        Provides the minibatch of a gradient. Default: gradients without minibatches.
    applied : AppliedMinibatches, optional
        Minibatches of these updates.
    samples : int
        Number of samples of these minibatches.
    may_initialize : bool
        Whether this worker may initialise the servers with its values and its optimiser's state. In a resumed job,
        only the first worker has loaded the checkpoint.

    Attributes
    ----------
    version : int
        Number of updates that the first server had applied at the last pull.

    Raises
    ------
    ConfigError
        On every rank: the strategy does not match the parameters, or servers cannot apply the optimiser.
    ServiceError
        On every rank: a server is unreachable, or rejects the model.
    """

    def __init__(
        self,
        worker: AsyncWorkerSpec,
        strategy: StrategyBuilder | Strategy,
        model: TrainableModel,
        world: Transport,
        updates: int = 0,
        master_client: MasterClient | None = None,
        applied: AppliedMinibatches | None = None,
        samples: int = 0,
        may_initialize: bool = True,
    ) -> None:
        self._worker, self._model, self._world, self._master_client = worker, model, world, master_client
        self._parameters = parameters = model.built_parameters
        count, optimizer = len(worker.servers), model.optimizer
        parameter_specs = [
            ParameterSpec(shard.full_name, layout.shape, str(parameters.values.dtype), bool(layout.max_rows_per_sample))
            for shard in parameters.trained_shards
            for layout in [shard.parameter]
        ]
        self.strategy = strategy.build(parameter_specs, count) if isinstance(strategy, StrategyBuilder) else strategy
        self.strategy.check_parameters_match(parameter_specs)
        check_server_optimizer(optimizer, self.strategy)
        decayed_names = [shard.full_name for shard in parameters.trained_shards if shard.decays]
        layouts = place_parameters(self.strategy, count, decayed_names=decayed_names)
        self._values = self._gather_parameters(parameters.values)
        slots = model.checkpoint_arrays()["optimizer"] if updates else []
        slot_arrays = {shard.full_name: shard.gather(array) for shard, array in slots}
        start = StartingState(slot_arrays, updates, samples, applied or AppliedMinibatches())
        self._client: ParameterClient | None = None
        self.version = 0
        with all_or_none(world, root_only=True):
            if world.rank == 0:
                client_args = worker.servers, layouts, worker.token, worker.name
                self._client = ParameterClient(*client_args, retry_seconds=RETRY_SECONDS)
                client, policy = self._client, worker.policy or _sync_policy_of_strategy(self.strategy)

                def initialize_servers() -> None:
                    client.push_initial_values(self._values if may_initialize else None, optimizer, policy, start)

                initialize_servers()
                if master_client is not None:
                    master_client.set_callbacks(client.leave, initialize_servers if may_initialize else lambda: None)
        self.pull_values()

    def push_gradients_and_pull_values(self, learning_rate_scale: float) -> None:
        """Push this worker's gradients, wait for slower workers within the staleness bound, and pull new values."""
        gradients, master = self._gather_parameters(self._parameters.grads), self._master_client
        with all_or_none(self._world, root_only=True):
            if self._client is not None:
                samples, minibatch = (1, None) if master is None else (master.samples, master.minibatch)
                rejected = self._client.push(gradients, samples, minibatch, learning_rate_scale).stale
                if rejected and master is None:
                    raise ServiceError("a parameter server has lost its values; start the command again")
                if master is not None:
                    master.was_rejected = rejected
                self._client.wait_for_staleness_bound()
        if master is not None:
            master.was_pushed = True
        self.pull_values()

    def leave_and_wait_for_others(self, workers: int, timeout: float) -> None:
        """Leave the job; on the first worker, wait up to `timeout` seconds until all `workers` have left."""
        deadline = time.monotonic() + timeout
        with all_or_none(self._world, root_only=True):
            if self._client is not None:
                self._client.leave()
                is_first = not self._worker.index
                while is_first and self._client.count_departed_workers() < workers and time.monotonic() < deadline:
                    time.sleep(0.05)

    def pull_values(self) -> None:
        """Pull new values."""
        self._pull(with_slots=False)

    def _pull(self, with_slots: bool) -> dict[str, np.ndarray]:
        """Pull new values; with `with_slots`, return the optimiser's whole arrays by 'PARAMETER/SLOT', otherwise {}."""
        pulled = PulledValues([], [])
        with all_or_none(self._world, root_only=True):
            if self._client is not None:
                pulled = self._client.pull_async(with_slots).result()
                self.version = self._client.versions[0]
        if self._world.size > 1:
            pulled, self.version = self._world.bcast((pulled, self.version))
        pulled.copy_to(self._values)
        parameters = self._parameters
        for shard, array in zip(parameters.trained_shards, parameters.split_flat(parameters.values), strict=True):
            array[...] = namespace(array).asarray(shard.own_part_of(self._values[shard.full_name])).reshape(array.shape)
        parameters.version += 1
        return pulled.assemble_slots()

    def pull_final_values(self) -> None:
        """Pull the final values on the first worker."""
        if not self._worker.index:
            self.pull_values()

    def pull_values_and_optimizer_state(self) -> None:
        """On the first worker, pull new values and the optimiser's state into the model."""
        if self._worker.index:
            return
        slots = self._pull(with_slots=True)
        for shard, array in self._model.checkpoint_arrays(slots)["optimizer"]:
            if shard.full_name in slots:
                own_part = shard.own_part_of(slots[shard.full_name])
                array[...] = namespace(array).asarray(own_part).reshape(array.shape)

    def close(self) -> None:
        """Close the connections."""
        if self._master_client is not None:
            self._master_client.close()
        if self._client is not None:
            self._client.close()

    def _gather_parameters(self, flat: Any) -> dict[str, np.ndarray]:
        shards = self._parameters.trained_shards
        return {
            shard.full_name: np.ascontiguousarray(shard.gather(array))
            for shard, array in zip(shards, self._parameters.split_flat(flat), strict=True)
        }


def _sync_policy_of_strategy(strategy: Strategy) -> SyncPolicy:
    sync_modes = {(placement.sync, placement.staleness) for placement in strategy.parameters.values()}
    if len(sync_modes) > 1:
        raise strategy.create_error("has parameters with different sync or staleness; use the same for all")
    sync, staleness = sync_modes.pop()
    return SyncPolicy(sync=False, staleness=staleness if sync else None)
