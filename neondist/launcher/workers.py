"""Workers and servers of an asynchronous run: each replica is a job of its own, beside parameter servers."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .. import safe_path
from ..console import say
from ..errors import LaunchError, ServiceUnavailableError
from ..io.output import clear
from ..job import detect
from ..signals import INTERRUPTED, STOPPED
from ..train.validate import grid_shape_of
from .launch import words
from .parent_watch import end_child_with_us

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..services.master import Master
    from ..services.training import WorkerPlace

SERVERS = "NEONDIST_SERVERS"
"""Set in the environment of workers."""
MOST_SERVERS = 4
MOST_RESTARTS = 5
"""Of a worker that is killed."""
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

    There is a worker for each replica, a process or an mpirun of its tiles, and as many servers, at most four. Their
    tasks come from a master in this process. Worker 0 writes the run's folder, the others folders in it.

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
    from ..services.master import Master
    from ..services.training import WorkerPlace
    from ..services.wire import TOKEN, ServiceHost, create_token

    token = create_token()
    env = {**os.environ, TOKEN: token}
    fixed = getattr(strategy, "servers", None)
    master = Master(getattr(arguments, "num_minibatches_per_task", 1))
    if arguments.overwrite:  # at once, so that a worker that is started again finds files of this run alone
        for folder in (arguments.folder, *arguments.folder.glob("worker-*")):
            clear(folder)
    with ExitStack() as stack:
        count = arguments.num_ps or fixed or min(shape.replicas, MOST_SERVERS)
        servers = [stack.enter_context(_process(["neondist", "serve", "ps"], env, True)) for _ in range(count)]
        addresses = tuple(_address(server) for server in servers)
        host = stack.enter_context(ServiceHost([master], "127.0.0.1:0", token))

        def start(index: int, again: bool) -> subprocess.Popen[str]:
            place = WorkerPlace(index, addresses, host.address, token)
            command = ["neondist", *_worker_words(arguments, index, shape.tiles, again)]
            return stack.enter_context(_process(command, env | place.environment, False, silent=index > 0))

        job = _Job(start, shape.replicas, servers)
        arguments.signals.join(job.forward)
        code = job.watch(lambda index: _lost(master, addresses, token, index))
        if code == 0:
            say(f"applied: {_check(master, addresses, token)}; {job.restarted} workers started again")
        return code


class _Job:
    """The processes of a job.

    Parameters
    ----------
    start : callable
        Starts a worker by its number, for the first time or again.
    workers : int
    servers : sequence of Popen
    """

    def __init__(
        self, start: Callable[[int, bool], subprocess.Popen[str]], workers: int, servers: Sequence[Any]
    ) -> None:
        self._start, self._servers = start, servers
        self._workers = [start(index, False) for index in range(workers)]
        self._losses = [0] * workers

    @property
    def restarted(self) -> int:
        """How often workers were started again."""
        return sum(self._losses)

    def forward(self, name: str) -> None:
        """Pass a signal on to all workers."""
        for process in self._workers:
            if process.poll() is None:
                process.send_signal(getattr(signal, name))

    def watch(self, lost: Callable[[int], None]) -> int:
        """Wait for all workers, start those again that were killed, and return the exit code.

        Parameters
        ----------
        lost : callable
            Called with the number of a worker that has ended, before it is started again.
        """
        ended: set[int] = set()
        while True:
            if any(server.poll() is not None for server in self._servers):
                say("error: a parameter server has ended; start the command again", sys.stderr)
                for process in self._workers:
                    process.kill()  # else each would tell that it has no server
                return 1
            codes = [process.poll() for process in self._workers]
            for at, code in enumerate(codes):
                if code is None or at in ended:
                    continue
                lost(at)
                if code in (0, STOPPED):
                    ended.add(at)
                elif not _was_killed(code):
                    return code
                elif self._losses[at] == MOST_RESTARTS:
                    say(f"error: worker {at} was killed {MOST_RESTARTS + 1} times; start the command again", sys.stderr)
                    return 128 - code if code < 0 else code
                else:
                    self._losses[at] += 1
                    say(f"worker {at} was killed; started again", sys.stderr)
                    self._workers[at] = self._start(at, True)
            if len(ended) == len(codes):
                return max(code or 0 for code in codes)
            time.sleep(0.05)


def _was_killed(code: int) -> bool:
    """Whether an exit code is that of a process, or of a job, that was killed."""
    return code < 0 or (code > 128 and code != INTERRUPTED)


def _lost(master: Master, servers: Sequence[str], token: str, index: int) -> None:
    """Give back the task of a worker, and let servers wait for it no longer."""
    from ..services.training import worker_name
    from ..services.wire import ServiceClient

    master.lost(worker_name(index))
    for address in servers:
        with ServiceClient(address, "PServer", token, patience=1.0) as client, suppress(ServiceUnavailableError):
            client.call("leave", {"worker": worker_name(index)}, timeout=10.0)


def _check(master: Master, servers: Sequence[str], token: str) -> str:
    """Return what servers have applied in words; ServiceError unless each record was applied once."""
    from ..services.progress import Credits
    from ..services.wire import ServiceClient

    found = []
    for address in servers:
        with ServiceClient(address, "PServer", token) as client:
            samples = client.call("status").number("samples")
            found.append(master.check(samples, Credits.parse(client.call("credits").mapping("credits"))))
    return found[0]


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
