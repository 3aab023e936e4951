"""Workers and servers of an asynchronous run: each replica is a job of its own, beside parameter servers."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .. import safe_path
from ..console import say
from ..errors import LaunchError
from ..job import detect
from ..signals import STOPPED
from ..train.validate import grid_shape_of
from .launch import words
from .parent_watch import end_child_with_us

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..services.training import WorkerPlace

SERVERS = "NEONDIST_SERVERS"
"""Set in the environment of workers."""
MOST_SERVERS = 4
_GRACE = 10.0
"""Seconds that workers have to end after a signal, before they are killed."""


def worker_place(environ: Mapping[str, str]) -> WorkerPlace | None:
    """Return the place of this process in an asynchronous job; None if it is no worker."""
    if SERVERS not in environ:
        return None
    from ..services.training import WorkerPlace

    return WorkerPlace.read(environ)


def check_workers(arguments: argparse.Namespace, experiment: Any, ranks: int) -> None:
    """Raise LaunchError if an experiment needs servers, and cannot have them; before anything is written."""
    if experiment.server_strategy is None or SERVERS in os.environ:
        return
    remedy = "or use sync: true and staleness: 0"
    for name in ("restarts", "elastic", "resources", "virtual"):
        if getattr(arguments, name) is not None:
            raise LaunchError(f"--{name}: is for one MPI job, and the strategy needs servers; leave it out, {remedy}")
    if arguments.resume:
        raise LaunchError(f"--resume: not where servers update; begin with --init-from checkpoint.h5, {remedy}")
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


def run_workers(arguments: argparse.Namespace, experiment: Any) -> int | None:
    """Run an experiment whose strategy needs servers, and return the exit code; None if it needs none.

    There is a worker for each replica, a process or an mpirun of its tiles, and as many servers, at most four. Worker 0
    writes the run's folder, the others folders in it.

    Raises
    ------
    LaunchError
        A server did not start.
    """
    strategy = experiment.server_strategy
    if strategy is None or SERVERS in os.environ:
        return None
    shape = grid_shape_of(experiment, arguments.ranks)
    from ..services.training import WorkerPlace
    from ..services.wire import TOKEN, create_token

    token = create_token()
    env = {**os.environ, TOKEN: token}
    fixed = getattr(strategy, "servers", None)
    with ExitStack() as stack:
        count = arguments.num_ps or fixed or min(shape.replicas, MOST_SERVERS)
        servers = [stack.enter_context(_process(["neondist", "serve", "ps"], env, True)) for _ in range(count)]
        addresses = tuple(_address(server) for server in servers)
        workers = []
        for index in range(shape.replicas):
            place = WorkerPlace(index, shape.replicas, addresses, token)
            command = ["neondist", *_worker_words(arguments, index, shape.tiles)]
            workers.append(stack.enter_context(_process(command, env | place.environment, False, silent=index > 0)))
        return _watch(workers, servers, arguments)


def _watch(workers: Sequence[Any], servers: Sequence[Any], arguments: argparse.Namespace) -> int:
    """Wait for all workers; pass signals on, and end the others when one has failed."""

    def forward(name: str) -> None:
        for process in workers:
            if process.poll() is None:
                process.send_signal(getattr(signal, name))

    arguments.signals.join(forward)
    while True:
        codes = [process.poll() for process in workers]
        failed = [(at, code) for at, code in enumerate(codes) if code not in (None, 0, STOPPED)]
        if failed:
            at, code = failed[0]
            if code < 0:
                say(
                    f"error: worker {at} was killed ({signal.Signals(-code).name}); start the command again", sys.stderr
                )
            return 128 - code if code < 0 else code
        if any(server.poll() is not None for server in servers):
            say("error: a parameter server has ended; start the command again", sys.stderr)
            return 1
        if None not in codes:
            return max(codes)
        time.sleep(0.05)


def _worker_words(arguments: argparse.Namespace, index: int, tiles: int) -> list[str]:
    """Return the command of a worker: the same, with its own ranks and folder."""
    told = words(arguments)
    if tiles > 1:
        told += ["-n", str(tiles)]
    if index:
        told += ["--output", str(arguments.folder / f"worker-{index}")]  # the last one counts
    return told


@contextmanager
def _process(
    command: Sequence[str], env: Mapping[str, str], listens: bool, silent: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and end it when the block ends."""
    process = subprocess.Popen(
        safe_path.command(*command),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if listens else subprocess.DEVNULL if silent else None,
        text=True,
        start_new_session=True,
        preexec_fn=end_child_with_us(),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate() if listens else process.send_signal(signal.SIGINT)
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise LaunchError("a parameter server did not start; its message is above")
    return line.split()[-1]
