"""Jobs in a Kubernetes cluster: create, scale, follow and delete the objects of manifests."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from ...errors import LaunchError, MissingPackageError
from ...terminal.console import counted, say
from .manifests import Manifest

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_REQUEST_TIMEOUT = 10
"""Seconds for a response, and between checks of a job."""
_MAX_FAILURES = 30
"""Number of consecutive failed requests that are retried while a job is followed."""
_WORKER_COUNT_FIELD = "spec.mpiReplicaSpecs.Worker.replicas"
_PLURAL_BY_KIND = {"MPIJob": "mpijobs", "TrainJob": "trainjobs", "ClusterTrainingRuntime": "clustertrainingruntimes"}
_CLUSTER_WIDE_KINDS = {"ClusterTrainingRuntime"}
_OPERATOR_BY_KIND = {"MPIJob": "Kubeflow's MPI operator (0.8 or newer)"}
_DEFAULT_OPERATOR = "Kubeflow Trainer (2.3 or newer)"
_LAUNCHER_SELECTORS = {
    "MPIJob": "training.kubeflow.org/job-name={},training.kubeflow.org/job-role=launcher",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name={},jobset.sigs.k8s.io/replicatedjob-name=launcher",
}
_EXIT_CODE_BY_CONDITION = {"Succeeded": 0, "Complete": 0, "Failed": 1}


class UnavailableClusterError(LaunchError):
    """The cluster is unreachable or overloaded, possibly for a short time."""


class KubernetesCluster:
    """Connection to the cluster and namespace of the current context, or of the pod of this process.

    Raises
    ------
    MissingPackageError
        The extra `kubernetes` is not installed.
    LaunchError
        No cluster is configured. Methods raise it if the cluster is unreachable or rejects a request.
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
            raise LaunchError(f"no Kubernetes cluster is configured ({_join_lines(error)}); set KUBECONFIG") from error

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Create objects in order; change the number of workers of an existing MPIJob.

        Raises
        ------
        LaunchError
            An existing object differs in more than the number of workers; nothing is changed.
        """
        existing = [self._call_api("get", manifest) for manifest in manifests]
        for manifest, current in zip(manifests, existing, strict=True):
            for field, value in () if current is None else _find_manifest_differences(manifest, current):
                if field != _WORKER_COUNT_FIELD:
                    raise LaunchError(
                        f"{_manifest_title(manifest)} already exists with another {field} ({value}); delete it first"
                        " with --delete, or give another --name (only --nodes can change for a running job, within"
                        " --elastic)"
                    )
        for manifest, current in zip(manifests, existing, strict=True):
            if current is None:
                self._call_api("create", manifest, manifest)
                say(f"{_manifest_title(manifest)}: created")
            elif any(_find_manifest_differences(manifest, current)):
                replicas = manifest["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
                self._call_api("patch", manifest, {"spec": {"mpiReplicaSpecs": {"Worker": {"replicas": replicas}}}})
                say(f"{_manifest_title(manifest)}: {counted(replicas, 'worker')}")

    def delete(self, manifests: Sequence[Manifest]) -> None:
        """Delete the existing objects, the job first."""
        for manifest in reversed(manifests):
            is_missing = self._call_api("delete", manifest) is None
            say(f"{_manifest_title(manifest)}: {'does not exist' if is_missing else 'deleted'}")

    def follow_job(self, job: Manifest) -> int:
        """Print a job's conditions and its launcher's log until it ends; return 0 if it has succeeded, else 1."""
        reported: set[str] = set()
        line_counts: dict[str, float] = {}
        failures = 0
        while True:
            try:
                for current in self._watch_job(job):
                    code = self._report_state(job, current, reported, line_counts)
                    failures = 0
                    if code is not None:
                        return code
            except UnavailableClusterError as error:
                failures += 1
                if failures > _MAX_FAILURES:
                    raise LaunchError(f"{error}; the job continues: repeat the command to follow it") from error
                if failures == 1:
                    say(f"warning: {error}; retrying", sys.stderr)
                time.sleep(_REQUEST_TIMEOUT)

    def _report_state(
        self, job: Manifest, current: Manifest | None, reported: set[str], line_counts: dict[str, float]
    ) -> int | None:
        """Print the new conditions and logs of a job; return its exit code if it has ended."""
        if current is None:
            say(f"{_manifest_title(job)}: deleted")
            return 1
        conditions = [one for one in current.get("status", {}).get("conditions", []) if one["status"] == "True"]
        for condition in (one for one in conditions if one["type"] not in reported):
            if condition["type"] in _EXIT_CODE_BY_CONDITION:
                self._print_logs(job, line_counts)
            reported.add(condition["type"])
            cause = condition.get("message") or condition.get("reason") or "no reason given"
            say(f"{_manifest_title(job)}: {condition['type']} ({cause})")
        types = (condition["type"] for condition in conditions)
        codes = [_EXIT_CODE_BY_CONDITION[name] for name in types if name in _EXIT_CODE_BY_CONDITION]
        if codes:
            return max(codes)
        self._print_logs(job, line_counts)
        return None

    def _connect(self) -> tuple[Any, str]:
        client, config = self._kubernetes.client, self._kubernetes.config
        settings = client.Configuration()
        settings.retries = 0  # each retry would print a warning on stderr
        file = os.environ.get("KUBECONFIG", "~/.kube/config")
        try:
            _, context = config.list_kube_config_contexts(file)
            config.load_kube_config(file, client_configuration=settings)
            return client.ApiClient(settings), context["context"].get("namespace", "default")
        except config.ConfigException:
            if not _NAMESPACE_FILE.exists():
                raise
            config.load_incluster_config(client_configuration=settings)
            return client.ApiClient(settings), _NAMESPACE_FILE.read_text().strip()

    def _call_api(self, verb: str, manifest: Manifest, body: Manifest | None = None) -> Manifest | None:
        """Get, create, patch or delete an object; return it, or None if it does not exist."""
        arguments: dict[str, Any] = {}
        kind = manifest["kind"]
        if kind == "ConfigMap":
            api = self._kubernetes.client.CoreV1Api(self._api)
            method = f"{'read' if verb == 'get' else verb}_namespaced_config_map"
        else:
            api = self._kubernetes.client.CustomObjectsApi(self._api)
            method = f"{verb}_{'cluster' if kind in _CLUSTER_WIDE_KINDS else 'namespaced'}_custom_object"
            group, version = manifest["apiVersion"].split("/")
            arguments = {"group": group, "version": version, "plural": _PLURAL_BY_KIND[kind]}
        arguments |= {} if kind in _CLUSTER_WIDE_KINDS else {"namespace": self.namespace}
        arguments |= {} if verb == "create" else {"name": manifest["metadata"]["name"]}
        arguments |= {} if body is None else {"body": body}
        with self._convert_api_errors(manifest):
            try:
                response = getattr(api, method)(**arguments, _request_timeout=_REQUEST_TIMEOUT)
            except self._kubernetes.client.ApiException as error:
                if error.status != 404 or verb not in ("get", "delete"):
                    raise
                return None
        return dict(self._api.sanitize_for_serialization(response) or {})

    def _watch_job(self, job: Manifest) -> Iterator[Manifest | None]:
        """Yield the state of a job and its changes, for some seconds; None once it is deleted."""
        current = self._call_api("get", job)
        yield current
        if current is None:
            return
        import urllib3

        api = self._kubernetes.client.CustomObjectsApi(self._api)
        group, version = job["apiVersion"].split("/")
        name, watch = job["metadata"]["name"], self._kubernetes.watch.Watch()
        with self._convert_api_errors(job):
            try:
                for event in watch.stream(
                    api.list_namespaced_custom_object, group, version, self.namespace, _PLURAL_BY_KIND[job["kind"]],
                    field_selector=f"metadata.name={name}", timeout_seconds=_REQUEST_TIMEOUT,
                    _request_timeout=(_REQUEST_TIMEOUT, 2 * _REQUEST_TIMEOUT),
                ):  # fmt: skip
                    if event["object"]["metadata"]["name"] == name:
                        yield None if event["type"] == "DELETED" else event["object"]
            except urllib3.exceptions.ReadTimeoutError:
                return  # no change

    def _print_logs(self, job: Manifest, line_counts: dict[str, float]) -> None:
        """Print the rest of the logs of started launchers, from the line counts of earlier, interrupted calls."""
        api = self._kubernetes.client.CoreV1Api(self._api)
        selector = _LAUNCHER_SELECTORS[job["kind"]].format(job["metadata"]["name"])
        with self._convert_api_errors(job):
            pods = api.list_namespaced_pod(
                self.namespace, label_selector=selector, _request_timeout=_REQUEST_TIMEOUT
            ).items
            for pod in pods:
                name, phase = pod.metadata.name, pod.status.phase
                if phase in (None, "Pending") or line_counts.setdefault(name, 0) == inf:
                    continue
                try:
                    response = api.read_namespaced_pod_log(name, self.namespace, follow=True, _preload_content=False)
                except self._kubernetes.client.ApiException as error:
                    if error.status not in (400, 404):
                        raise
                    continue  # the container has not started, or the pod was deleted
                for count, line in enumerate(response, start=1):
                    if count > line_counts[name]:
                        line_counts[name] = count
                        say(line.decode(errors="replace").rstrip("\r\n"))
                if phase in ("Succeeded", "Failed"):
                    line_counts[name] = inf

    @contextmanager
    def _convert_api_errors(self, manifest: Manifest) -> Iterator[None]:
        """Translate errors of the client into LaunchError with a remedy."""
        import urllib3

        try:
            yield
        except self._kubernetes.client.ApiException as error:
            is_unavailable = not error.status or error.status == 429 or error.status >= 500
            kind = UnavailableClusterError if is_unavailable else LaunchError
            raise kind(f"{_manifest_title(manifest)}: {_describe_rejection(error, manifest['kind'])}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableClusterError(
                f"the cluster at {self._api.configuration.host} cannot be reached ({_join_lines(error)}); check"
                " the connection with kubectl cluster-info"
            ) from error


def _manifest_title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _join_lines(error: BaseException) -> str:
    return " ".join(str(getattr(error, "reason", None) or error).split())[:300]


def _describe_rejection(error: Any, kind: str) -> str:
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = error.reason
    if error.status == 404:
        operator = _OPERATOR_BY_KIND.get(kind, _DEFAULT_OPERATOR)
        return f"not found ({message}); check the namespace, and that {operator} is installed in the cluster"
    if error.status in (401, 403):
        return f"not allowed ({message}); request the permission, or use another context"
    return f"the cluster rejected it ({message})"


def _find_manifest_differences(expected: Any, current: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of an object that differ from a manifest, with their values; defaults are ignored."""
    if isinstance(expected, Mapping) and isinstance(current, Mapping):
        for key in expected:
            yield from _find_manifest_differences(expected[key], current.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(expected, list) and isinstance(current, list) and len(expected) == len(current):
        for index, (item, other) in enumerate(zip(expected, current, strict=True)):
            yield from _find_manifest_differences(item, other, f"{path}[{index}]")
    elif expected != current:
        yield path, current
