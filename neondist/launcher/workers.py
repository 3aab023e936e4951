"""Workers and servers of an asynchronous run: each replica is a separate job, with parameter servers alongside."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, DataError, LaunchError, ServiceError, ServiceUnavailableError
from ..io.output import CHECKPOINT, GENERATIONS, SERVER_FOLDER, TASKS, remove_run_files
from ..io.run_event_log import RunEventLog
from ..system.collector import exempt_new_objects_from_gc
from ..system.job import detect_job
from ..system.signals import STOPPED_EXIT_CODE
from ..terminal.console import say
from ..train.validate import experiment_grid_shape
from .fork_server import ForkServer, Process, open_fork_server
from .job_nodes import JobNode, JobNodes, NodeLostError, assign_workers, checked_job_nodes
from .launch import rank_args
from .members import HOST_WAIT_SECONDS
from .mpirun import YIELD_WHEN_IDLE_VARIABLES
from .parent_watch import end_with_parent
from .scaling import ElasticSlots, open_elastic_slots
from .service_process import ServiceProcess
from .slots import WorkerBounds
from .worker_processes import TaskProgress, WorkerProcesses, worker_indices

if TYPE_CHECKING:
    from ..services.message import Message
    from ..services.training import AsyncWorkerSpec

SERVERS_VARIABLE = "NEONDIST_SERVERS"
DEFAULT_MAX_SERVERS = 4


def _preload_worker_modules() -> None:
    """Import the modules of workers and servers that train a PyTorch model."""
    import h5py  # noqa: F401  for checkpoints
    import psutil  # noqa: F401

    from .. import train  # noqa: F401
    from ..io import environment  # noqa: F401
    from ..services import master_client, recovery, server, training  # noqa: F401
    from ..torch.training.definition import preload_capture_imports

    preload_capture_imports()


def open_job_fork_server(arguments: argparse.Namespace) -> AbstractContextManager[ForkServer | None]:
    """Return a context manager of the fork server of a job with a PyTorch model; it yields None if there is none.

    Open it before the model is loaded. A command that forks no processes imports the modules here, in its own process.
    """
    if not arguments.signals.owns_process or not Path(arguments.file).is_file():
        return nullcontext()
    if arguments.sync_policy is not None and SERVERS_VARIABLE not in os.environ:
        return open_fork_server(_preload_worker_modules)
    if "torch" not in sys.modules:  # not forked
        with suppress(ImportError), exempt_new_objects_from_gc():  # the code that needs the modules reports the error
            _preload_worker_modules()
    return nullcontext()


def read_worker_spec(environ: Mapping[str, str]) -> AsyncWorkerSpec | None:
    """Return the assignment of this process in an asynchronous job; None if the process is not a worker."""
    if SERVERS_VARIABLE not in environ:
        return None
    from ..services.training import AsyncWorkerSpec

    return AsyncWorkerSpec.from_environment(environ)


def end_with_supervisor(environ: Mapping[str, str]) -> None:
    """Let a worker exit soon after its supervisor, rather than wait for servers that end with the supervisor."""
    if SERVERS_VARIABLE in environ:
        end_with_parent()


def check_worker_options(arguments: argparse.Namespace, experiment: Any, ranks: int) -> None:
    """Raise an error, before anything is written, if an experiment needs servers but cannot run with them."""
    if experiment.server_strategy is None or SERVERS_VARIABLE in os.environ:
        return
    remedy = "or use sync: true and staleness: 0"
    for name in ("spares", "restarts", "elastic", "virtual", "cooldown", "wait", "lease"):
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise LaunchError(
                f"{option}: applies to a single MPI job, but the strategy needs servers; leave it out, {remedy}"
            )
    _check_existing_run(arguments)
    may_be_single = arguments.sync_policy is not None  # neondist train may use servers with one worker
    if detect_job(os.environ) is not None or (ranks == 1 and not may_be_single):
        raise LaunchError(
            "strategy: needs servers, which neondist run FILE.yaml -n P starts if P ranks form several replicas;"
            f" {remedy[3:]}"
        )
    shape = experiment_grid_shape(experiment, ranks)
    if shape.replicas == 1 and not may_be_single:
        raise LaunchError(
            f"strategy: servers are for several replicas, but {ranks} ranks form a single replica;"
            f" set grid.replicas, {remedy}"
        )
    assign_workers(arguments, shape.replicas, shape.tiles)


def run_workers(arguments: argparse.Namespace, experiment: Any) -> int | None:
    """Run an experiment whose strategy needs servers, and return the exit code; None if it needs no servers.

    Each replica has a worker: a process, or an MPI job of its tiles. An elastic job has as many workers as its bounds
    and slots allow. A master manages the tasks. By default, there are as many servers as replicas, but at most four.
    With a resource file, workers and servers run on its nodes. Worker 0 writes to the run's folder, the others to
    subfolders; the subfolder `servers` holds the servers' checkpoints and the queue.

    Raises
    ------
    LaunchError
        A server did not start.
    ServiceError
        The servers have not applied each record exactly once.
    """
    strategy = experiment.server_strategy
    if strategy is None or SERVERS_VARIABLE in os.environ:
        return None
    shape = experiment_grid_shape(experiment, arguments.ranks)
    with ExitStack() as stack:
        log = stack.enter_context(closing(RunEventLog(arguments.folder, bool(arguments.resume))))
        _check_existing_run(arguments)  # again: another job may have ended while this one waited for the lock
        if arguments.overwrite:  # now, so that a restarted worker finds only files of this run
            for folder in (arguments.folder, *arguments.folder.glob("worker-*")):
                remove_run_files(folder, keep=(GENERATIONS,))
        if not arguments.resume or not _continues_from_servers(arguments.folder):
            shutil.rmtree(Path(arguments.folder, SERVER_FOLDER), ignore_errors=True)
        worker_counts, elastic_slots = assign_workers(arguments, shape.replicas, shape.tiles), None
        hosts = [host for host, count in worker_counts.items() for _ in range(count)]
        if arguments.bounds is not None:
            min_workers, max_workers = arguments.bounds
            bounds = WorkerBounds(min_workers, max_workers, shape.tiles)
            elastic_slots = stack.enter_context(
                open_elastic_slots(bounds, arguments.slots_from, arguments.slots_wait or HOST_WAIT_SECONDS)
            )
            slots = _wait_for_slots(arguments, elastic_slots, log)
            if isinstance(slots, int):
                return slots
            hosts = slots
        nodes = stack.enter_context(checked_job_nodes(arguments, hosts, shape.tiles))
        code = None
        while code is None:
            try:
                with ExitStack() as processes:
                    code = _run_job(arguments, experiment, processes, nodes, elastic_slots, log)
            except NodeLostError as lost:
                nodes.drop_node(lost.node)
                say(f"{lost.node} cannot be reached; continuing without it, from the servers' checkpoint", sys.stderr)
                log.log_event("lost", host=lost.node)
                arguments.resume = "auto"
        log.log_event("end", code=code)
    return code


def _wait_for_slots(arguments: argparse.Namespace, elastic_slots: ElasticSlots, log: RunEventLog) -> list[str] | int:
    """Wait for the hosts of the first workers; return them, or the exit code if no slots became free."""
    received_signals = arguments.signals.received_signals

    def report(text: str) -> None:
        log.add("wait", what=text)
        say(text, sys.stderr)

    start = time.monotonic()
    hosts = elastic_slots.wait_for_minimum(lambda: bool(received_signals), report)
    if hosts is not None:
        log.add("slots", workers=len(hosts), waited=round(time.monotonic() - start, 3))
        return hosts
    if received_signals:
        say(f"stopped while waiting for slots: received {received_signals[0]}; start the command again")
        return STOPPED_EXIT_CODE
    elastic_slots.report_giving_up()
    return 1


def _run_job(
    arguments: argparse.Namespace,
    experiment: Any,
    stack: ExitStack,
    nodes: JobNodes,
    elastic_slots: ElasticSlots | None,
    log: RunEventLog,
) -> int:
    """Run servers, master and workers, whose processes end with `stack`; return the exit code."""
    from ..services.master import forget_server_incarnations
    from ..services.training import AsyncWorkerSpec
    from ..services.wire import TOKEN_VARIABLE, create_token

    shape, token, folder = (
        experiment_grid_shape(experiment, arguments.ranks), create_token(), Path(arguments.folder, SERVER_FOLDER),
    )  # fmt: skip
    if arguments.resume:
        forget_server_incarnations(folder / TASKS)
    secret = {TOKEN_VARIABLE: token}
    fixed = getattr(experiment.server_strategy, "servers", None)
    count = arguments.num_ps or fixed or _count_checkpointed_servers(folder) or min(shape.replicas, DEFAULT_MAX_SERVERS)

    def create_service(name: str, node: JobNode, words: Sequence[str]) -> ServiceProcess:
        def start_service(words: Sequence[str]) -> Process:
            title = f"serve {words[0]}"
            return stack.enter_context(nodes.running_process(node, ["serve", *words], secret, title, subprocess.PIPE))

        return ServiceProcess(name, [*words, "--checkpoint-dir", str(folder.absolute())], node, start_service)

    servers = []
    for index in range(count):
        node = nodes.service_nodes[index % len(nodes.service_nodes)]
        servers.append(create_service(f"parameter server {index}", node, ["ps"]))
    for server in servers:
        server.wait_until_listening()
    addresses = tuple(server.address for server in servers)
    words = ["master", *_master_arguments(arguments, experiment, addresses)]
    master = create_service("master", nodes.service_nodes[0], words)
    master.wait_until_listening()

    def start_worker(index: int, node: str, is_restart: bool) -> Process:
        worker_spec = AsyncWorkerSpec(index, addresses, master.address, token, arguments.sync_policy)
        command = _worker_arguments(arguments, index, shape.tiles, is_restart or bool(arguments.resume))
        output = subprocess.DEVNULL if index else None
        variables = secret | worker_spec.environment | YIELD_WHEN_IDLE_VARIABLES
        return stack.enter_context(nodes.running_process(node, command, variables, f"worker {index}", output))

    workers = WorkerProcesses(
        start_worker,
        nodes,
        [*servers, master],
        lambda index: _report_lost_worker(master.address, addresses, token, index),
        elastic_slots,
        lambda: _fetch_progress(master.address, token),
        log.log_event,
    )
    arguments.signals.add_listener(workers.forward_signal)
    code = workers.watch_workers()
    if code == 0:
        summary = workers.call_with_restarts(lambda: _check_applied_once(master.address, addresses, token))
        say(f"applied: {summary}; {workers.restart_summary}")
    elif code == STOPPED_EXIT_CODE and not workers.call_with_restarts(lambda: _save_checkpoint(master.address, token)):
        say("servers had not applied the same gradients; continue from their last checkpoint with --resume", sys.stderr)
    return code


def _report_lost_worker(master: str, servers: Sequence[str], token: str, index: int) -> bool:
    """Requeue the task of a lost worker, and remove the worker from servers; False if a service is unavailable."""
    from ..services.training import worker_name

    fields, all_received = {"worker": worker_name(index)}, True
    for address, service, method in [(master, "Master", "lost"), *((server, "PServer", "leave") for server in servers)]:
        try:
            _call_service(address, service, token, method, fields)
        except ServiceUnavailableError:
            all_received = False
        except ServiceError:  # the master has no tasks yet
            pass
    return all_received


def _fetch_progress(master: str, token: str) -> TaskProgress | None:
    """Return the progress of a job; None while the master has no tasks or is being restarted."""
    try:
        reply = _call_service(master, "Master", token, "progress")
    except ServiceError:
        return None
    return TaskProgress(reply.integer("todo"), worker_indices(reply.sequence("workers")))


def _check_applied_once(master: str, servers: Sequence[str], token: str) -> str:
    """Return a summary of the applied gradients; ServiceError unless each record was applied once.

    A server that was restarted after the last update has no model until the master has restored it.
    """
    summaries = []
    for address in servers:
        credits = _call_service(address, "PServer", token, "credits").mapping("credits")
        status = _call_service(address, "PServer", token, "status")
        if not status.flag("initialized"):
            raise ServiceUnavailableError(f"{address}: the server was restarted")
        fields = {"samples": status.number("samples"), "credits": credits}
        reply = _call_service(master, "Master", token, "check", fields)
        summaries.append(reply.text("text"))
    return summaries[0]


def _save_checkpoint(master: str, token: str) -> bool:
    """Write a checkpoint of the servers; return False if they have not applied the same gradients."""
    return _call_service(master, "Recovery", token, "save").flag("saved")


def _call_service(
    address: str, service: str, token: str, method: str, fields: Mapping[str, Any] | None = None
) -> Message:
    from ..services.wire import ServiceClient

    with ServiceClient(address, service, token, timeout=10.0, retry_seconds=1.0) as client:
        return client.call(method, fields)


def _count_checkpointed_servers(folder: Path) -> int | None:
    """Return the number of servers in the newest checkpoint of a run; None if there is none."""
    if not folder.is_dir():
        return None
    from ..services.checkpoint import count_servers
    from ..services.recovery import list_complete_checkpoints

    checkpoints = list_complete_checkpoints(folder)
    return count_servers(checkpoints[-1]) if checkpoints else None


def _continues_from_servers(folder: Path) -> bool:
    """Whether a run continues from the servers' checkpoint; False if a later run without servers wrote checkpoint.h5.

    Raises
    ------
    DataError
        checkpoint.h5 is damaged.
    """
    if _count_checkpointed_servers(folder / SERVER_FOLDER) is None:
        return False
    if not (folder / CHECKPOINT).exists():
        return True
    from ..comm import SingleTransport
    from ..io.checkpoint import open_checkpoint
    from ..train.state import SERVER_UPDATES_TEXT

    with open_checkpoint(folder / CHECKPOINT, SingleTransport()) as file:
        return SERVER_UPDATES_TEXT in file.contents.texts


def _check_existing_run(arguments: argparse.Namespace) -> None:
    """Raise an error if there is no run to resume, or if an existing run would be lost."""
    count = _count_checkpointed_servers(Path(arguments.folder, SERVER_FOLDER))
    if arguments.resume is True and count is None and not (arguments.folder / CHECKPOINT).exists():
        raise DataError(f"{arguments.folder}: has no checkpoint to resume from; leave out --resume")
    if count is not None and not arguments.resume and not arguments.overwrite:
        raise ConfigError(
            f"output: {arguments.folder} has a run already; resume it (--resume), overwrite it (--overwrite), or"
            " choose another folder (--output)"
        )


def _master_arguments(arguments: argparse.Namespace, experiment: Any, servers: Sequence[str]) -> list[str]:
    steps = experiment.checkpoint.every_steps or 0
    minibatches = getattr(arguments, "num_minibatches_per_task", 1)
    return [
        *("--servers", ",".join(servers)),
        *("--num-minibatches-per-task", str(minibatches)),
        *("--checkpoint-steps", str(steps)),
    ]


def _worker_arguments(arguments: argparse.Namespace, index: int, tiles: int, is_restart: bool) -> list[str]:
    """Return a worker's arguments: those of the command, with its own ranks and folder; a restarted worker resumes."""
    command = rank_args(arguments)
    if tiles > 1:
        command += ["-n", str(tiles)]
    if index:
        command += ["--output", str(arguments.folder / f"worker-{index}")]  # overrides an earlier --output
    if is_restart:
        command = [word for word in command if word != "--overwrite"] + ["--resume", "auto"]
    return command
