"""Workers, parameter servers and ranks requested by the options of `neondist train`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..cluster import ResourceSpec
from ..cluster.hosts import HostSource
from ..errors import ConfigError
from ..launcher.members import DEFAULT_RESTARTS
from ..launcher.scaling import reject_unreachable_maximum
from ..launcher.slots import WorkerBounds
from ..launcher.workers import read_worker_spec
from ..strategies import PSLoadBalancing
from ..terminal.console import counted

if TYPE_CHECKING:
    from ..services.state import SyncPolicy


def resolve_worker_options(arguments: argparse.Namespace) -> None:
    """Validate the options, and set the ranks, strategy, synchronisation policy and folder of the run."""
    rows, cols = arguments.tiles
    strategy = arguments.distribution_strategy
    if not isinstance(arguments.num_workers, int):
        arguments.bounds = arguments.num_workers
        arguments.num_workers = arguments.bounds[1]
    ranks = arguments.num_workers * rows * cols
    if strategy == "ParameterServerStrategy":
        arguments.strategy = PSLoadBalancing(sync=not arguments.use_async)
        arguments.sync_policy = _create_server_sync_policy(arguments)
    else:
        option_values = vars(arguments) | {"grads_to_wait": (arguments.grads_to_wait or 1) > 1}
        for name in ("num_ps", "use_async", "grads_to_wait", "sync_version_tolerance", "lr_staleness_modulation"):
            if option_values[name]:
                raise ConfigError(f"--{name.replace('_', '-')} applies to ParameterServerStrategy; leave it out")
    if strategy == "Local" and ranks > 1:
        raise ConfigError("--distribution-strategy Local has one worker and one tile; use AllreduceStrategy")
    if arguments.sync_policy is not None:
        _resolve_slots(arguments)
    elif strategy != "Local":
        _set_generation_options(arguments)
    elif arguments.slots_from is not None or arguments.slots_wait is not None:
        raise ConfigError("--hosts-from and --wait apply to several workers; use AllreduceStrategy, or leave them out")
    if arguments.restarts is not None:
        if strategy == "Local" or arguments.sync_policy is not None:
            raise ConfigError(
                "--restarts applies to AllreduceStrategy; leave it out: killed workers and servers are always"
                " restarted, and a Local run continues with --resume"
            )
        arguments.snapshot = 0
    if arguments.evaluation_steps and arguments.validation_data is None:
        raise ConfigError("--evaluation-steps needs --validation-data; give it as well")
    worker_spec = read_worker_spec(os.environ)
    if worker_spec is not None:
        ranks //= arguments.num_workers
    starts_job = arguments.sync_policy is not None and worker_spec is None
    starts_job = starts_job or arguments.restarts is not None or arguments.hosts_from is not None
    arguments.ranks = ranks if (ranks > 1 or starts_job) and arguments.elastic is None else None
    if arguments.checkpoint_dir is not None and (worker_spec is None or worker_spec.index == 0):
        arguments.folder = Path(arguments.checkpoint_dir)


def _resolve_slots(arguments: argparse.Namespace) -> None:
    """Resolve the source of the slots of workers with servers."""
    if arguments.bounds is None:
        for name, value in (("--hosts-from", arguments.slots_from), ("--wait", arguments.slots_wait)):
            if value is not None:
                raise ConfigError(
                    f"{name} applies to a varying number of workers with servers; give --num-workers MIN:MAX"
                )
    elif read_worker_spec(os.environ) is None:
        if arguments.slots_from is not None:
            arguments.slots_from = source = HostSource(arguments.slots_from)
            if source.is_resource_file and any(node.ssh_config for node in ResourceSpec(source.path).nodes):
                raise ConfigError(
                    f"--hosts-from {source.path}: its SSH settings apply to neondist launch and run only; give a"
                    " list of HOST:SLOTS, with these settings in ~/.ssh/config"
                )
        (min_workers, max_workers), (rows, cols) = arguments.bounds, arguments.tiles
        reject_unreachable_maximum(WorkerBounds(min_workers, max_workers, rows * cols), arguments.slots_from)


def _set_generation_options(arguments: argparse.Namespace) -> None:
    """Set the options of `neondist run` for the hosts and the varying number of ranks of an allreduce."""
    arguments.hosts_from, arguments.wait = arguments.slots_from, arguments.slots_wait
    arguments.slots_from = arguments.slots_wait = None
    if arguments.bounds is not None:
        tiles = arguments.tiles[0] * arguments.tiles[1]
        arguments.elastic = arguments.bounds[0] * tiles, arguments.bounds[1] * tiles
        arguments.restarts = arguments.restarts or DEFAULT_RESTARTS


def _create_server_sync_policy(arguments: argparse.Namespace) -> SyncPolicy | None:
    """Return the synchronisation policy of the servers; None if the workers own the parameters instead."""
    workers, tolerance = arguments.num_workers, arguments.sync_version_tolerance
    is_elastic, modulate = arguments.bounds is not None, arguments.lr_staleness_modulation
    grads_to_wait = arguments.grads_to_wait or (workers if is_elastic and not arguments.use_async else 1)
    for name, is_set in (("--grads-to-wait", grads_to_wait > 1), ("--sync-version-tolerance", tolerance)):
        if is_set and arguments.use_async:
            raise ConfigError(f"{name} applies to synchronous updates; leave it out, or leave out --use-async")
    if modulate and not arguments.use_async:
        raise ConfigError(
            "--lr-staleness-modulation applies to asynchronous updates; add --use-async, or leave out"
            " --lr-staleness-modulation"
        )
    if grads_to_wait > workers:
        raise ConfigError(
            f"--grads-to-wait {grads_to_wait}: the job has only {counted(workers, 'worker')}; give at most {workers}"
        )
    if not (arguments.use_async or arguments.num_ps or tolerance or is_elastic or grads_to_wait > 1):
        return None
    from ..services.state import SyncPolicy

    return SyncPolicy(not arguments.use_async, grads_to_wait, tolerance, None, modulate)
