"""Command `submit` with Kubernetes, whose API kmock emulates: jobs are created, scaled, followed and deleted."""

import asyncio
import importlib.util
import os
import random
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from cli_runs import EXPERIMENT, build_command, run_in_process, start_command
from processes import communicate

import neondist as nd
import yaml

needs_kmock = pytest.mark.skipif(
    importlib.util.find_spec("kmock") is None or importlib.util.find_spec("kubernetes") is None,
    reason="needs kmock (Python 3.11 or newer) and kubernetes",
)
NAMESPACE = "/namespaces/lab"
PLURALS = {"MPIJob": "kubeflow.org/v2beta1/mpijobs", "TrainJob": "trainer.kubeflow.org/v1alpha1/trainjobs"}
OTHERS = "v1/configmaps", "v1/pods", "trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"


class Api:
    """API server in a thread, and a kubeconfig for it."""

    def __init__(self, folder):
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self.thread.start()
        self.ready.wait(60)
        self.config = folder / "kubeconfig"
        write_config(self.config, str(self.url).rstrip("/"))

    async def serve(self):
        import kmock

        self.loop, self.finished = asyncio.get_running_loop(), asyncio.Event()
        async with kmock.KubernetesEmulator() as self.api, kmock.Server(self.api) as server:
            for name in [*OTHERS, *PLURALS.values()]:
                self.api.resources[name] = {}
            self.url = server.url
            self.ready.set()
            await self.finished.wait()

    def objects(self):
        """Return the existing objects by kind and name."""

        async def list_objects():
            return [item.raw for item in self.api.objects.values() if not item.deleted]

        objects = asyncio.run_coroutine_threadsafe(list_objects(), self.loop).result(60)
        return {(item["kind"], item["metadata"]["name"]): item for item in objects}

    def end(self):
        self.loop.call_soon_threadsafe(self.finished.set)
        self.thread.join()


def write_config(path, url):
    path.write_text(yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config", "current-context": "here", "users": [{"name": "me", "user": {}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "me", "namespace": "lab"}}],
    }))  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return tmp_path


@pytest.fixture
def api(folder):
    server = Api(folder)
    yield server
    server.end()


def operate(kind, changes):
    """Set the conditions of a job one after the other, as its operator does."""
    import kubernetes

    group, version, plural = PLURALS[kind].split("/")
    client = kubernetes.config.new_client_from_config(os.environ["KUBECONFIG"])
    jobs, core = kubernetes.client.CustomObjectsApi(client), kubernetes.client.CoreV1Api(client)
    label = {"MPIJob": "training.kubeflow.org/job-name", "TrainJob": "jobset.sigs.k8s.io/jobset-name"}[kind]
    pod = {
        "kind": "Pod",
        "metadata": {"name": "toy-launcher-x", "labels": {label: "toy"}},
        "status": {"phase": "Running"},
    }
    for condition in changes:
        if condition == "Running":
            core.create_namespaced_pod("lab", pod)
        status = {"type": condition, "status": "True", "reason": "Test", "message": f"is {condition}"}
        # kmock's watches filter by the namespace, which a real server would set
        body = {"metadata": {"namespace": "lab"}, "status": {"conditions": [status]}}
        jobs.patch_namespaced_custom_object(group, version, "lab", plural, "toy", body)


@contextmanager
def operator(api, kind, *changes):
    """Wait for a job to be created, then change its status."""

    finished = threading.Event()

    def run():
        while (kind, "toy") not in api.objects() and not finished.wait(0.05):
            pass
        if not finished.is_set():
            operate(kind, changes)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


