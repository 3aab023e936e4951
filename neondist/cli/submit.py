"""`neondist submit`: an experiment as a job for Slurm, or for Kubernetes with Kubeflow's operators."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from ..cluster.submit import Submission, job_name
from ..cluster.submit.manifests import Manifest
from ..errors import ConfigError, DataError
from ..io.files import write_text
from ..terminal.console import emit, say
from ..version import __version__
from . import options
from .experiment import load_from_arguments
from .run import parse_rank_bounds

DEFAULT_IMAGE = f"neondist:{__version__}"


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    cmd = commands.add_parser("submit", help="write or submit a job for Slurm or Kubernetes", allow_abbrev=False)
    kinds = cmd.add_mutually_exclusive_group(required=True)
    kinds.add_argument(
        "--slurm", dest="kind", action="store_const", const="slurm",
        help="batch script that requeues itself until the run is complete",
    )  # fmt: skip
    kinds.add_argument(
        "--mpijob", dest="kind", action="store_const", const="mpijob",
        help="elastic MPIJob for Kubeflow's MPI operator",
    )  # fmt: skip
    kinds.add_argument(
        "--trainjob", dest="kind", action="store_const", const="trainjob",
        help="TrainJob for Kubeflow Trainer, with its runtime",
    )  # fmt: skip
    options.add_experiment_options(cmd, "total number of ranks (default: one per node)")
    cmd.add_argument("--nodes", type=options.positive_int, metavar="N", help="number of machines or pods (default 1)")
    cmd.add_argument(
        "--elastic", type=parse_rank_bounds, metavar="MIN:MAX",
        help="numbers of ranks on which to continue after ranks are lost (--mpijob: default from one worker to all)",
    )  # fmt: skip
    cmd.add_argument("--name", metavar="NAME", help="name of the job (default: that of the file)")
    cmd.add_argument(
        "--image",
        metavar="IMAGE",
        help=f"container image, such as one built from the Dockerfile (default {DEFAULT_IMAGE})",
    )
    cmd.add_argument("--claim", metavar="NAME", help="PersistentVolumeClaim for the output folder of the run")
    cmd.add_argument(
        "--output", type=options.parse_as_path, metavar="FILE",
        help="write the script or manifest to this file (default: print it)",
    )  # fmt: skip
    cmd.add_argument(
        "--apply", action="store_true", help="submit the job; on Kubernetes, follow its state and log until it ends"
    )
    cmd.add_argument(
        "--delete", action="store_true", help="delete the job and the objects created with it (Kubernetes)"
    )
    cmd.set_defaults(command=submit)


def submit(arguments: argparse.Namespace) -> int:
    """Print or write the script or manifest, or submit it."""
    job = _create_submission(arguments)
    if arguments.kind == "slurm":
        return _submit_to_slurm(arguments, job)
    from ..cluster.submit import manifests

    if arguments.image is not None and not re.fullmatch(r"[^\s]+", arguments.image):
        raise ConfigError(f"--image '{arguments.image}': expected a container image, such as {DEFAULT_IMAGE}")
    if arguments.claim is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", arguments.claim):
        raise ConfigError(
            f"--claim '{arguments.claim}': expected the name of a PersistentVolumeClaim: lower-case letters, digits,"
            " '-' and '.'"
        )
    create_manifests = manifests.mpi_job_manifests if arguments.kind == "mpijob" else manifests.train_job_manifests
    objects = create_manifests(job, arguments.image or DEFAULT_IMAGE, arguments.claim)
    if not arguments.delete:
        _write_or_print(arguments, manifests.dump_yaml(objects))
        if arguments.claim is None:
            say("warning: the run's folder is lost with its pod; give --claim to keep it", sys.stderr)
    return _apply_or_delete(objects, arguments) if arguments.apply or arguments.delete else 0


def _create_submission(arguments: argparse.Namespace) -> Submission:
    if arguments.apply and arguments.delete:
        raise ConfigError("--apply creates the job and --delete deletes it; give one of them")
    nodes = arguments.nodes or 1
    if arguments.name is not None and arguments.name != job_name(arguments.name):
        raise ConfigError(
            f"--name {arguments.name}: invalid name; expected at most 40 lower-case letters, digits and '-',"
            f" beginning with a letter, such as {job_name(arguments.name)}"
        )
    experiment = load_from_arguments(arguments)
    job = Submission(
        arguments.name or job_name(arguments.file), arguments.file, arguments.ranks or nodes, nodes,
        tuple(arguments.settings), tuple(arguments.modules), arguments.elastic, experiment.server_strategy is not None,
    )  # fmt: skip
    try:
        experiment.validate(job.ranks)
    except DataError as error:
        if arguments.kind == "slurm" or error.subject is not experiment.dataset:
            raise
        problem = f"the data set cannot be opened on this machine ({error})"
        say(f"warning: {problem}; it will be checked in the container, when the job starts", sys.stderr)
    return job


def _submit_to_slurm(arguments: argparse.Namespace, job: Submission) -> int:
    from ..cluster.submit import slurm

    for name in ("image", "claim"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} applies to --mpijob and --trainjob; leave it out with --slurm")
    if arguments.delete:
        raise ConfigError("--delete applies to --mpijob and --trainjob; cancel a Slurm job with scancel")
    output = Path("runs", arguments.name or Path(job.experiment_file).stem)
    script = slurm.batch_script(job, sys.executable, str(Path.cwd()), str(output))
    _write_or_print(arguments, script)
    if arguments.apply:
        emit(slurm.submit_script(script))
    return 0


def _write_or_print(arguments: argparse.Namespace, text: str) -> None:
    """Write the text to --output; print it if there is no --output or --apply."""
    if arguments.output is not None:
        write_text(arguments.output, text)
        options.print_written([arguments.output], sys.stderr)
    elif not arguments.apply:
        sys.stdout.write(text)  # not escaped: files in a manifest may contain tabs


def _apply_or_delete(objects: list[Manifest], arguments: argparse.Namespace) -> int:
    """Delete the objects in Kubernetes, or create them and follow the job to its end."""
    from ..cluster.submit.kubernetes import KubernetesCluster

    cluster, job = KubernetesCluster(), objects[-1]
    if arguments.delete:
        cluster.delete(objects)
        return 0
    cluster.apply(objects)
    try:
        return cluster.follow_job(job)
    except KeyboardInterrupt:
        name = job["metadata"]["name"]
        say(f"{job['kind']} {name} is still running; use --delete in place of --apply to delete it", sys.stderr)
        raise
