"""Jobs in a Kubernetes cluster: create what manifests describe, scale it, follow its state and log, delete it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import LaunchError, MissingPackageError
from ...terminal.console import say
from .manifests import Manifest

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PATIENCE = 10
"""Seconds for an answer, and between two looks at a job."""
_REPLICAS = "spec.mpiReplicaSpecs.Worker.replicas"
_PLURALS = {"MPIJob": "mpijobs", "TrainJob": "trainjobs", "ClusterTrainingRuntime": "clustertrainingruntimes"}
_CLUSTER_WIDE = {"ClusterTrainingRuntime"}
_OPERATORS = {"MPIJob": "Kubeflow's MPI operator (0.8 or newer)"}
_TRAINER = "Kubeflow Trainer (2.3 or newer)"
_LAUNCHERS = {
    "MPIJob": "training.kubeflow.org/job-name={},training.kubeflow.org/job-role=launcher",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name={},jobset.sigs.k8s.io/replicatedjob-name=launcher",
}
_ENDS = {"Succeeded": 0, "Complete": 0, "Failed": 1}
"""Exit codes by the conditions with which jobs end."""


class Cluster:
    """A connection to the cluster and namespace of the current context, or of the pod that this process runs in.

    Raises
    ------
    MissingPackageError
        The extra `kubernetes` is not installed.
    LaunchError
        No cluster is configured. Methods raise it where the cluster cannot be reached, or refuses.
    """

    def __init__(self) -> None:
        try:
            import kubernetes.client
            import kubernetes.config
            import kubernetes.watch
        except ImportError as error:
            raise MissingPackageError(
                "--apply and --delete need the Kubernetes client; pip install 'neondist[kubernetes]', or write the"
                " manifest with --output and call kubectl apply -f"
            ) from error
        self._kubernetes: Any = kubernetes
        try:
            self._api, self.namespace = self._connect()
        except (kubernetes.config.ConfigException, OSError) as error:
            raise LaunchError(f"no Kubernetes cluster is configured ({_line(error)}); set KUBECONFIG") from error

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Create objects, in their order; change the number of workers of an MPIJob that is there.

        Raises
        ------
        LaunchError
            An object of the same name has other contents. Nothing has been changed.
        """
        found = [self._call("get", one) for one in manifests]
        for one, there in zip(manifests, found, strict=True):
            for place, has in () if there is None else _differences(one, there):
                if place != _REPLICAS:
                    raise LaunchError(
                        f"{_title(one)} already exists, and its {place} is {has}; --delete it first, or give"
                        " another --name (only --nodes can change for a running job, within --elastic)"
                    )
        for one, there in zip(manifests, found, strict=True):
            if there is None:
                self._call("create", one, one)
                say(f"{_title(one)}: created")
            elif any(_differences(one, there)):
                replicas = one["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
                self._call("patch", one, {"spec": {"mpiReplicaSpecs": {"Worker": {"replicas": replicas}}}})
                say(f"{_title(one)}: {replicas} workers")

    def delete(self, manifests: Sequence[Manifest]) -> None:
        """Delete those objects that are there, the job first."""
        for one in reversed(manifests):
            say(f"{_title(one)}: {'does not exist' if self._call('delete', one) is None else 'deleted'}")

    def follow(self, job: Manifest) -> int:
        """Print a job's conditions and its launcher's log until it ends; return 0 if it has succeeded, else 1."""
        told: set[str] = set()
        logged: set[str] = set()
        while True:
            for there in self._watch(job):
                if there is None:
                    say(f"{_title(job)}: deleted")
                    return 1
                conditions = [one for one in there.get("status", {}).get("conditions", []) if one["status"] == "True"]
                for condition in (one for one in conditions if one["type"] not in told):
                    if condition["type"] in _ENDS:
                        self._print_logs(job, logged)
                    told.add(condition["type"])
                    say(f"{_title(job)}: {condition['type']} ({condition.get('message') or condition['reason']})")
                ends = [_ENDS[one["type"]] for one in conditions if one["type"] in _ENDS]
                if ends:
                    return max(ends)
                self._print_logs(job, logged)

    def _connect(self) -> tuple[Any, str]:
        client, config = self._kubernetes.client, self._kubernetes.config
        settings = client.Configuration()
        settings.retries = 0  # each would be a warning on stderr
        file = os.environ.get("KUBECONFIG", "~/.kube/config")
        try:
            _, context = config.list_kube_config_contexts(file)
            config.load_kube_config(file, client_configuration=settings)
            return client.ApiClient(settings), context["context"].get("namespace", "default")
        except config.ConfigException:
            if not _NAMESPACE.exists():
                raise
            config.load_incluster_config(client_configuration=settings)
            return client.ApiClient(settings), _NAMESPACE.read_text().strip()

    def _call(self, verb: str, manifest: Manifest, body: Manifest | None = None) -> Manifest | None:
        """Get, create, patch or delete an object; return it, or None if it is not there."""
        words: dict[str, Any] = {}
        kind = manifest["kind"]
        if kind == "ConfigMap":
            api = self._kubernetes.client.CoreV1Api(self._api)
            method = f"{'read' if verb == 'get' else verb}_namespaced_config_map"
        else:
            api = self._kubernetes.client.CustomObjectsApi(self._api)
            method = f"{verb}_{'cluster' if kind in _CLUSTER_WIDE else 'namespaced'}_custom_object"
            group, version = manifest["apiVersion"].split("/")
            words = {"group": group, "version": version, "plural": _PLURALS[kind]}
        words |= {} if kind in _CLUSTER_WIDE else {"namespace": self.namespace}
        words |= {} if verb == "create" else {"name": manifest["metadata"]["name"]}
        words |= {} if body is None else {"body": body}
        with self._told(manifest):
            try:
                answer = getattr(api, method)(**words, _request_timeout=_PATIENCE)
            except self._kubernetes.client.ApiException as error:
                if error.status != 404 or verb not in ("get", "delete"):
                    raise
                return None
        return dict(self._api.sanitize_for_serialization(answer) or {})

    def _watch(self, job: Manifest) -> Iterator[Manifest | None]:
        """Yield what is known of a job, and each change, for some seconds; None once it is gone."""
        there = self._call("get", job)
        yield there
        if there is None:
            return
        import urllib3

        api = self._kubernetes.client.CustomObjectsApi(self._api)
        group, version = job["apiVersion"].split("/")
        name, watch = job["metadata"]["name"], self._kubernetes.watch.Watch()
        with self._told(job):
            try:
                for event in watch.stream(
                    api.list_namespaced_custom_object, group, version, self.namespace, _PLURALS[job["kind"]],
                    field_selector=f"metadata.name={name}", timeout_seconds=_PATIENCE,
                    _request_timeout=(_PATIENCE, 2 * _PATIENCE),
                ):  # fmt: skip
                    if event["object"]["metadata"]["name"] == name:
                        yield None if event["type"] == "DELETED" else event["object"]
            except urllib3.exceptions.ReadTimeoutError:
                return  # nothing has happened

    def _print_logs(self, job: Manifest, logged: set[str]) -> None:
        """Print the logs of launchers that have started, to their ends, each once."""
        api = self._kubernetes.client.CoreV1Api(self._api)
        selector = _LAUNCHERS[job["kind"]].format(job["metadata"]["name"])
        with self._told(job):
            pods = api.list_namespaced_pod(self.namespace, label_selector=selector, _request_timeout=_PATIENCE).items
            for pod in pods:
                if pod.status.phase in (None, "Pending") or pod.metadata.name in logged:
                    continue
                logged.add(pod.metadata.name)
                answer = api.read_namespaced_pod_log(
                    pod.metadata.name, self.namespace, follow=True, _preload_content=False
                )
                for line in answer:
                    say(line.decode(errors="replace").rstrip("\r\n"))

    @contextmanager
    def _told(self, manifest: Manifest) -> Iterator[None]:
        """Turn errors of the client into a message with the remedy."""
        import urllib3

        try:
            yield
        except self._kubernetes.client.ApiException as error:
            raise LaunchError(f"{_title(manifest)}: {_refusal(error, manifest['kind'])}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise LaunchError(
                f"the cluster at {self._api.configuration.host} cannot be reached ({_line(error)}); does kubectl"
                " cluster-info reach it?"
            ) from error


def _title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _line(error: BaseException) -> str:
    return " ".join(str(getattr(error, "reason", None) or error).split())[:300]


def _refusal(error: Any, kind: str) -> str:
    """Return what an answer of the cluster's API means."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason
    if error.status == 404:
        return f"the cluster does not know {kind}s; install {_OPERATORS.get(kind, _TRAINER)} there ({said})"
    if error.status in (401, 403):
        return f"not allowed ({said}); request the permission, or use another context"
    return f"the cluster rejected it ({said})"


def _differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield places where an object is not as described, with what it has; defaults may have been added."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in ours:
            yield from _differences(ours[key], theirs.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{path}[{at}]")
    elif ours != theirs:
        yield path, theirs
