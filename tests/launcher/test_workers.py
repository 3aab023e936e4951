"""Workers and servers of a run: killed processes are restarted, and each record is applied once."""

import json
import re

import pytest
from cli_runs import build_command, run_command

import neondist as nd
from neondist.cli import main
from neondist.config import load_experiment
from neondist.errors import ServiceUnavailableError
from neondist.launcher import workers
from neondist.services.job_status import JobStatus
from neondist.services.message import Message

EXPERIMENT = """!FitExperiment
dataset: !Synthetic {shape: [6, 6, 1], classes: 2, train: 48, test: 4}
model: !ConvnetDist {layers: [!FCLayerDist {out_features: 2, activation: !Fails {}}], optimizer: !SGD {momentum: 0.5}}
grid: {replicas: 2}
batch_size: 4
epochs: 2
strategy: !PS {sync: false}
"""
FAILING_MODULE = """
import contextlib
import os
import signal
import time

import psutil

import neondist as nd

KILLS = {3: "worker", 5: "ps", 8: "master"}


class Fails(nd.Activation):
    "The identity; kills a worker in its third batch, later a server and the master, each once."
    batches = 0

    def fprop(self, z):
        self.batches += 1
        time.sleep(0.05)
        kind = KILLS.get(self.batches)
        if kind is not None:
            try:
                os.close(os.open(f"killed-{kind}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return z
            for process in [psutil.Process()] if kind == "worker" else psutil.Process(os.getppid()).children():
                with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, such as a killed worker
                    if kind == "worker" or kind in process.cmdline():
                        process.send_signal(signal.SIGKILL)
        return z

    def bprop(self, y, dy):
        return dy
"""


@pytest.mark.long
def test_killed_processes_are_restarted_and_the_run_resumes(tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(EXPERIMENT)
    (tmp_path / "fails.py").write_text(FAILING_MODULE)
    words = "run", "job.yaml", "--import", "fails.py", "-n", 2, "--output", "run"
    code, out, err = run_command(build_command(*words), tmp_path)
    assert code == 0, err
    for name in (r"worker \d", "parameter server 0", "parameter server 1", "master"):
        assert len(re.findall(rf"{name} was killed \(SIGKILL\); restarted", err)) == 1, err
    assert "applied: 48 records in each of 2 epochs, each once; 1 worker and " in out, err
    assert {path.name for path in tmp_path.glob("killed-*")} == {"killed-worker", "killed-ps", "killed-master"}
    assert (tmp_path / "run/complete.json").exists()

    status = JobStatus.read(tmp_path / "run/servers")
    assert status.ended
    assert status.tasks["doing"] == status.tasks["todo"] == 0 < status.tasks["done"]
    assert [(server.version, server.samples) for server in status.servers] == [(24, 96)] * 2
    assert main(["top", str(tmp_path / "run"), "--once"]) == 0
    assert "the job has ended" in capsys.readouterr().out

    code, out, err = run_command(build_command(*words), tmp_path)
    assert code == 2
    assert "has a run already; resume it (--resume)" in err
    code, out, err = run_command(build_command(*words, "--resume", "--set", "epochs=3"), tmp_path)
    assert code == 0, err
    assert "applied: 48 records in each of 3 epochs, each once; 0 workers restarted" in out, err
    record = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    job = record["job"]
    assert min(record["train_loss"], job["train_loss"]) > 0
    assert job["workers"] in (1, 2), "one worker may have ended"
    assert sum(job["tasks"].values()) == 36
    assert len(job["server_versions"]) == 2 <= min(job["server_versions"])
    assert job["samples_per_second"] >= 0
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    for words in ("Workers and servers", "tasks done", "samples/s of all workers", "At the end", "parameters", "start"):
        assert words in page


def test_servers_need_several_replicas(tmp_path, capsys):
    text = EXPERIMENT.replace(", activation: !Fails {}", "").replace("grid: {replicas: 2}\n", "")
    (tmp_path / "job.yaml").write_text(text)
    assert main(["run", str(tmp_path / "job.yaml"), "-n", "1", "--output", str(tmp_path / "run")]) == 2
    message = "neondist run FILE.yaml -n P starts if P ranks form several replicas"
    assert f"strategy: needs servers, which {message}; use sync: true" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(nd.ConfigError, match=f"need workers and servers, which {message}; elsewhere use sync: true"):
        load_experiment(tmp_path / "job.yaml").run(nd.ProcessGrid.serial())


@pytest.mark.parametrize("restored_by", ["credits", "status", None])
def test_final_check_waits_for_a_restarted_server(monkeypatch, restored_by):
    """A server killed after the last update has no records until the master has restored it from its checkpoint."""
    called = []

    def call_service(address, service, token, method, fields=None):
        called.append(method)  # the client repeats `credits` until the server has a model
        is_restored = restored_by in called
        replies = {
            "credits": {"credits": {}},
            "status": {"initialized": is_restored, "samples": 8.0 if is_restored else 0.0},
            "check": {"text": f"{(fields or {}).get('samples')} records"},
        }
        return Message(replies[method])

    monkeypatch.setattr(workers, "_call_service", call_service)
    if restored_by is None:
        with pytest.raises(ServiceUnavailableError, match="server was restarted"):
            workers._check_applied_once("master", ["server"], "token")
    else:
        assert workers._check_applied_once("master", ["server"], "token") == "8.0 records"
