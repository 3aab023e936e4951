"""Manifests for Kubeflow's MPI operator (MPIJob v2beta1) and Trainer (TrainJob and ClusterTrainingRuntime v1alpha1).

Both operators create the pods, an SSH key and a host file, and set the variables of Open MPI 4 (OMPI_MCA_orte_*),
which Open MPI 5 ignores; manifests therefore set its variables. The launcher's command is that of one container; the
workers run sshd (kubeflow/trainer #4030), and the launcher waits for it (#2751).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ...errors import ConfigError
from .submission import RESTARTS, Submission

HOST_FILE, DISCOVERY = "/etc/mpi/hostfile", "/etc/mpi/discover_hosts.sh"
"""Files of the operators; the second is a script that lists the running workers, one per line."""
PORT = 2222
_USER, _HOME = 1000, "/home/mpiuser"
_FOLDER, _RUNS = "/etc/neondist", "/runs"
_SSHD = ["/usr/sbin/sshd", "-De", "-f", f"{_HOME}/.sshd_config"]
"""The Dockerfile of this project writes the configuration file."""
_LARGEST = 1 << 20
"""Maximum size of a ConfigMap in bytes."""
_ENV = [
    {"name": "PRTE_MCA_prte_default_hostfile", "value": HOST_FILE},
    {"name": "PRTE_MCA_plm_ssh_args", "value": "-o ConnectionAttempts=10"},
]
Manifest = dict[str, Any]


def mpi_job(job: Submission, image: str, claim: str | None = None) -> list[Manifest]:
    """Return a ConfigMap and an MPIJob, which continues while workers join and leave.

    Parameters
    ----------
    job : Submission
    image : str
        Image built by the project's Dockerfile.
    claim : str, optional
        PersistentVolumeClaim for the run's folder, mounted by all pods.
    """
    files = _config_map(job)
    low, high = job.elastic or (job.ranks_per_node, job.ranks)
    ranks = ["-n", str(job.ranks)] if job.needs_servers else ["--elastic", f"{low}:{high}"]
    launcher = _pod("launcher", image, job, claim)
    launcher["containers"][0] |= {
        "command": [*_run(job, claim), "--hosts-from", DISCOVERY, *ranks],
        "env": _ENV,
    }
    worker = _pod("worker", image, job, claim)
    worker["containers"][0] |= _server(job)
    spec = {
        "slotsPerWorker": job.ranks_per_node,
        "sshAuthMountPath": f"{_HOME}/.ssh",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": RESTARTS},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": launcher}},
            "Worker": {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": {"spec": worker}},
        },
    }
    return [files, _object("kubeflow.org/v2beta1", "MPIJob", job.name, spec=spec)]


def train_job(job: Submission, image: str, claim: str | None = None) -> list[Manifest]:
    """Return a ConfigMap, a ClusterTrainingRuntime and a TrainJob; parameters as `mpi_job`.

    The launcher is one of the nodes. Only its job has the label by which Trainer replaces a command, so the others keep
    their sshd; both containers are called `node`, since Trainer mounts the SSH key only into those.

    Raises
    ------
    ConfigError
        The job is elastic, but Trainer has no list of running pods.
    """
    if job.elastic is not None:
        raise ConfigError("--elastic: Trainer's jobs have a fixed number of nodes; use --mpijob, or leave it out")
    files = _config_map(job)
    node = _pod("node", image, job, claim)
    node["containers"][0] |= _server(job)
    launcher = _pod("node", image, job, claim)
    launcher["containers"][0]["resources"] = _resources(job)
    runtime = {
        "mlPolicy": {
            "numNodes": job.nodes,
            "mpi": {
                "numProcPerNode": job.ranks_per_node,
                "mpiImplementation": "OpenMPI",
                "sshAuthMountPath": f"{_HOME}/.ssh",
                "runLauncherAsNode": True,
            },
        },
        "template": {
            "spec": {
                "network": {"publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
                "failurePolicy": {"maxRestarts": RESTARTS},
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
        "command": [*_run(job, claim), "-n", str(job.ranks), *hosts],
        "env": _ENV,
    }
    version, name = "trainer.kubeflow.org/v1alpha1", f"neondist-{job.name}"
    labels = {"trainer.kubeflow.org/framework": "mpi"}
    return [
        files,
        _object(version, "ClusterTrainingRuntime", name, labels=labels, spec=runtime),
        _object(version, "TrainJob", job.name, spec={"runtimeRef": {"name": name}, "trainer": trainer}),
    ]


def dump(manifests: Sequence[Manifest]) -> str:
    """Return the YAML text of manifests, one document each."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Dumper that writes repeated values in full, and multi-line text as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _object(version: str, kind: str, name: str, labels: dict[str, str] | None = None, **fields: Any) -> Manifest:
    metadata = {"name": name, **({"labels": labels} if labels else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _config_map(job: Submission) -> Manifest:
    """Return a ConfigMap with the files of the experiment, mounted by all pods."""
    texts = {}
    for path, key in _keys(job).items():
        try:
            texts[key] = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as text ({error}); it is part of the manifest") from error
    size = sum(len(text.encode()) for text in texts.values())
    if size > _LARGEST:
        raise ConfigError(
            f"{', '.join(_keys(job))}: {size >> 10} KiB, and a ConfigMap holds at most 1 MiB; store data elsewhere"
        )
    return _object("v1", "ConfigMap", f"{job.name}-experiment", data=texts)


def _keys(job: Submission) -> dict[str, str]:
    """Return the keys of files in the ConfigMap: their names, by which modules are imported."""
    keys = {path: "experiment.yaml" if path == job.file else Path(path).name for path in job.files}
    for path, key in keys.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", key) or list(keys.values()).count(key) > 1:
            raise ConfigError(
                f"{path}: the files of a job need unique names of letters, digits, '.', '_' and '-'; rename it"
            )
    return keys


def _run(job: Submission, claim: str | None) -> list[str]:
    keys = _keys(job)
    words = ["neondist", *job.run_words(lambda path: f"{_FOLDER}/{keys[path]}")]
    folder = f"{_RUNS}/{job.name}" if claim is not None else f"{_HOME}/runs/{job.name}"
    return [*words, "--output", folder, *job.restart_words(), "--resume", "auto"]


def _pod(container: str, image: str, job: Submission, claim: str | None) -> Manifest:
    """Return a pod with one container, run as the image's user, without a command."""
    volumes: list[Manifest] = [
        {"name": "experiment", "configMap": {"name": f"{job.name}-experiment"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # 64 MiB otherwise, for all messages between ranks
    ]
    mounts = [{"name": "experiment", "mountPath": _FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}]
    if claim is not None:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "runs", "mountPath": _RUNS})
    user = {"runAsUser": _USER, "runAsGroup": _USER}
    spec = {"name": container, "image": image, "securityContext": user, "volumeMounts": mounts}
    return {"securityContext": {"fsGroup": _USER}, "containers": [spec], "volumes": volumes}


def _server(job: Submission) -> Manifest:
    """Return the command of a worker, which is ready once its sshd responds."""
    probe = {"tcpSocket": {"port": PORT}, "periodSeconds": 2}
    return {"command": _SSHD, "readinessProbe": probe, "resources": _resources(job)}


def _resources(job: Submission) -> Manifest:
    return {"requests": {"cpu": job.ranks_per_node}}
