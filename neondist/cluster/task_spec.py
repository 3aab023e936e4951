"""Task of a process: its role and index, from the environment set by a cluster manager."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from ..comm import Transport
from ..errors import ConfigError, LaunchError
from ..registry import suggest
from ..registry.arguments import type_checked
from ..registry.ranges import Index
from ..system.heartbeat import has_port
from ..system.job import GENERATION_VARIABLE, count_torchrun_ranks, detect_job, local_rank
from ..terminal.script_errors import install_script_error_hook

_CANONICAL_TYPES = {"master": "master", "chief": "master", "worker": "worker", "ps": "ps", "evaluator": "evaluator"}

_HOST_VARIABLES = {"ps": "PS_HOSTS", "worker": "WORKER_HOSTS", "master": "MASTER_HOST"}
_BATCH_VARIABLES = "JOB_ID", "JENKINS_URL"
"""Variables of Grid Engine and Jenkins, which set JOB_NAME to the name of a job."""
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
    ("PMI_RANK", "PMI_SIZE", "SLURM_RESTART_COUNT"),  # before Slurm, whose tasks may be MPICH's daemons of nodes
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_RESTART_COUNT"),
    ("JOB_COMPLETION_INDEX", "NEONDIST_WORKERS", ""),
)
"""Variables of torchrun, Open MPI, MPICH and Intel MPI, Slurm, and indexed jobs: rank, ranks, number of restarts."""


class TaskSpecDef:
    """Role of a process in a job.

    A master is also a worker: it has shard 0, and worker i has shard i + 1. Without a master, worker 0 takes its role,
    and worker i has shard i. Evaluators do not train and are not counted.

    Parameters
    ----------
    task_type : {'master', 'chief', 'worker', 'ps', 'evaluator'}
        'chief' is a synonym of 'master'.
    index : int
        Index among the tasks of its type.
    trial : str, optional
        Trial of a hyperparameter search.
    ps_hosts, worker_hosts, master : list of str, or comma-separated text, optional
        Addresses; at most one of the master.
    num_workers : int, optional
        Number of workers besides `master`. Default: the number of `worker_hosts`.
    generation : int
        Number of restarts of the job.

    Attributes
    ----------
    type, index, trial, generation, ps_hosts, worker_hosts, master
        As passed; `type` is 'master' for a chief.
    num_workers, num_ps : int
        Numbers of workers, including the master, and of parameter servers.
    shard_index : int or None
        Shard of the data set; None for tasks that do not train.

    Raises
    ------
    ConfigError
        If the type is unknown, an argument has another type, or an index is out of range.
    """

    @type_checked
    def __init__(
        self,
        task_type: str = "master",
        index: int = 0,
        trial: str | None = None,
        ps_hosts: Sequence[str] | str | None = None,
        worker_hosts: Sequence[str] | str | None = None,
        master: Sequence[str] | str | None = None,
        *,
        num_workers: Index | None = None,
        generation: Index = 0,
    ) -> None:
        if task_type not in _CANONICAL_TYPES:
            raise ConfigError(f"task type '{task_type}' is unknown{suggest(str(task_type), _CANONICAL_TYPES)}")
        self.type, self.index, self.trial, self.generation = _CANONICAL_TYPES[task_type], index, trial, generation
        self.ps_hosts, self.worker_hosts = _split_hosts(ps_hosts), _split_hosts(worker_hosts)
        masters = _split_hosts(master)
        if len(masters) > 1:
            raise ConfigError(f"master: expected one master or chief, got {', '.join(masters)}")
        self.master = masters[0] if masters else None
        self.num_ps = len(self.ps_hosts)
        self._worker_count = len(self.worker_hosts) if num_workers is None else num_workers
        count = {"ps": self.num_ps, "worker": self._worker_count, "master": 1}.get(self.type)
        if index < 0 or (count and index >= count):
            expected = f"from 0 to {count - 1}" if count else "at least 0"
            raise ConfigError(f"index: {index} of task type '{self.type}' is invalid; expected {expected}")
        self.num_workers = max(1, self._worker_count + len(masters))

    @property
    def shard_index(self) -> int | None:
        """Shard of the data set that the task reads, out of `num_workers`; None if it does not train."""
        if self.is_ps() or self.is_evaluator():
            return None
        return 0 if self.type == "master" else self.index + (self.master is not None)

    def is_ps(self) -> bool:
        """Whether the task is a parameter server."""
        return self.type == "ps"

    def is_worker(self) -> bool:
        """Whether the task trains, as a worker or as the master."""
        return self.type in ("worker", "master")

    def is_master(self) -> bool:
        """Whether the task writes checkpoints and logs: the master, or worker 0 if there is none."""
        return self.type == "master" or (self.type == "worker" and self.master is None and self.index == 0)

    def is_evaluator(self) -> bool:
        """Whether the task evaluates checkpoints."""
        return self.type == "evaluator"

    def use_last_worker_as_evaluator(self) -> TaskSpecDef:
        """Return this task in a job whose last worker is the evaluator.

        Raises
        ------
        ConfigError
            If there is only one worker.
        """
        if self.num_workers < 2 or not self._worker_count:
            raise ConfigError("use_last_worker_as_evaluator: needs at least two workers; start another worker")
        last_index = self._worker_count - 1
        is_evaluator = self.type == "worker" and self.index == last_index
        return TaskSpecDef(
            "evaluator" if is_evaluator else self.type,
            0 if is_evaluator else self.index,
            self.trial,
            self.ps_hosts,
            self.worker_hosts[:last_index],
            self.master,
            num_workers=last_index,
            generation=self.generation,
        )

    user_last_worker_as_evaluator = use_last_worker_as_evaluator

    def create_server(self) -> Transport | None:
        """Connect the training tasks and return their transport for `ProcessGrid`, or run a parameter server.

        Collective over the training tasks. A parameter server does not return: it serves until the master ends its
        session or SIGTERM is received, and then exits with code 0.

        Separately started tasks that know each other's addresses connect at the address of the master or of
        worker 0, which requires PyTorch. `ProcessGrid(task.create_server(), replicas=None)` makes each task a replica.

        Returns
        -------
        Transport or None
            None if there is nothing to connect, and `ProcessGrid` finds the ranks by itself: for a single task, an
            evaluator, the ranks of an MPI job, and a worker in a cluster with parameter servers, which connect the
            workers.

        Raises
        ------
        ConfigError
            If the first address has no port; the task is an MPI job of several ranks; or, for a parameter server, its
            address does not belong to this machine or is in use, or NEONDIST_TOKEN is not set.
        LaunchError
            If the other tasks do not connect, PyTorch is missing, or the workers of a parameter server are lost.
        SystemExit
            When a parameter server has finished.
        """
        install_script_error_hook()
        if self.is_ps():
            if not self.ps_hosts:
                raise ConfigError(f"create_server: parameter server {self.index} has no address; add it to ps_hosts")
            services = import_module("neondist.services.job")  # imported by name: services depend on this package
            sys.exit(services.run_server_task(self.ps_hosts[self.index]))
        if self.is_evaluator() or self.num_ps:
            return None
        if not self.worker_hosts:
            if self.num_workers > 1 and count_torchrun_ranks(os.environ):
                world: Transport = _import_torch_transport().world()
                return world
            return None
        if self.num_workers == 1:
            return None
        job = detect_job(os.environ)
        if job is not None and (job.size or 1) > 1:
            raise ConfigError(
                f"create_server: task '{self.type}' is already an MPI job of {job.size} ranks; start the ranks of"
                " all workers as one job, without addresses, and pass the number of workers to ProcessGrid as replicas"
            )
        address = self.master or self.worker_hosts[0]
        if not has_port(address):
            raise ConfigError(f"create_server: '{address}' has no port; give the first task's address as HOST:PORT")
        transport: Transport = _import_torch_transport().join_process_group(address, self.shard_index, self.num_workers)
        return transport

    def device_fn(self) -> str:
        """Return the PyTorch name of the task's device: 'cpu', or 'cuda:N' on a machine with GPUs.

        Ranks on a machine are assigned to its GPUs in turn. If PyTorch has not been imported, the device is 'cpu'.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{local_rank(os.environ) % torch.cuda.device_count()}"

    def __repr__(self) -> str:
        return f"TaskSpecDef({self.type!r}, {self.index}, num_workers={self.num_workers}, num_ps={self.num_ps})"