@needs_kmock
@pytest.mark.parametrize(("option", "kind", "end", "code"), [
    ("--mpijob", "MPIJob", "Succeeded", 0), ("--trainjob", "TrainJob", "Complete", 0),
    ("--mpijob", "MPIJob", "Failed", 1),
])  # fmt: skip
@pytest.mark.long
def test_job_is_created_and_followed(api, folder, option, kind, end, code):
    log = f"/api/v1{NAMESPACE}/pods/toy-launcher-x/log"
    api.loop.call_soon_threadsafe(lambda: api.api[f"get {log}"] << b"epoch 1/2\nepoch 2/2\n")
    with operator(api, kind, "Created", "Running", end):
        exit_code, out, err = run_in_process(
            folder, "submit", option, "toy.yaml", "--nodes", 2, "--claim", "disk", "--apply"
        )
    assert (exit_code, err) == (code, "")
    lines = out.splitlines()
    assert lines[-1] == f"{kind} toy: {end} (is {end})"
    assert lines.count("epoch 1/2") == lines.count("epoch 2/2") == 1
    assert lines[0] == "ConfigMap toy-experiment: created"
    created = {key: value for key, value in api.objects().items() if key[0] in (kind, "ConfigMap")}
    assert created[kind, "toy"]["spec"]
    assert created["ConfigMap", "toy-experiment"]["data"] == {"experiment.yaml": EXPERIMENT}


