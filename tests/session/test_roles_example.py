"""TensorLayer's tutorial with a master, a worker and an evaluator, each started by itself; and what connects them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import finish

from neondist.comm import SingleTransport
from neondist.io.checkpoint import open_checkpoint
from neondist.services.wire import TOKEN, create_token
from neondist.session.follow import position_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "roles.py"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(task, cluster, *words, index=0, **more):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    environ |= {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}
    environ |= {"OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib", **more}
    command = [sys.executable, str(EXAMPLE), *map(str, words)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_three_shells(tmp_path):
    pytest.importorskip("torch", reason="tasks that are started one by one meet by torch.distributed")
    cluster = {"master": [f"127.0.0.1:{free_port()}"], "worker": ["127.0.0.1:1"]}
    tasks = {kind: start(kind, cluster, tmp_path / "ckpt", 8, 16) for kind in ("evaluator", "worker", "master")}
    told = {}
    try:
        for kind in ("master", "worker", "evaluator"):
            out, err = finish(tasks[kind], 600)
            told[kind] = out
            assert (err, tasks[kind].returncode) == ("", 0), kind
    finally:
        for process in tasks.values():
            process.kill()
            process.wait()
    assert told["worker"] == ""
    assert [line.split(":")[0] for line in told["master"].splitlines()] == [f"step {n}" for n in (2, 4, 6, 8)]
    records = [json.loads(line) for line in told["evaluator"].splitlines()]
    assert [record["step"] for record in records] == [0, 2, 4, 6, 8]
    assert records[-1]["loss"] < records[0]["loss"]
    assert (tmp_path / "ckpt" / "evaluation" / "metrics.jsonl").read_text() == told["evaluator"]


@pytest.mark.long
def test_a_server_and_two_workers(tmp_path):
    """Worker 1 comes first, and the server last: all end with worker 0, at the step that all updates make."""
    address = f"127.0.0.1:{free_port()}"
    cluster = {"ps": [address], "worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    token, words = create_token(), (cluster, tmp_path / "ckpt", 40, 16)
    tasks = [start(kind, *words, index=at, **{TOKEN: token}) for kind, at in (("worker", 1), ("worker", 0), ("ps", 0))]
    try:
        told = [finish(process, 600) for process in tasks]
    finally:
        for process in tasks:
            process.kill()
            process.wait()
    assert [process.returncode for process in tasks] == [0, 0, 0], told
    assert [err for _, err in told] == ["", "", ""]
    assert (told[0][0], told[2][0]) == ("", f"PServer at {address}\n")
    lines = told[1][0].splitlines()
    assert lines
    assert all(line.startswith("step ") for line in lines)
    with open_checkpoint(tmp_path / "ckpt" / "checkpoint.h5", SingleTransport()) as file:
        step = position_of(file).step
    assert 40 <= step <= 41
    assert json.loads((tmp_path / "ckpt" / "complete.json").read_text()) == {"step": step}