def TaskSpec(environ: Mapping[str, str] | None = None) -> TaskSpecDef:
    """Return the task described by environment variables; a single process is the master.

    The sources are, in this order, TF_CONFIG; JOB_NAME, TASK_INDEX, PS_HOSTS, WORKER_HOSTS and MASTER_HOST; torchrun,
    Open MPI, MPICH or Intel MPI, Slurm, and indexed jobs of Kubernetes (JOB_COMPLETION_INDEX and NEONDIST_WORKERS).

    Parameters
    ----------
    environ : mapping, optional
        Default: the environment of the process.

    Raises
    ------
    ConfigError
        If a variable has an invalid value, or the task is not in the cluster; the message names the variable.
    """
    environ = os.environ if environ is None else environ
    if environ.get("TF_CONFIG"):
        return _parse_tf_config(environ["TF_CONFIG"])
    hosts = {kind: environ[name] for kind, name in _HOST_VARIABLES.items() if environ.get(name)}
    if (job := environ.get("JOB_NAME")) and (hosts or not any(name in environ for name in _BATCH_VARIABLES)):
        return _create_task(
            {"": "JOB_NAME", "index": "TASK_INDEX", **_HOST_VARIABLES},
            task_type=job,
            index=_read_integer(environ, "TASK_INDEX", "0"),
            ps_hosts=hosts.get("ps"),
            worker_hosts=hosts.get("worker"),
            master=hosts.get("master"),
        )
    for rank, size, restarts in _RANK_VARIABLES:
        if rank in environ and size in environ:
            index, workers = _read_integer(environ, rank), _read_integer(environ, size, least=1)
            generation = _read_integer(environ, restarts, "0", least=0) if restarts else 0
            if GENERATION_VARIABLE in environ:  # the ranks of neondist run or launch
                generation = _read_integer(environ, GENERATION_VARIABLE, least=1) - 1
            names = {"": rank, "index": rank}
            return _create_task(names, task_type="worker", index=index, num_workers=workers, generation=generation)
    for kind in hosts:
        raise ConfigError(
            f"JOB_NAME: missing, but {_HOST_VARIABLES[kind]} is set; set JOB_NAME to master, worker, ps or evaluator"
        )
    return TaskSpecDef()