@needs_kmock
@pytest.mark.parametrize("seed", range(4))
def test_log_with_interruptions(monkeypatch, capsys, seed):
    """Print each line once, although connections fail or end early, and requests precede the start of a container."""
    import kubernetes
    import urllib3

    from neondist.cluster.submit import kubernetes as jobs

    rng = random.Random(seed)
    lines, failures = [b"epoch %d\n" % index for index in range(9)], [400, 404, "lost", "lost", "end"] * 2
    rng.shuffle(failures)
    cluster, reads = object.__new__(jobs.KubernetesCluster), []
    cluster._kubernetes, cluster._api, cluster.namespace = kubernetes, SimpleNamespace(), "lab"
    cluster._api.configuration = SimpleNamespace(host="http://cluster")

    def list_pods(*words, **options):
        metadata = SimpleNamespace(name="toy-launcher-x")
        phase = "Running" if len(reads) < len(failures) else "Succeeded"
        return SimpleNamespace(items=[SimpleNamespace(metadata=metadata, status=SimpleNamespace(phase=phase))])

    def read_log(*words, **options):
        failure = failures[len(reads)] if len(reads) < len(failures) else None
        reads.append(failure)
        if isinstance(failure, int):
            raise kubernetes.client.ApiException(status=failure, reason="Not found")

        def stream():
            yield from lines if failure is None else lines[: rng.randrange(9)]
            if failure == "lost":
                raise urllib3.exceptions.ProtocolError("connection broken")

        return stream()

    core = SimpleNamespace(list_namespaced_pod=list_pods, read_namespaced_pod_log=read_log)
    done = {"status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}
    states = [{}] * (len(failures) + 1)
    monkeypatch.setattr(kubernetes.client, "CoreV1Api", lambda api: core)
    monkeypatch.setattr(cluster, "_watch_job", lambda job: iter([states.pop() if states else done]))
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    assert cluster.follow_job({"kind": "MPIJob", "metadata": {"name": "toy"}}) == 0
    expected = [*(line.decode().strip() for line in lines), "MPIJob toy: Succeeded (no reason given)"]
    assert capsys.readouterr().out.splitlines() == expected
    assert len(reads) == len(failures) + 1


@needs_kmock
def test_job_is_scaled_and_deleted(api, folder):
    words = "submit", "--mpijob", "toy.yaml", "--elastic", "1:4", "--apply"
    for nodes in (2, 4, 4):
        # the job ends at once: it keeps the status of its first run
        with operator(api, "MPIJob", "Succeeded"):
            code, out, err = run_in_process(folder, *words, "--nodes", nodes)
        assert code == 0, err
        assert api.objects()["MPIJob", "toy"]["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == nodes
    assert "created" not in out
    code, _, err = run_in_process(folder, *words, "--nodes", 3, "--set", "epochs=3")
    assert code == 2
    assert (
        "MPIJob toy already exists with another spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].command"
        in err
    )
    assert api.objects()["MPIJob", "toy"]["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 4
    words = [word if word != "--apply" else "--delete" for word in words]
    assert run_in_process(folder, *words)[:2] == (0, "MPIJob toy: deleted\nConfigMap toy-experiment: deleted\n")
    assert run_in_process(folder, *words)[:2] == (
        0,
        "MPIJob toy: does not exist\nConfigMap toy-experiment: does not exist\n",
    )
    assert not api.objects()


@needs_kmock
@pytest.mark.long
def test_job_is_deleted_while_followed(api, folder):
    with operator(api, "MPIJob", "Created"):
        job = start_command(build_command("submit", "--mpijob", "toy.yaml", "--apply"), folder)
        lines = [job.stdout.readline() for _ in range(3)]
    assert lines[-1] == "MPIJob toy: Created (is Created)\n", job.communicate()
    run_in_process(folder, "submit", "--mpijob", "toy.yaml", "--delete")
    out, _ = communicate(job, 60)
    assert (job.returncode, out) == (1, "MPIJob toy: deleted\n")


@needs_kmock
def test_cluster_without_the_operator(api, folder):
    path = f"post /apis/kubeflow.org/v2beta1{NAMESPACE}/mpijobs"
    api.loop.call_soon_threadsafe(lambda: api.api[path] << 404)
    code, _, err = run_in_process(folder, "submit", "--mpijob", "toy.yaml", "--apply")
    assert code == 2
    assert "check the namespace, and that Kubeflow's MPI operator (0.8 or newer) is installed in the cluster" in err


@needs_kmock
def test_missing_cluster(folder):
    code, _, err = run_in_process(folder, "submit", "--mpijob", "toy.yaml", "--apply")
    assert (code, "no Kubernetes cluster is configured" in err, "set KUBECONFIG" in err) == (2, True, True), err
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_config(folder / "kubeconfig", f"http://127.0.0.1:{port}")
    code, _, err = run_in_process(folder, "submit", "--trainjob", "toy.yaml", "--apply")
    assert (code, f"http://127.0.0.1:{port} cannot be reached" in err) == (2, True), err
    assert len([line for line in err.splitlines() if line.startswith("error")]) == 1


def test_missing_client(folder):
    """Expect the name of the extra to install."""
    patch = "import sys; sys.modules['kubernetes'] = None; sys.argv[0] = 'neondist'; from neondist.cli import main; "
    words = [sys.executable, "-c", patch + "sys.exit(main())", "submit", "--mpijob", "toy.yaml", "--apply"]
    process = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith(
        "error: --apply and --delete need the Kubernetes client; pip install"
    )


@needs_kmock
@pytest.mark.parametrize(("status", "failures", "message"), [
    (503, 2, ""), (500, 99, "the job continues: repeat the command"), (403, 1, "not allowed"),
])  # fmt: skip
def test_cluster_is_unavailable_while_a_job_is_followed(monkeypatch, capsys, status, failures, message):
    """Continue after failed requests; report only the first one, and rejected requests at once."""
    import kubernetes

    from neondist.cluster.submit import kubernetes as jobs

    cluster, states, pauses = object.__new__(jobs.KubernetesCluster), [], []
    cluster._kubernetes = kubernetes
    done = {"status": {"conditions": [{"type": "Succeeded", "status": "True", "reason": "Done"}]}}

    def watch(job):
        with cluster._convert_api_errors(job):
            if len(states) < failures:
                states.append(status)
                raise kubernetes.client.ApiException(status=status, reason="Busy")
            yield done

    monkeypatch.setattr(cluster, "_watch_job", watch)
    monkeypatch.setattr(cluster, "_print_logs", lambda job, pods: None)
    monkeypatch.setattr(jobs.time, "sleep", pauses.append)
    job = {"kind": "MPIJob", "metadata": {"name": "toy"}}
    if message:
        with pytest.raises(nd.LaunchError, match=message):
            cluster.follow_job(job)
    else:
        assert cluster.follow_job(job) == 0
    assert len(pauses) == {503: 2, 500: 30, 403: 0}[status]
    assert capsys.readouterr().err.count("retrying") == (status != 403)
