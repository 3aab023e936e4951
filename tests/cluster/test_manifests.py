"""Manifests of jobs: schemas of both operators, and commands of launchers on fake nodes."""

import functools
import gzip
import sys
from pathlib import Path

import jsonschema
import pytest
from availability import needs_mpirun
from cli_runs import EXPERIMENT, run_command, run_in_process
from fake_nodes import FakeNodes, needs_fake_nodes

import yaml
from neondist.cluster.submit import Submission, job_name
from neondist.cluster.submit.manifests import (
    DISCOVERY_SCRIPT,
    HOST_FILE,
    dump_yaml,
    mpi_job_manifests,
    train_job_manifests,
)
from neondist.errors import ConfigError

SCHEMAS = Path(__file__).parent / "schemas"
SCHEMA_FILE_BY_KIND = {
    "MPIJob": "kubeflow.org_mpijobs.v2beta1", "TrainJob": "trainer.kubeflow.org_trainjobs.v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org_clustertrainingruntimes.v1alpha1",
}  # fmt: skip
MANIFESTS_BY_OPTION = {"--mpijob": mpi_job_manifests, "--trainjob": train_job_manifests}
# both operators add these to a manifest, for Open MPI 4
OPERATORS = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_orte_default_hostfile": HOST_FILE,
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10", "OMPI_MCA_orte_set_default_slots": "2",
    "K_MPI_JOB_ROLE": "launcher", "NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": "",
}  # fmt: skip


