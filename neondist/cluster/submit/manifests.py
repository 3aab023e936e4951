"""Manifests for Kubeflow's MPI operator (MPIJob v2beta1) and Trainer (TrainJob and ClusterTrainingRuntime v1alpha1).

Both operators create the pods, an SSH key and a host file, and set the variables of Open MPI 4 (OMPI_MCA_orte_*),
which Open MPI 5 ignores; manifests therefore set those of Open MPI 5. The launcher's command is that of one container;
the workers run sshd (kubeflow/trainer #4030), and the launcher waits for it (#2751).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ...errors import ConfigError
from .submission import RANK_LOSS_RESTARTS, Submission

HOST_FILE, DISCOVERY_SCRIPT = "/etc/mpi/hostfile", "/etc/mpi/discover_hosts.sh"
"""Files of the operators; the second is a script that lists the running workers, one per line."""
SSH_PORT = 2222
_USER_ID, _HOME_DIR = 1000, "/home/mpiuser"
_EXPERIMENT_DIR, _RUNS_DIR = "/etc/neondist", "/runs"
_SSHD_COMMAND = ["/usr/sbin/sshd", "-De", "-f", f"{_HOME_DIR}/.sshd_config"]
"""The Dockerfile of this project writes the configuration file."""
_MAX_CONFIG_MAP_BYTES = 1 << 20
_LAUNCHER_ENV = [
    {"name": "PRTE_MCA_prte_default_hostfile", "value": HOST_FILE},
    {"name": "PRTE_MCA_plm_ssh_args", "value": "-o ConnectionAttempts=10"},
]
Manifest = dict[str, Any]


def mpi_job_manifests(job: Submission, image: str, volume_claim: str | None = None) -> list[Manifest]:
    """Return a ConfigMap and an MPIJob, which continues while workers join and leave.

    Parameters
    ----------
    job : Submission
    image : str
        Image built by the project's Dockerfile.
    volume_claim : str, optional
        PersistentVolumeClaim for the run's folder, mounted by all pods.
    """
    files = _config_map(job)
    low, high = job.rank_bounds or (job.ranks_per_node, job.ranks)
    ranks = ["-n", str(job.ranks)] if job.needs_servers else ["--elastic", f"{low}:{high}"]
    launcher = _pod_spec("launcher", image, job, volume_claim)
    launcher["containers"][0] |= {
        "command": [*_run_command(job, volume_claim), "--hosts-from", DISCOVERY_SCRIPT, *ranks],
        "env": _LAUNCHER_ENV,
    }
    worker = _pod_spec("worker", image, job, volume_claim)
    worker["containers"][0] |= _sshd_container_fields(job)
    spec = {
        "slotsPerWorker": job.ranks_per_node,
        "sshAuthMountPath": f"{_HOME_DIR}/.ssh",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": RANK_LOSS_RESTARTS},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": launcher}},
            "Worker": {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": {"spec": worker}},
        },
    }
    return [files, _create_manifest("kubeflow.org/v2beta1", "MPIJob", job.name, spec=spec)]


def train_job_manifests(job: Submission, image: str, volume_claim: str | None = None) -> list[Manifest]:
    """Return a ConfigMap, a ClusterTrainingRuntime and a TrainJob; parameters as for `mpi_job_manifests`.

    The launcher is one of the nodes. Only its job has the label by which Trainer replaces a command, so the others keep
    their sshd; both containers are called `node`, since Trainer mounts the SSH key only into those.

    Raises
    ------
    ConfigError
        The job is elastic, but Trainer has no list of running pods.
    """
    if job.rank_bounds is not None:
        raise ConfigError("--elastic: Trainer's jobs have a fixed number of nodes; use --mpijob, or omit --elastic")
    files = _config_map(job)
    node = _pod_spec("node", image, job, volume_claim)
    node["containers"][0] |= _sshd_container_fields(job)
    launcher = _pod_spec("node", image, job, volume_claim)
    launcher["containers"][0]["resources"] = _cpu_requests(job)
    runtime = {
        "mlPolicy": {
            "numNodes": job.nodes,
            "mpi": {
                "numProcPerNode": job.ranks_per_node,
                "mpiImplementation": "OpenMPI",
                "sshAuthMountPath": f"{_HOME_DIR}/.ssh",
                "runLauncherAsNode": True,
            },
        },
        "template": {
            "spec": {
                "network": {"publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
                "failurePolicy": {"maxRestarts": RANK_LOSS_RESTARTS},
                "replicatedJobs": [
                    {"name": "node", "template": {"spec": {"template": {"spec": node}}}},
                    {
                        "name": "launcher",
                        "dependsOn": [{"name": "node", "status": "Ready"}],
                        "template": {
                            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                            "spec": {"template": {"spec": launcher}},
                        },
                    },
                ],
            }
        },
    }
    hosts = ["--hosts-from", HOST_FILE] if job.needs_servers else []
    trainer = {
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
        "image": image,
        "command": [*_run_command(job, volume_claim), "-n", str(job.ranks), *hosts],
        "env": _LAUNCHER_ENV,
    }
    version, name = "trainer.kubeflow.org/v1alpha1", f"neondist-{job.name}"
    labels = {"trainer.kubeflow.org/framework": "mpi"}
    return [
        files,
        _create_manifest(version, "ClusterTrainingRuntime", name, labels=labels, spec=runtime),
        _create_manifest(version, "TrainJob", job.name, spec={"runtimeRef": {"name": name}, "trainer": trainer}),
    ]


def dump_yaml(manifests: Sequence[Manifest]) -> str:
    """Return the YAML text of manifests, one document each."""
    return yaml.dump_all(manifests, Dumper=_ManifestDumper, sort_keys=False, width=120)


class _ManifestDumper(yaml.SafeDumper):
    """Dumper that writes repeated values in full, and multi-line text as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_ManifestDumper.add_representer(str, _ManifestDumper.represent_str)


