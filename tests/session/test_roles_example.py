"""TensorLayer's tutorial with a master, a worker and an evaluator, each started by itself; and what connects them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="tasks that are started one by one meet by torch.distributed")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "roles.py"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(task, cluster, *words):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    environ |= {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task}}), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *map(str, words)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_three_shells(tmp_path):
    cluster = {"master": [f"127.0.0.1:{free_port()}"], "worker": ["127.0.0.1:1"]}
    tasks = {kind: start(kind, cluster, tmp_path / "ckpt", 8, 16) for kind in ("evaluator", "worker", "master")}
    try:
        told = {kind: (*process.communicate(timeout=240), process.returncode) for kind, process in tasks.items()}
    finally:
        for process in tasks.values():
            process.kill()
    assert {kind: (err, code) for kind, (_, err, code) in told.items()} == dict.fromkeys(tasks, ("", 0))
    assert told["worker"][0] == ""
    assert [line.split(":")[0] for line in told["master"][0].splitlines()] == [f"step {n}" for n in (2, 4, 6, 8)]
    records = [json.loads(line) for line in told["evaluator"][0].splitlines()]
    assert [record["step"] for record in records] == [0, 2, 4, 6, 8]
    assert records[-1]["loss"] < records[0]["loss"]
    assert (tmp_path / "ckpt" / "evaluation" / "metrics.jsonl").read_text() == told["evaluator"][0]
