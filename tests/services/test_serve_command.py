"""`neondist serve ps`, as a process: one message where it cannot start; killed, started again, it goes on."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cli_runs import call, needs_mpirun, neondist
from processes import commands

import neondist as nd
from neondist.cli import main
from neondist.cluster import TaskSpecDef
from neondist.errors import ServiceUnavailableError
from neondist.services.client import ParameterClient
from neondist.services.placement import place
from neondist.services.progress import Credit
from neondist.services.server import serve_role
from neondist.services.wire import TOKEN, ServiceHost, create_token
from neondist.strategies import PS, ParameterSpec


def start(token, *words):
    """Start a server, and return its process and its address."""
    command = [sys.executable, "-m", "neondist", "serve", "ps", *words]
    process = subprocess.Popen(command, env=os.environ | {TOKEN: token}, stdout=subprocess.PIPE, text=True)
    said = process.stdout.readline()
    assert said.startswith("PServer at 127.0.0.1:")
    return process, said.split()[-1]


@pytest.mark.long
def test_a_killed_server_goes_on_from_its_checkpoint(tmp_path):
    token, values = create_token(), {"w": np.zeros(3, "float32")}
    layouts = place(PS().build([ParameterSpec("w", (3,))], 1), 1)
    process, address = start(token, "--checkpoint-dir", str(tmp_path))
    try:
        with ParameterClient([address], layouts, token, "0", patience=0.5) as client:
            client.initialize(values, nd.SGD(1.0))
            client.pull(values)
            client.push({"w": np.full(3, -1.0, "float32")}, credit=Credit(0, 0, 0))
            client.save("one")
            client.push({"w": np.full(3, -5.0, "float32")})
            process.kill()
            process.wait()
            with pytest.raises(ServiceUnavailableError, match="no answer; check its address"):
                client.push({"w": values["w"]})
        process, address = start(token, "--checkpoint-dir", str(tmp_path), "--address", address)
        with ParameterClient([address], layouts, token, "0", patience=20) as client:
            client.load("one", nd.SGD(1.0))
            client.pull(values)
            np.testing.assert_array_equal(values["w"], 1)
            assert client.credits().to_list() == [Credit(0, 0, 0)]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_mistakes_end_with_one_message(monkeypatch, capsys):
    monkeypatch.setenv(TOKEN, create_token())
    with ServiceHost([], "127.0.0.1:0", create_token()) as host:
        assert main(["serve", "ps", "--address", host.address]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{host.address}: cannot listen (Address already in use)" in error
    monkeypatch.delenv(TOKEN)
    assert main(["serve", "ps"]) == 2
    assert "NEONDIST_TOKEN: expected a secret" in capsys.readouterr().err


def test_the_server_of_a_task():
    with serve_role(TaskSpecDef("ps", 0, ps_hosts=["127.0.0.1:0"]), {TOKEN: create_token()}) as host:
        assert host.address.startswith("127.0.0.1:")
    for task in (TaskSpecDef("worker", 0, worker_hosts="a:1,b:1"), TaskSpecDef("ps", 0)):
        with pytest.raises(nd.ConfigError, match="is not a parameter server of the cluster"):
            serve_role(task, {TOKEN: create_token()})


ASYNCHRONOUS = """!FitExperiment
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
def test_a_run_starts_workers_and_servers(tmp_path):
    """Two processes of workers and two of servers; all have ended when the command has."""
    (tmp_path / "e.yaml").write_text(ASYNCHRONOUS)
    code, out, err = call(neondist("run", "e.yaml", "-n", 2, "--output", "out"), tmp_path)
    assert (code, err) == (0, "")
    assert "epoch 1/1" in out
    written = [(tmp_path / folder / "metrics.jsonl").read_text().splitlines() for folder in ("out", "out/worker-1")]
    records = [json.loads(line) for lines in written for line in lines]  # none of a worker that came when all was done
    assert {record["epoch"] for record in records} == {1}
    assert sum(record["step"] for record in records) == 6  # who takes a task first has it
    assert "staleness: 1" in (tmp_path / "out" / "strategy.yaml").read_text()
    assert not [words for words in commands(os.getpid()) if "serve" in words]
