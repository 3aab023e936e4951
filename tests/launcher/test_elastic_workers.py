"""Elastic run with servers: a worker joins in the second epoch, and leaves for another job before the end."""

import json
import threading

import pytest
from cli_runs import run_in_process
from model_definition import MODEL_DEFINITION, draw_records, write_csv
from waiting import wait_until

pytest.importorskip("torch")

from neondist.io.run_event_log import read_events
from neondist.launcher.slots import SharedSlotTable, WorkerBounds, shared_slots_folder
from neondist.services.job_status import STATUS_FILE, JobStatus

SLOW_FORWARD = """def forward(self, x):
        import os, pathlib, time

        worker, self.calls = os.environ.get("NEONDIST_WORKER", ""), getattr(self, "calls", 0) + 1
        if worker:
            pathlib.Path("started").touch()
        end = time.monotonic() + 60
        while worker == "0" and self.calls > 20 and not os.path.exists("joined") and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.05 if worker == "0" else 0.1)
"""


def count_steps_of_second_worker(folder):
    return JobStatus.read(folder).workers.get("worker-00001", 0) if (folder / STATUS_FILE).exists() else 0


def read_scalings(folder):
    return [(event["before"], event["workers"]) for event in read_events(folder) if event["event"] == "scale"]


@pytest.mark.long
def test_worker_joins_and_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("NEONDIST_TESTS_HIDE", "matplotlib")
    (tmp_path / "model_slow.py").write_text(MODEL_DEFINITION.replace("def forward(self, x):", SLOW_FORWARD))
    write_csv(tmp_path / "train.csv", draw_records(64))
    (tmp_path / "slots").write_text("localhost:2\n")
    bounds = "--num-workers", "1:2", "--num-ps", "1", "--hosts-from", "slots"
    tasks = "--minibatch-size", "4", "--num-epochs", "6", "--num-minibatches-per-task", "2", "--output", "run"
    strategy = "--distribution-strategy", "ParameterServerStrategy", "--use-async"
    occupied = threading.Event()

    def occupy_slots():
        """Emulate a job that ends once the run has started, and a third one once its second worker trains."""
        with SharedSlotTable(WorkerBounds(1, 1), shared_slots_folder()) as second:
            assert second.take_slots({"localhost": 2})
            occupied.set()
            wait_until((tmp_path / "started").exists, 100)
        wait_until(lambda: count_steps_of_second_worker(tmp_path / "run/servers") > 0, 100)
        (tmp_path / "joined").touch()
        with SharedSlotTable(WorkerBounds(1, 1), shared_slots_folder()) as third:
            wait_until(lambda: third.take_slots({"localhost": 2}), 100)
            finished.wait(100)

    finished = threading.Event()
    other_jobs = threading.Thread(target=occupy_slots, daemon=True)
    other_jobs.start()
    assert occupied.wait(10)
    words = "train", "model_slow.py", "--training-data", "train.csv", *tasks, *bounds, *strategy
    code, out, err = run_in_process(tmp_path, *words)
    finished.set()
    assert code == 0, err
    assert "applied: 64 records in each of 6 epochs, each once; 0 workers restarted" in out, err
    assert "workers: 1 -> 2 (slots are free)\n" in err
    assert "workers: 2 -> 1 (another job is waiting)\n" in err
    assert read_scalings(tmp_path / "run") == [(1, 2), (2, 1)]
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3, 4, 5, 6]
