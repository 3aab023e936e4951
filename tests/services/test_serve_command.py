"""Command `serve ps` as a process: error messages, and resumption of a killed server."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from availability import needs_mpirun
from cli_runs import build_command, run_command
from processes import list_commands

import neondist as nd
from neondist.cli import main
from neondist.errors import ServiceUnavailableError
from neondist.services.client import ParameterClient
from neondist.services.placement import place_parameters
from neondist.services.progress import MinibatchId
from neondist.services.wire import TOKEN_VARIABLE, ServiceHost, create_token
from neondist.strategies import PS, ParameterSpec


def start_server(token, *words):
    """Start a server, and return its process and its address."""
    command = [sys.executable, "-m", "neondist", "serve", "ps", *words]
    process = subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: token}, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("PServer at 127.0.0.1:")
    return process, line.split()[-1]


@pytest.mark.long
def test_killed_server_resumes_from_its_checkpoint(tmp_path):
    token, values = create_token(), {"w": np.zeros(3, "float32")}
    layouts = place_parameters(PS().build([ParameterSpec("w", (3,))], 1), 1)
    process, address = start_server(token, "--checkpoint-dir", str(tmp_path))
    try:
        with ParameterClient([address], layouts, token, "0", retry_seconds=0.5) as client:
            client.push_initial_values(values, nd.SGD(1.0))
            client.pull(values)
            client.push({"w": np.full(3, -1.0, "float32")}, minibatch=MinibatchId(0, 0, 0))
            client.save("one")
            client.push({"w": np.full(3, -5.0, "float32")})
            process.kill()
            process.wait()
            with pytest.raises(ServiceUnavailableError, match="no answer; check its address"):
                client.push({"w": values["w"]})
        process, address = start_server(token, "--checkpoint-dir", str(tmp_path), "--address", address)
        with ParameterClient([address], layouts, token, "0", retry_seconds=20) as client:
            client.load("one", nd.SGD(1.0))
            client.pull(values)
            np.testing.assert_array_equal(values["w"], 1)
            assert client.applied_minibatches().to_list() == [MinibatchId(0, 0, 0)]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_errors_are_one_message(monkeypatch, capsys):
    monkeypatch.setenv(TOKEN_VARIABLE, create_token())
    with ServiceHost([], "127.0.0.1:0", create_token()) as host:
        assert main(["serve", "ps", "--address", host.address]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{host.address}: cannot listen (Address already in use)" in error
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert main(["serve", "ps"]) == 2
    assert "NEONDIST_TOKEN: expected a secret" in capsys.readouterr().err


ASYNCHRONOUS_EXPERIMENT = """!FitExperiment
dataset: !Synthetic {shape: [6, 6, 1], classes: 3, train: 24, test: 4}
model: !MLPDist
  layers: [!FCLayerDist {out_features: 8}, !FCLayerDist {out_features: 3}]
batch_size: 4
epochs: 1
grid: {replicas: 2}
strategy: !PSLoadBalancing {staleness: 1}
"""


@needs_mpirun
@pytest.mark.long
def test_run_starts_workers_and_servers(tmp_path):
    """Expect two workers and two servers, all of which end with the command."""
    (tmp_path / "e.yaml").write_text(ASYNCHRONOUS_EXPERIMENT)
    code, out, err = run_command(build_command("run", "e.yaml", "-n", 2, "--output", "out"), tmp_path)
    assert (code, err) == (0, "")
    assert "epoch 1/1" in out
    logs = [(tmp_path / folder / "metrics.jsonl").read_text().splitlines() for folder in ("out", "out/worker-1")]
    records = [json.loads(line) for lines in logs for line in lines]  # a worker that starts last may have none
    assert {record["epoch"] for record in records} == {1}
    assert sum(record["step"] for record in records) == 6  # either worker may take a task
    assert "staleness: 1" in (tmp_path / "out" / "strategy.yaml").read_text()
    assert not [words for words in list_commands(os.getpid()) if "serve" in words]
