"""Workers and servers of an asynchronous run: each replica is a job of its own, beside parameter servers."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, DataError, LaunchError, ServiceError, ServiceUnavailableError
from ..io.generation_log import GenerationLog
from ..io.output import RECOVERY, clear, has_run
from ..system.job import detect
from ..system.signals import STOPPED
from ..terminal.console import say
from ..train.validate import grid_shape_of
from .fork_server import ForkServer, Process, load_permanently, open_fork_server
from .job_nodes import JobNode, JobNodes, NodeLostError, find_places, open_nodes
from .launch import words
from .members import WAIT
from .parent_watch import end_with_parent
from .scaling import Scaling, open_scaling
from .service_process import ServiceProcess
from .slots import Demand
from .worker_processes import TaskProgress, WorkerProcesses, worker_numbers

if TYPE_CHECKING:
    from ..services.message import Message
    from ..services.training import WorkerPlace

SERVERS = "NEONDIST_SERVERS"
"""Set in the environment of workers."""
MOST_SERVERS = 4


def _load() -> None:
    """Import what workers and servers need that train a model of PyTorch."""
    import h5py  # noqa: F401  of checkpoints
    import psutil  # noqa: F401

    from .. import train  # noqa: F401
    from ..io import environment  # noqa: F401
    from ..services import recovery, server, training, worker_tasks  # noqa: F401
    from ..torch.definition import load_capture

    load_capture()


def open_forks(arguments: argparse.Namespace) -> AbstractContextManager[ForkServer | None]:
    """Return a context of the fork server of a job with a PyTorch model; it yields None if processes are not forked.

    Open it before the model is loaded. In any `neondist` command it lets modules be imported that the model needs.
    """
    if not arguments.signals.whole_process or not Path(arguments.file).is_file():
        return nullcontext()
    if arguments.update_rule is not None and arguments.tiles == (1, 1) and SERVERS not in os.environ:
        return open_fork_server(_load)
    # ranks of tiles are started by mpirun
    if "torch" not in sys.modules:  # it was not forked
        with suppress(ImportError):  # what needs it says so
            load_permanently(_load)
    return nullcontext()


def worker_place(environ: Mapping[str, str]) -> WorkerPlace | None:
    """Return the place of this process in an asynchronous job; None if it is not a worker."""
    if SERVERS not in environ:
        return None
    from ..services.training import WorkerPlace

    return WorkerPlace.read(environ)


def end_with_supervisor(environ: Mapping[str, str]) -> None:
    """Let a worker end soon after the supervisor of its job, with which the servers end, rather than wait for these."""
    if SERVERS in environ:
        end_with_parent()


def check_workers(arguments: argparse.Namespace, experiment: Any, ranks: int) -> None:
    """Raise LaunchError if an experiment needs servers, and cannot have them; before anything is written."""
    if experiment.server_strategy is None or SERVERS in os.environ:
        return
    remedy = "or use sync: true and staleness: 0"
    for name in ("spares", "restarts", "elastic", "virtual", "cool_down", "wait", "lease"):
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise LaunchError(
                f"{option}: applies to a single MPI job, but the strategy needs servers; leave it out, {remedy}"
            )
    _check_resume(arguments)
    if detect(os.environ) is not None or ranks == 1:
        raise LaunchError(
            f"strategy: needs servers, which neondist run FILE.yaml -n P starts for P ranks; {remedy[3:]}"
        )
    shape = grid_shape_of(experiment, ranks)
    if shape.replicas == 1:
        raise LaunchError(
            f"strategy: servers are for several replicas, and {ranks} ranks are one of {shape.tiles} tiles; set"
            f" grid.replicas, {remedy}"
        )
    find_places(arguments, shape.replicas, shape.tiles)


def run_workers(arguments: argparse.Namespace, experiment: Any) -> int | None:
    """Run an experiment whose strategy needs servers, and return the exit code; None if it needs none.

    There is a worker for each replica, a process or an mpirun of its tiles, or between bounds as many as there are
    slots for. Beside them are a master with their tasks, and as many servers as workers, at most four. With a resource
    file workers and servers are on its nodes. Worker 0 writes the run's folder, the others folders in it; the folder
    `servers` has the servers' checkpoints and the queue.

    Raises
    ------
    LaunchError
        A server did not start.
    ServiceError
        Servers have not applied each record once.
    """
    strategy = experiment.server_strategy
    if strategy is None or SERVERS in os.environ:
        return None
    shape = grid_shape_of(experiment, arguments.ranks)
    if arguments.overwrite:  # at once, so that a worker that is started again finds files of this run alone
        for one in (arguments.folder, *arguments.folder.glob("worker-*")):
            clear(one)
    if not arguments.resume:
        shutil.rmtree(Path(arguments.folder, RECOVERY), ignore_errors=True)
    log = GenerationLog(arguments.folder, bool(arguments.resume))
    with ExitStack() as stack:
        places, scaling = find_places(arguments, shape.replicas, shape.tiles), None
        hosts = [host for host, count in places.items() for _ in range(count)]
        if arguments.bounds is not None:
            low, high = arguments.bounds
            demand = Demand(low, high, shape.tiles)
            scaling = stack.enter_context(open_scaling(demand, arguments.slots_from, arguments.slots_wait or WAIT))
            found = _wait_for_slots(arguments, scaling, log)
            if isinstance(found, int):
                return found
            hosts = found
        nodes = stack.enter_context(open_nodes(arguments, hosts, shape.tiles))
        code = None
        while code is None:
            try:
                with ExitStack() as processes:
                    code = _run_job(arguments, experiment, processes, nodes, scaling, log)
            except NodeLostError as lost:
                nodes.drop(lost.node)
                say(f"{lost.node} cannot be reached; continuing without it, from the servers' checkpoint", sys.stderr)
                log.note("lost", host=lost.node)
                arguments.resume = "auto"
        log.note("end", code=code)
    return code


def _wait_for_slots(arguments: argparse.Namespace, scaling: Scaling, log: GenerationLog) -> list[str] | int:
    """Return the hosts of the first workers, or the exit code of a job for which there were no slots."""
    received = arguments.signals.received

    def report(text: str) -> None:
        log.add("wait", what=text)
        say(text, sys.stderr)

    began = time.monotonic()
    found = scaling.wait_for_minimum(lambda: bool(received), report)
    if found is not None:
        log.add("slots", workers=len(found), waited=round(time.monotonic() - began, 3))
        return found
    if received:
        say(f"stopped while waiting for slots: received {received[0]}; start the command again")
        return STOPPED
    scaling.give_up()
    return 1


def _run_job(
    arguments: argparse.Namespace,
    experiment: Any,
    stack: ExitStack,
    nodes: JobNodes,
    scaling: Scaling | None,
    log: GenerationLog,
) -> int:
    """Start servers, master and workers, whose processes end with `stack`; return the exit code."""
    from ..services.training import WorkerPlace
    from ..services.wire import TOKEN, create_token

    shape, token, folder = grid_shape_of(experiment, arguments.ranks), create_token(), Path(arguments.folder, RECOVERY)
    if arguments.resume == "auto" and _servers_in(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
    secret = {TOKEN: token}
    fixed = getattr(experiment.server_strategy, "servers", None)
    count = _servers_in(folder) or arguments.num_ps or fixed or min(shape.replicas, MOST_SERVERS)

    def service(name: str, node: JobNode, words: Sequence[str]) -> ServiceProcess:
        def serve(words: Sequence[str]) -> Process:
            title = f"serve {words[0]}"
            return stack.enter_context(nodes.process(node, ["serve", *words], secret, title, subprocess.PIPE))

        return ServiceProcess(name, [*words, "--checkpoint-dir", str(folder.absolute())], node, serve)

    servers = []
    for at in range(count):
        node = nodes.services[at % len(nodes.services)]
        servers.append(service(f"parameter server {at}", node, ["ps"]))
    for server in servers:
        server.wait()
    addresses = tuple(server.address for server in servers)
    master = service("master", nodes.services[0], ["master", *_master_words(arguments, experiment, addresses)])
    master.wait()

    def start(index: int, node: str, again: bool) -> Process:
        place = WorkerPlace(index, addresses, master.address, token, arguments.update_rule)
        command = _worker_words(arguments, index, shape.tiles, again or bool(arguments.resume))
        output = subprocess.DEVNULL if index else None
        return stack.enter_context(nodes.process(node, command, secret | place.environment, f"worker {index}", output))

    workers = WorkerProcesses(
        start,
        nodes,
        [*servers, master],
        lambda index: _lost(master.address, addresses, token, index),
        scaling,
        lambda: _progress(master.address, token),
        log.note,
    )
    arguments.signals.join(workers.forward)
    code = workers.watch()
    if code == 0:
        text = workers.insist(lambda: _check(master.address, addresses, token))
        say(f"applied: {text}; {workers.restarted}")
    elif code == STOPPED and not workers.insist(lambda: _save(master.address, token)):
        say("servers had not applied the same gradients; continue from their last checkpoint with --resume", sys.stderr)
    return code


def _lost(master: str, servers: Sequence[str], token: str, index: int) -> bool:
    """Give back the task of a worker, and let servers wait for it no longer; False if some do not answer now."""
    from ..services.training import worker_name

    worker, received = {"worker": worker_name(index)}, True
    for address, service, method in [(master, "Master", "lost"), *((one, "PServer", "leave") for one in servers)]:
        try:
            _call(address, service, token, method, worker)
        except ServiceUnavailableError:
            received = False
        except ServiceError:  # a master without tasks yet
            pass
    return received


def _progress(master: str, token: str) -> TaskProgress | None:
    """Return the tasks of a job; None while the master does not know them, or is being restarted."""
    try:
        reply = _call(master, "Master", token, "progress")
    except ServiceError:
        return None
    return TaskProgress(reply.integer("todo"), worker_numbers(reply.items("workers")))


def _check(master: str, servers: Sequence[str], token: str) -> str:
    """Return what servers have applied in words; ServiceError unless each record was applied once."""
    found = []
    for address in servers:
        samples = _call(address, "PServer", token, "status").number("samples")
        credits = _call(address, "PServer", token, "credits").mapping("credits")
        told = _call(master, "Master", token, "check", {"samples": samples, "credits": credits})
        found.append(told.text("text"))
    return found[0]


def _save(master: str, token: str) -> bool:
    """Write a checkpoint of the servers; False: there is no newer one than the last."""
    return _call(master, "Recovery", token, "save").flag("saved")


def _call(address: str, service: str, token: str, method: str, fields: Mapping[str, Any] | None = None) -> Message:
    from ..services.wire import ServiceClient

    with ServiceClient(address, service, token, timeout=10.0, patience=1.0) as client:
        return client.call(method, fields)


def _servers_in(folder: Path) -> int | None:
    """Return the number of servers of the newest checkpoint of a run; None if there is none."""
    if not folder.is_dir():
        return None
    from ..services.checkpoint import servers_of
    from ..services.recovery import complete_checkpoints

    found = complete_checkpoints(folder)
    return servers_of(found[-1]) if found else None


def _check_resume(arguments: argparse.Namespace) -> None:
    """Raise an error if there is nothing to resume, or with another number of servers; or if a run would be lost."""
    folder = Path(arguments.folder, RECOVERY)
    count = _servers_in(folder)
    if not arguments.resume:
        if count is not None and not arguments.overwrite:
            raise ConfigError(
                f"output: {arguments.folder} has a run already; continue it with --resume, replace it with"
                " --overwrite, or choose another folder with --output"
            )
        return
    if count is None and (arguments.resume is True or has_run(arguments.folder)):
        raise DataError(f"{folder}: has no checkpoint of servers to resume from; start with --init-from checkpoint.h5")
    if count is not None and arguments.num_ps not in (None, 0, count):
        raise LaunchError(f"--num-ps {arguments.num_ps}: the resumed run has {count} servers; leave it out")


def _master_words(arguments: argparse.Namespace, experiment: Any, servers: Sequence[str]) -> list[str]:
    steps = experiment.checkpoint.every_steps or 0
    minibatches = getattr(arguments, "num_minibatches_per_task", 1)
    return [
        *("--servers", ",".join(servers)),
        *("--num-minibatches-per-task", str(minibatches)),
        *("--checkpoint-steps", str(steps)),
    ]


def _worker_words(arguments: argparse.Namespace, index: int, tiles: int, again: bool) -> list[str]:
    """Return the command of a worker: the same, with its own ranks and folder; started again it goes on there."""
    told = words(arguments)
    if tiles > 1:
        told += ["-n", str(tiles)]
    if index:
        told += ["--output", str(arguments.folder / f"worker-{index}")]  # the last one counts
    if again:
        told = [word for word in told if word != "--overwrite"] + ["--resume", "auto"]
    return told
