"""TensorLayer's tutorial with separately started master, worker and evaluator, and their connections."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import communicate

from neondist.comm import SingleTransport
from neondist.io.checkpoint import open_checkpoint
from neondist.services.wire import TOKEN_VARIABLE, create_token
from neondist.train.callbacks.checkpoint import read_run_progress

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "roles.py"


def find_free_port():
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        return connection.getsockname()[1]


def start_task(task, cluster, *arguments, index=0, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    environ |= {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}
    environ |= {"OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib", **variables}
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_tasks(tasks):
    """Return stdout and stderr of each task; all must end with exit code 0."""
    outputs = []
    try:
        for process in tasks:
            outputs.append(communicate(process, 600))
            assert process.returncode == 0, outputs
    finally:
        for process in tasks:
            process.kill()
            process.wait()
    return outputs


@pytest.mark.long
def test_master_worker_and_evaluator(tmp_path):
    pytest.importorskip("torch", reason="tasks that are started one by one meet by torch.distributed")
    cluster = {"master": [f"127.0.0.1:{find_free_port()}"], "worker": ["127.0.0.1:1"]}
    tasks = {kind: start_task(kind, cluster, tmp_path / "ckpt", 8, 16) for kind in ("evaluator", "worker", "master")}
    outputs = wait_for_tasks([tasks[kind] for kind in ("master", "worker", "evaluator")])
    waited = f"waiting for the first checkpoint in {tmp_path / 'ckpt'}\n"  # if the evaluator started first
    assert [err.removeprefix(waited) for _, err in outputs] == ["", "", ""]
    master_out, worker_out, evaluator_out = (out for out, _ in outputs)
    assert worker_out == ""
    assert [line.split(":")[0] for line in master_out.splitlines()] == [f"step {n}" for n in (2, 4, 6, 8)]
    records = [json.loads(line) for line in evaluator_out.splitlines()]
    assert [record["step"] for record in records] == [0, 2, 4, 6, 8]
    assert records[-1]["loss"] < records[0]["loss"]
    assert (tmp_path / "ckpt" / "evaluation" / "metrics.jsonl").read_text() == evaluator_out


@pytest.mark.long
def test_epoch_that_ends_with_a_smaller_batch(tmp_path):
    """Three shards of 3333 digits, in batches of 100."""
    pytest.importorskip("torch", reason="tasks that are started one by one meet by torch.distributed")
    cluster = {"master": [f"127.0.0.1:{find_free_port()}"], "worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    places = ("worker", 1), ("worker", 0), ("master", 0)
    tasks = [start_task(kind, cluster, tmp_path / "ckpt", 36, 4, index=index) for kind, index in places]
    outputs = wait_for_tasks(tasks)
    assert outputs[2][0].splitlines()[-1].startswith("step 36: ")


@pytest.mark.long
def test_server_and_two_workers(tmp_path):
    """Worker 1 starts first and the server last; all end with worker 0, after the last update."""
    address = f"127.0.0.1:{find_free_port()}"
    cluster = {"ps": [address], "worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    token, arguments = create_token(), (cluster, tmp_path / "ckpt", 40, 16)
    tasks = [
        start_task(kind, *arguments, index=index, **{TOKEN_VARIABLE: token})
        for kind, index in (("worker", 1), ("worker", 0), ("ps", 0))
    ]
    outputs = wait_for_tasks(tasks)
    assert [err for _, err in outputs] == ["", "", ""]
    assert (outputs[0][0], outputs[2][0]) == ("", f"PServer at {address}\n")
    lines = outputs[1][0].splitlines()
    assert lines
    assert all(line.startswith("step ") for line in lines)
    with open_checkpoint(tmp_path / "ckpt" / "checkpoint.h5", SingleTransport()) as file:
        step = read_run_progress(file).step
    assert 40 <= step <= 41
    assert json.loads((tmp_path / "ckpt" / "complete.json").read_text()) == {"step": step}
