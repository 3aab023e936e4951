"""The task of a process, from the environments of tasks.yaml, and generated clusters."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import neondist as nd
import yaml

NUMBERS = "type", "index", "trial", "num_workers", "num_ps", "shard_index", "generation"
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
    found = {
        key: getattr(task, key)
        for key in ("type", "index", "trial", "num_workers", "num_ps", "shard_index", "generation")
    }
    found |= {"master": task.is_master(), "evaluator": task.is_evaluator()}
    wanted = {key: value for key, value in case.items() if key in found}
    assert {key: found[key] for key in wanted} == wanted


@given(st.integers(1, 6), st.booleans(), st.integers(0, 3), st.booleans())
def test_shards_are_disjoint_and_cover(workers, with_master, servers, last_evaluates):
    cluster = {"worker": [f"w{at}:1" for at in range(workers)], "ps": [f"p{at}:1" for at in range(servers)]}
    cluster |= {"chief": ["c:1"]} if with_master else {}
    places = (
        [("worker", at) for at in range(workers)] + [("chief", 0)] * with_master + [("ps", at) for at in range(servers)]
    )
    tasks = [
        nd.TaskSpec({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": at}})})
        for kind, at in places
    ]
    if last_evaluates and workers + with_master > 1:
        tasks = [task.use_last_worker_as_evaluator() for task in tasks]
        assert sum(task.is_evaluator() for task in tasks) == 1
    shards = sorted(task.shard_index for task in tasks if task.is_worker())
    assert shards == list(range(tasks[0].num_workers))
    assert sum(task.is_master() for task in tasks) == 1
    assert all(task.shard_index is None for task in tasks if task.is_ps() or task.is_evaluator())
    assert {task.num_ps for task in tasks} == {servers}


@pytest.mark.parametrize(("environ", "names"), [
    ({"TF_CONFIG": "[]"}, "TF_CONFIG"),
    ({"TF_CONFIG": "[" * 100_000}, "TF_CONFIG"),
    ({"TF_CONFIG": '{"cluster": {"worker": "a:1"}}'}, "cluster.worker"),
    ({"TF_CONFIG": '{"task": {"type": "worker", "index": "0"}}'}, "task.index"),
    ({"JOB_NAME": "worker", "TASK_INDEX": "x", "WORKER_HOSTS": "a:1"}, "TASK_INDEX"),
    ({"JOB_NAME": "wroker"}, "wroker"),
    ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT"),
])  # fmt: skip
def test_bad_variables_are_named(environ, names):
    with pytest.raises(nd.ConfigError, match=names):
        nd.TaskSpec(environ)


@pytest.mark.parametrize(("environ", "message"), [
    ({"JOB_NAME": "ps", "PS_HOSTS": "127.0.0.1:0", "WORKER_HOSTS": "b:1"}, "NEONDIST_TOKEN: expected a secret"),
    ({"JOB_NAME": "ps", "WORKER_HOSTS": "b:1"}, "is not a parameter server of the cluster"),
    ({"JOB_NAME": "worker", "WORKER_HOSTS": "b,c"}, "'b' has no port"),
    ({"JOB_NAME": "worker", "WORKER_HOSTS": "b:1", "MASTER_HOST": "a"}, "'a' has no port"),
])  # fmt: skip
def test_servers_that_cannot_be_created(environ, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.TaskSpec(environ).create_server()


def test_a_task_that_is_an_mpi_job_of_several_ranks(monkeypatch):
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
def test_nothing_to_connect(environ):
    assert nd.TaskSpec(environ).create_server() is None


def test_the_device_of_a_task():
    torch = pytest.importorskip("torch")
    with torch.device(nd.TaskSpec({}).device_fn()) as device:
        assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
