"""Jobs in a Kubernetes cluster: create what manifests describe, scale it, follow its state and log, delete it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...console import say
from ...errors import LaunchError, MissingPackageError
from .manifests import Manifest

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PATIENCE = 10
"""Seconds for an answer, and between two looks at a job."""
_REPLICAS = "spec.mpiReplicaSpecs.Worker.replicas"
_PLURALS = {"MPIJob": "mpijobs", "TrainJob": "trainjobs", "ClusterTrainingRuntime": "clustertrainingruntimes"}
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
        found = [self._get(one) for one in manifests]
        for one, there in zip(manifests, found, strict=True):
            change = None if there is None else _difference(one, there)
            if change is not None and change[0] != _REPLICAS:
                raise LaunchError(
                    f"{_title(one)} is there already, and its {change[0]} is {change[1]}; --delete it first, or give"
                    " another --name (of a job under way, --nodes alone can change, within --elastic)"
                )
        for one, there in zip(manifests, found, strict=True):
            if there is None:
                self._call(one, "POST", one)
                say(f"{_title(one)}: created")
            elif _difference(one, there):
                replicas = one["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
                self._call(one, "PATCH", {"spec": {"mpiReplicaSpecs": {"Worker": {"replicas": replicas}}}})
                say(f"{_title(one)}: {replicas} workers")

    def delete(self, manifests: Sequence[Manifest]) -> None:
        """Delete those objects that are there, the job first."""
        for one in reversed(manifests):
            there = self._call(one, "DELETE", {"propagationPolicy": "Background"}) is not None
            say(f"{_title(one)}: {'deleted' if there else 'is not there'}")

    def follow(self, job: Manifest) -> int:
        """Print a job's conditions and its launcher's log until it ends; return 0 if it has succeeded, else 1."""
        told: set[str] = set()
        logged: set[str] = set()
        while True:
            for there in self._watch(job):
                if there is None:
                    say(f"{_title(job)}: deleted")
                    return 1
                conditions = there.get("status", {}).get("conditions", [])
                for condition in (one for one in conditions if one["status"] == "True" and one["type"] not in told):
                    told.add(condition["type"])
                    say(f"{_title(job)}: {condition['type']} ({condition.get('message') or condition['reason']})")
                self._print_logs(job, logged)
                ends = [_ENDS[one["type"]] for one in conditions if one["status"] == "True" and one["type"] in _ENDS]
                if ends:
                    return max(ends)

    def _connect(self) -> tuple[Any, str]:
        config = self._kubernetes.config
        try:
            _, context = config.list_kube_config_contexts()
            return config.new_client_from_config(), context["context"].get("namespace", "default")
        except config.ConfigException:
            if not _NAMESPACE.exists():
                raise
            config.load_incluster_config()
            return self._kubernetes.client.ApiClient(), _NAMESPACE.read_text().strip()

    def _path(self, manifest: Manifest) -> str:
        version, kind = manifest["apiVersion"], manifest["kind"]
        within = "" if kind == "ClusterTrainingRuntime" else f"/namespaces/{self.namespace}"
        return f"/api/v1{within}/configmaps" if kind == "ConfigMap" else f"/apis/{version}{within}/{_PLURALS[kind]}"

    def _get(self, manifest: Manifest) -> Manifest | None:
        return self._call(manifest, "GET")

    def _call(self, manifest: Manifest, method: str, body: Manifest | None = None) -> Manifest | None:
        """Return the object of the answer; None if it is not there."""
        path = self._path(manifest) + ("" if method == "POST" else f"/{manifest['metadata']['name']}")
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with self._told(manifest):
            try:
                answer, *_ = self._api.call_api(
                    path, method, header_params={"Content-Type": kind, "Accept": "application/json"}, body=body,
                    auth_settings=["BearerToken"], response_type="object", _request_timeout=_PATIENCE,
                )  # fmt: skip
            except self._kubernetes.client.ApiException as error:
                if error.status != 404 or method in ("POST", "PATCH"):
                    raise
                return None
        return dict(answer)

    def _watch(self, job: Manifest) -> Iterator[Manifest | None]:
        """Yield what is known of a job, and each change, for some seconds; None once it is gone."""
        there = self._get(job)
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
        return f"not allowed ({said}); ask for the right, or use another context"
    return f"the cluster refuses it ({said})"


def _difference(ours: Any, theirs: Any, path: str = "") -> tuple[str, Any] | None:
    """Return the first place where an object is not as described, with what it has; defaults may have been added."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        parts = [(ours[key], theirs.get(key), f"{path}.{key}".lstrip(".")) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        parts = [(one, other, f"{path}[{at}]") for at, (one, other) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return None if ours == theirs else (path, theirs)
    found = (_difference(*part) for part in parts)
    return next(filter(None, found), None)
