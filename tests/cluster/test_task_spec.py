"""Task of a process in the environments of tasks.yaml, and in generated clusters."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import neondist as nd
import yaml

FIELDS = "type", "index", "trial", "num_workers", "num_ps", "shard_index", "generation"
CASES = {case["name"]: case for case in yaml.safe_load((Path(__file__).parent / "tasks.yaml").read_text())}


def task_of(case):
    task = nd.TaskSpec(case["env"])
    return task.use_last_worker_as_evaluator() if case.get("last_worker_as_evaluator") else task


@pytest.mark.parametrize("name", CASES)
def test_environments(name):
    case = CASES[name]
    if "error" in case:
        with pytest.raises(nd.ConfigError, match=case["error"]):
            task_of(case)
        return
    task = task_of(case)
    actual = {key: getattr(task, key) for key in FIELDS}
    actual |= {"master": task.is_master(), "evaluator": task.is_evaluator()}
    expected = {key: value for key, value in case.items() if key in actual}
    assert {key: actual[key] for key in expected} == expected


@given(st.integers(1, 6), st.booleans(), st.integers(0, 3), st.booleans(), st.sampled_from([int, str]))
def test_shards_partition_the_workers(workers, with_master, servers, last_worker_evaluates, index_type):
    cluster = {"worker": [f"w{i}:1" for i in range(workers)], "ps": [f"p{i}:1" for i in range(servers)]}
    cluster |= {"chief": ["c:1"]} if with_master else {}
    tasks_of_cluster = (
        [("worker", i) for i in range(workers)] + [("chief", 0)] * with_master + [("ps", i) for i in range(servers)]
    )
    tasks = [
        nd.TaskSpec({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index_type(i)}})})
        for kind, i in tasks_of_cluster
    ]
    if last_worker_evaluates and workers + with_master > 1:
        tasks = [task.use_last_worker_as_evaluator() for task in tasks]
        assert sum(task.is_evaluator() for task in tasks) == 1
    shards = sorted(task.shard_index for task in tasks if task.is_worker())
    assert shards == list(range(tasks[0].num_workers))
    assert sum(task.is_master() for task in tasks) == 1
    assert all(task.shard_index is None for task in tasks if task.is_ps() or task.is_evaluator())
    assert {task.num_ps for task in tasks} == {servers}


@pytest.mark.parametrize(("environ", "variable"), [
    ({"TF_CONFIG": "[]"}, "TF_CONFIG"),
    ({"TF_CONFIG": "[" * 100_000}, "TF_CONFIG"),
    ({"TF_CONFIG": "[]"}, "expected an object with cluster and task, got list"),
    ({"TF_CONFIG": '{"cluster": {"worker": "a:1"}}'}, "cluster.worker"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "TF_CONFIG: task type 'master' is not in the cluster"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps"}}'}, "which has worker; add its address"),
    ({"TF_CONFIG": '{"cluster": {"ps": ["a:1"]}, "task": {"type": "worker"}}'}, "'worker' is not in the cluster"),
    ({"TF_CONFIG": '{"cluster": {"master": ["a:1", "b:1"]}}'}, "TF_CONFIG: master: expected one"),
    ({"TF_CONFIG": '{"cluster": {"master": ["a:1"], "chief": ["b:1"]}}'}, "one master or chief, got a:1, b:1"),
    ({"JOB_NAME": "master", "WORKER_HOSTS": "a:1"}, "JOB_NAME: task type 'master' is not in the cluster"),
    ({"JOB_NAME": "master", "MASTER_HOST": "a:1,b:1"}, "MASTER_HOST: expected one master or chief, got a:1, b:1"),
    ({"MASTER_HOST": "a:1"}, "JOB_NAME: missing, but MASTER_HOST is set"),
    ({"TASK_INDEX": "1", "WORKER_HOSTS": "a:1,b:1"}, "JOB_NAME: missing, but WORKER_HOSTS is set"),
    ({"PS_HOSTS": "a:1"}, "JOB_NAME: missing, but PS_HOSTS is set"),
    ({"TF_CONFIG": '{"task": {"type": "worker", "index": "x"}}'}, "task.index"),
    ({"JOB_NAME": "worker", "TASK_INDEX": "x", "WORKER_HOSTS": "a:1"}, "TASK_INDEX"),
    ({"JOB_NAME": "worker", "TASK_INDEX": "2", "WORKER_HOSTS": "a:1,b:1"}, "TASK_INDEX: 2 of task type"),
    ({"JOB_NAME": "wroker"}, "JOB_NAME: task type 'wroker' is unknown"),
    ({"JOB_NAME": "wroker", "WORKER_HOSTS": "a:1", "JOB_ID": "7"}, "JOB_NAME: task type 'wroker' is unknown"),
    ({"TF_CONFIG": '{"cluster": {"wroker": ["a:1"]}, "task": {"type": "worker"}}'}, "the cluster, which has wroker"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'}, "task.index: 1"),
    ({"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'}, "TF_CONFIG: has no addresses of workers, but this is"),
    ({"TF_CONFIG": '{"cluster": {"worker": []}, "task": {"type": "worker", "index": "2"}}'}, "but this is worker 2"),
    ({"JOB_NAME": "worker", "TASK_INDEX": "1"}, "WORKER_HOSTS: has no addresses of workers, but this is worker 1"),
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "-1"}, "WORLD_SIZE: expected an integer of at least 1"),
    ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "-1"}, "RESTART_COUNT: expected an integer of"),
    ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT"),
])  # fmt: skip
def test_errors_name_the_variable(environ, variable):
    with pytest.raises(nd.ConfigError, match=variable):
        nd.TaskSpec(environ)


@pytest.mark.parametrize(("arguments", "message"), [
    (("ps", 2, None, ["a:1", "b:1"]), "index: 2 of task type 'ps' is invalid; expected from 0 to 1"),
    (("worker", -1), "index: -1 of task type 'worker' is invalid; expected at least 0"),
    (("evaluator", -1), "index: -1 of task type 'evaluator' is invalid; expected at least 0"),
    (("worker", "1"), "index: expected an integer, got the text '1'"),
    (("worker", 0, None, None, 5), r"worker_hosts: expected a list .* got 5"),
])  # fmt: skip
def test_errors_of_arguments(arguments, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.TaskSpecDef(*arguments)


@pytest.mark.parametrize(("environ", "message"), [
    ({"JOB_NAME": "ps", "PS_HOSTS": "127.0.0.1:0", "WORKER_HOSTS": "b:1"}, "NEONDIST_TOKEN: expected a secret"),
])  # fmt: skip
def test_errors_of_servers(environ, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.TaskSpec(environ).create_server()


@pytest.mark.parametrize(("hosts", "master"), [("b,c", None), ("b:1", "a"), ("b:65536,c:1", None)])
def test_first_address_needs_a_port(hosts, master):
    task = nd.TaskSpecDef("worker", worker_hosts=hosts, master=master)
    with pytest.raises(nd.ConfigError, match=r"create_server: .* has no port"):
        task.create_server()


def test_parameter_server_without_address():
    with pytest.raises(nd.ConfigError, match="create_server: parameter server 0 has no address; add it to ps_hosts"):
        nd.TaskSpecDef("ps", 0).create_server()


@pytest.mark.parametrize("kind", ["ps", "worker", "master"])
@pytest.mark.parametrize(("address", "problem"), [
    ("h", "'h' has no port; give the address of each task as HOST:PORT"),
    ("h:x", "'h:x' has no port"),
    (":1", "':1' has no port"),
    ("h:65536", "'h:65536' has no port"),
    ("::1:2", "'::1:2' has no port"),
    ("http://h:2", "'http://h:2' has no port"),
    ("w:1", "'w:1' is listed 2 times; give each task its own port"),
])  # fmt: skip
@pytest.mark.parametrize("evaluator", [True, False])
def test_invalid_addresses_are_reported_at_once(kind, address, problem, evaluator):
    """Report them to every task, whether it would use the address or not."""
    cluster = {"worker": ["w:1"]}
    cluster[kind] = [*cluster.get(kind, []), address]
    task = {"type": "evaluator" if evaluator else "worker", "index": 0}
    with pytest.raises(nd.ConfigError, match=f"TF_CONFIG: {problem}"):
        nd.TaskSpec({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    variables = {name: ",".join(cluster.get(kind, [])) for name, kind in
                 (("PS_HOSTS", "ps"), ("WORKER_HOSTS", "worker"), ("MASTER_HOST", "master"))}  # fmt: skip
    variable = "[A-Z]+_HOSTS?" if address == "w:1" else {"ps": "PS", "worker": "WORKER"}.get(kind, "MASTER") + "_HOST"
    with pytest.raises(nd.ConfigError, match=f"{variable}S?: {problem}"):
        nd.TaskSpec({"JOB_NAME": task["type"], **variables})


@pytest.mark.parametrize("system", ["JOB_ID", "JENKINS_URL"])
def test_job_name_of_a_batch_system(system):
    assert nd.TaskSpec({"JOB_NAME": "train.sh", system: "1"}).is_master()
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert nd.TaskSpec({"JOB_NAME": "train.sh", system: "1", **ranks}).num_workers == 4


def test_task_with_several_mpi_ranks(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    task = nd.TaskSpec({"JOB_NAME": "worker", "WORKER_HOSTS": "b:1,c:1"})
    with pytest.raises(nd.ConfigError, match="an MPI job of 2 ranks"):
        task.create_server()


@pytest.mark.parametrize("environ", [
    {},
    {"JOB_NAME": "evaluator", "WORKER_HOSTS": "b:1,c:1"},
    {"JOB_NAME": "worker", "WORKER_HOSTS": "b:1"},
    {"JOB_NAME": "worker", "PS_HOSTS": "a:1", "WORKER_HOSTS": "b:1,c:1"},
    {"JOB_NAME": "master", "PS_HOSTS": "a:1", "WORKER_HOSTS": "b:1", "MASTER_HOST": "c:1"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
])  # fmt: skip
def test_tasks_without_servers(environ):
    assert nd.TaskSpec(environ).create_server() is None


def test_master_in_a_list():
    task = nd.TaskSpecDef("worker", 1, None, "a:1", "b:1,c:1", ["d:1"])
    assert (task.master, task.num_workers, task.shard_index) == ("d:1", 3, 2)


def test_device_of_a_task():
    torch = pytest.importorskip("torch")
    with torch.device(nd.TaskSpec({}).device_fn()) as device:
        assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