def _import_torch_transport() -> Any:
    try:
        return import_module("neondist.torch.exchange.transport")  # imported by name: that package depends on this one
    except ImportError:
        raise LaunchError("create_server: connecting tasks needs PyTorch: pip install 'neondist[torch]'") from None


def _parse_tf_config(text: str) -> TaskSpecDef:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"TF_CONFIG: not valid JSON ({error}); expected {{'cluster': ..., 'task': ...}}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"TF_CONFIG: expected an object with cluster and task, got {type(config).__name__}")
    cluster, task = (_tf_config_section(config, name) for name in ("cluster", "task"))
    masters = _task_addresses(cluster, "master") + _task_addresses(cluster, "chief")
    index = task.get("index", 0)
    if isinstance(index, str) and index.isdecimal():  # TensorFlow accepts this too
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool):
        raise ConfigError(f"TF_CONFIG: task.index: expected an integer, got {index!r}")
    trial = task.get("trial")
    return _create_task(
        {"": "TF_CONFIG", "index": "TF_CONFIG: task.index"},
        [name for name in cluster if cluster[name]],
        task_type=str(task.get("type", "master")),
        index=index,
        trial=None if trial is None else str(trial),
        ps_hosts=_task_addresses(cluster, "ps"),
        worker_hosts=_task_addresses(cluster, "worker"),
        master=masters,
    )


def _create_task(names: Mapping[str, str], cluster: Iterable[str] = (), **arguments: Any) -> TaskSpecDef:
    """Return the task. `names` maps arguments and task types to the variables that errors name; '' is the default."""
    try:
        task = TaskSpecDef(**arguments)
    except ConfigError as error:
        field, _, problem = str(error).partition(": ")
        raise ConfigError(f"{names[field]}: {problem}" if field in names else f"{names['']}: {error}") from None
    members = {"master": [task.master] if task.master else [], "worker": task.worker_hosts, "ps": task.ps_hosts}
    types = [*(name for name, hosts in members.items() if hosts), *(name for name in cluster if name not in members)]
    if types and not members.get(task.type, True):
        raise ConfigError(
            f"{names['']}: task type '{task.type}' is not in the cluster, which has {', '.join(types)}; add its"
            " address, or correct the type"
        )
    if not types and task.is_worker() and not task.is_master() and "num_workers" not in arguments:
        variable = names.get("worker", names[""])
        raise ConfigError(f"{variable}: has no addresses of workers, but this is worker {task.index}; list them all")
    addresses = [(kind, address) for kind, hosts in members.items() for address in hosts]
    for kind, address in addresses:
        variable, count = names.get(kind, names[""]), [other for _, other in addresses].count(address)
        if not has_port(address):
            raise ConfigError(f"{variable}: '{address}' has no port; give the address of each task as HOST:PORT")
        if count > 1:
            raise ConfigError(f"{variable}: '{address}' is listed {count} times; give each task its own port")
    return task


def _tf_config_section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"TF_CONFIG: {name}: expected an object, got {type(section).__name__}")
    return section


def _task_addresses(cluster: Mapping[str, Any], name: str) -> list[str]:
    addresses = cluster.get(name, [])
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise ConfigError(f"TF_CONFIG: cluster.{name}: expected a list of addresses")
    return addresses


def _split_hosts(hosts: Sequence[str] | str | None) -> list[str]:
    names = hosts.split(",") if isinstance(hosts, str) else list(hosts or ())
    return [host.strip() for host in names if host.strip()]


def _read_integer(environ: Mapping[str, str], name: str, default: str | None = None, least: float = -math.inf) -> int:
    text = environ.get(name, default)
    with suppress(ValueError):
        if (number := int(str(text))) >= least:
            return number
    minimum = f" of at least {least}" if least > -math.inf else ""
    raise ConfigError(f"{name}: expected an integer{minimum}, got '{text}'")