def strict_schema(node):
    """Return a structural schema of Kubernetes as a JSON schema that rejects unknown fields."""
    if isinstance(node, list):
        return [strict_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    fields = node.get("properties") if isinstance(node.get("properties"), dict) else None
    dropped = "format", "description", "properties"
    result = {k: strict_schema(v) for k, v in node.items() if not k.startswith("x-kubernetes") and k not in dropped}
    if fields is not None:  # fields may have any name
        result["properties"] = {name: strict_schema(value) for name, value in fields.items()}
        if "additionalProperties" not in result and not node.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    return result


@functools.cache
def validator(kind):
    crd = yaml.load(gzip.decompress((SCHEMAS / f"{SCHEMA_FILE_BY_KIND[kind]}.yaml.gz").read_bytes()), yaml.CSafeLoader)
    strict = strict_schema(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    strict["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(strict)


def errors(manifest):
    return [f"{error.json_path}: {error.message}" for error in validator(manifest["kind"]).iter_errors(manifest)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "Toy 1.yaml").write_text(EXPERIMENT)
    (tmp_path / "layers.py").write_text("x = 1\n\ty = 2\n")
    return tmp_path


def submission(folder, **fields):
    return Submission("toy-1", str(folder / "Toy 1.yaml"), **{"ranks": 4, "nodes": 2, **fields})


def containers(objects):
    """Return the launcher's container and a worker's."""
    if objects[-1]["kind"] == "MPIJob":
        replicas = objects[-1]["spec"]["mpiReplicaSpecs"]
        return [replicas[name]["template"]["spec"]["containers"][0] for name in ("Launcher", "Worker")]
    worker, launcher = (
        job["template"]["spec"]["template"]["spec"]["containers"][0]
        for job in objects[1]["spec"]["template"]["spec"]["replicatedJobs"]
    )
    trainer = objects[-1]["spec"]["trainer"]
    return [{**launcher, "command": trainer["command"], "env": trainer["env"]}, worker]


@pytest.mark.parametrize("make", MANIFESTS_BY_OPTION.values())
@pytest.mark.parametrize("claim", [None, "disk"])
def test_manifests_match_the_schemas(make, claim, folder):
    objects = make(
        submission(folder, modules=(str(folder / "layers.py"), "package.module"), settings=("epochs=3",)),
        "image",
        claim,
    )
    assert list(yaml.safe_load_all(dump_yaml(objects))) == objects
    assert [errors(manifest) for manifest in objects[1:]] == [[]] * (len(objects) - 1)
    launcher, worker = containers(objects)
    assert {item["name"]: item["value"] for item in launcher["env"]} == {
        "PRTE_MCA_prte_default_hostfile": HOST_FILE, "PRTE_MCA_plm_ssh_args": "-o ConnectionAttempts=10",
    }  # fmt: skip
    assert worker["command"][:2] == ["/usr/sbin/sshd", "-De"]
    keys = {f"/etc/neondist/{key}" for key in objects[0]["data"]}
    assert keys == {"/etc/neondist/experiment.yaml", "/etc/neondist/layers.py"}
    assert keys <= set(launcher["command"])
    for container in (launcher, worker):
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/etc/neondist", "/dev/shm"}


@pytest.mark.parametrize("make", MANIFESTS_BY_OPTION.values())
def test_schemas_reject_unknown_fields(make, folder):
    """Reject fields that the cluster would drop silently, at the top and in containers."""
    objects = make(submission(folder), "image")[1:]
    for manifest in objects:
        manifest["spec"]["misspelt"] = {}
        assert any("misspelt" in error for error in errors(manifest))
        del manifest["spec"]["misspelt"]
    for container in containers([None, *objects]):
        container["volumeMounts"][0]["mountpath"] = container["volumeMounts"][0].pop("mountPath")
    assert sum("mountpath" in error for error in errors(objects[0])) == 2


def test_trainjob_leaves_commands_of_workers(folder):
    """Label the launcher alone: Trainer replaces the commands of labelled jobs."""
    _, runtime, trainjob = train_job_manifests(submission(folder), "image")
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = {job["name"]: job["template"].get("metadata", {}).get("labels") for job in jobs}
    assert labels == {"node": None, "launcher": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    assert jobs[1]["dependsOn"] == [{"name": "node", "status": "Ready"}]
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_commands_are_not_expanded_by_kubernetes(folder):
    *_, job = mpi_job_manifests(submission(folder, settings=("dataset.path=/data/$(HOME)$$",)), "neondist:1")
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert "dataset.path=/data/$$(HOME)$$$$" in launcher["command"]


@pytest.mark.parametrize(("text", "name"), [
    ("Toy 1.yaml", "toy-1"), ("a/b/mnist_convnet.yaml", "mnist-convnet"), ("1.yaml", "neondist-1"),
    ("ü.yaml", "neondist"), ("x" * 99, "x" * 40), ("-a-.yaml", "a"),
])  # fmt: skip
def test_job_names(text, name):
    assert job_name(text) == name


@pytest.mark.parametrize("make", MANIFESTS_BY_OPTION.values())
def test_workers_with_servers_run_on_the_pods(make, folder):
    launcher, _ = containers(make(submission(folder, needs_servers=True), "image"))
    words = launcher["command"]
    assert words[words.index("--hosts-from") + 1] in (HOST_FILE, DISCOVERY_SCRIPT)
    assert words[words.index("-n") + 1] == "4"
    assert not {"--restarts", "--elastic"} & set(words)


@pytest.mark.parametrize(("words", "message"), [
    (["--slurm", "--elastic", "1:2", "-n", 2, "--set", "strategy=!PS {sync: false}"], "the strategy needs servers"),
    (["--mpijob", "-n", 3, "--nodes", 2], "give a multiple of 2, such as -n 4"),
    (["--mpijob", "--nodes", 2, "--elastic", "3:4"], "-n 2 is not within --elastic 3:4"),
    (["--trainjob", "--elastic", "1:2"], "use --mpijob"),
    (["--mpijob", "--name", "A b"], "such as a-b"),
    (["--mpijob", "--apply", "--delete"], "give one of them"),
    (["--slurm", "--image", "x"], "--image applies to --mpijob"),
    (["--mpijob", "--image", ""], "--image '': expected a container image"),
    (["--trainjob", "--image", "a b"], "--image 'a b': expected a container image"),
    (["--mpijob", "--claim", ""], "--claim '': expected the name of a PersistentVolumeClaim"),
    (["--trainjob", "--claim", "My_Disk"], "--claim 'My_Disk': expected the name of a PersistentVolumeClaim"),
    (["--slurm", "--set", "dataset=!HDF5Dataset {path: /image/x.h5}"], "/image/x.h5: no such file"),
    (["--slurm", "--delete"], "scancel"),
    (["--mpijob", "--set", "epochs=x"], "epochs"),
    (["--mpijob", "--set", "grid.rows=3"], "rows x cols can be 1 x 1"),
    (["--mpijob", "--output", "no/such/folder"], "cannot be written"),
])  # fmt: skip
def test_errors(folder, words, message):
    code, out, err = run_in_process(folder, "submit", *words, "Toy 1.yaml")
    assert (code, out, message in err) == (2, "", True), err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("option", MANIFESTS_BY_OPTION)
def test_data_in_the_container_image(folder, option):
    """Do not reject an experiment whose data set is not on this machine; its other fields are checked."""
    words = "submit", option, "Toy 1.yaml", "--claim", "disk", "--set", "dataset=!HDF5Dataset {path: /image/x.h5}"
    code, out, err = run_in_process(folder, *words)
    assert (code, err.count("\n")) == (0, 1), err
    assert err.startswith("warning: the data set cannot be opened on this machine (/image/x.h5: no such file")
    assert "/image/x.h5" in str([manifest["spec"] for manifest in yaml.safe_load_all(out) if "spec" in manifest])
    assert run_in_process(folder, *words, "epochs=0")[0] == 2


def test_modules_that_fit_no_config_map(folder):
    (folder / "other").mkdir()
    for name in ("other/layers.py", "a b.py"):
        (folder / name).touch()
    for modules in (("layers.py", "other/layers.py"), ("a b.py",)):
        with pytest.raises(ConfigError, match="need unique names"):
            mpi_job_manifests(submission(folder, modules=modules), "image")
    (folder / "large.py").write_text("#" * (1 << 20))
    with pytest.raises(ConfigError, match="a ConfigMap holds at most 1 MiB"):
        mpi_job_manifests(submission(folder, modules=(str(folder / "large.py"),)), "image")


@needs_fake_nodes
@needs_mpirun
@pytest.mark.parametrize("kind", MANIFESTS_BY_OPTION)
@pytest.mark.long
def test_launcher_starts_ranks_on_all_workers(kind, folder, tmp_path):
    """Provide the operator's variables, host file and discovery script at the paths of a container."""
    names = [f"toy-1-worker-{i}.toy-1-worker.default.svc" for i in range(2)]
    launcher, _ = containers(MANIFESTS_BY_OPTION[kind](submission(folder), "image"))
    nodes = FakeNodes(tmp_path, *names, slots=2)
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {name}\n" for name in names))
    script.chmod(0o755)
    paths = {
        HOST_FILE: str(tmp_path / "hosts"), DISCOVERY_SCRIPT: str(script),
        "/etc/neondist/experiment.yaml": "Toy 1.yaml",
        "/home/mpiuser/runs/toy-1": "out",
    }  # fmt: skip
    env = OPERATORS | {variable["name"]: variable["value"] for variable in launcher["env"]}
    env = nodes.env | {name: paths.get(value, value) for name, value in env.items()}
    command, *words = [paths.get(word, word) for word in launcher["command"]]
    assert command == "neondist"
    try:
        code, out, err = run_command([sys.executable, "-m", "neondist", *words], folder, **env)
        assert code == 0, err
        assert "ConvnetDist on 4 ranks" in out
        environment = yaml.safe_load((folder / "out" / "environment.json").read_text())
        assert environment["hosts"] == dict.fromkeys(names, 2)
        assert not nodes.processes()
    finally:
        nodes.end()