def _create_manifest(
    version: str, kind: str, name: str, labels: dict[str, str] | None = None, **fields: Any
) -> Manifest:
    metadata = {"name": name, **({"labels": labels} if labels else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _config_map(job: Submission) -> Manifest:
    """Return a ConfigMap with the files of the experiment, mounted by all pods."""
    texts = {}
    for path, key in _config_map_keys(job).items():
        try:
            texts[key] = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); the manifest needs it as UTF-8 text") from error
    size = sum(len(text.encode()) for text in texts.values())
    if size > _MAX_CONFIG_MAP_BYTES:
        raise ConfigError(
            f"{', '.join(_config_map_keys(job))}: {size >> 10} KiB, and a ConfigMap holds at most 1 MiB;"
            " store data elsewhere"
        )
    return _create_manifest("v1", "ConfigMap", f"{job.name}-experiment", data=texts)


def _config_map_keys(job: Submission) -> dict[str, str]:
    """Return the keys of files in the ConfigMap: their names, by which modules are imported."""
    keys = {path: "experiment.yaml" if path == job.experiment_file else Path(path).name for path in job.files}
    for path, key in keys.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", key) or list(keys.values()).count(key) > 1:
            raise ConfigError(
                f"{path}: the files of a job need unique names of letters, digits, '.', '_' and '-'; rename it"
            )
    return keys


def _run_command(job: Submission, volume_claim: str | None) -> list[str]:
    keys = _config_map_keys(job)
    words = ["neondist", *job.run_arguments(lambda path: f"{_EXPERIMENT_DIR}/{keys[path]}")]
    folder = f"{_RUNS_DIR}/{job.name}" if volume_claim is not None else f"{_HOME_DIR}/runs/{job.name}"
    words += ["--output", folder, *job.restart_options(), "--resume", "auto"]
    return [word.replace("$", "$$") for word in words]  # Kubernetes expands $(NAME) and $$ in commands


def _pod_spec(container: str, image: str, job: Submission, volume_claim: str | None) -> Manifest:
    """Return a pod with one container, run as the image's user, without a command."""
    volumes: list[Manifest] = [
        {"name": "experiment", "configMap": {"name": f"{job.name}-experiment"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # 64 MiB otherwise, for all messages between ranks
    ]
    mounts = [{"name": "experiment", "mountPath": _EXPERIMENT_DIR}, {"name": "shm", "mountPath": "/dev/shm"}]
    if volume_claim is not None:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": volume_claim}})
        mounts.append({"name": "runs", "mountPath": _RUNS_DIR})
    user = {"runAsUser": _USER_ID, "runAsGroup": _USER_ID}
    spec = {"name": container, "image": image, "securityContext": user, "volumeMounts": mounts}
    return {"securityContext": {"fsGroup": _USER_ID}, "containers": [spec], "volumes": volumes}


def _sshd_container_fields(job: Submission) -> Manifest:
    """Return the fields of a worker's container, which runs sshd and is ready once sshd responds."""
    probe = {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2}
    return {"command": _SSHD_COMMAND, "readinessProbe": probe, "resources": _cpu_requests(job)}


def _cpu_requests(job: Submission) -> Manifest:
    return {"requests": {"cpu": job.ranks_per_node}}
