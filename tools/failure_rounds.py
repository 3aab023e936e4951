"""Stress test of supervised jobs on three simulated nodes, with random failures.

python tools/failure_rounds.py [--rounds N] [--first N] [--seed S] [--folder DIR] [--results FILE] [--only KIND]

A round causes one failure, or two at the same time, once or twice: it kills a rank, the daemon of a node, mpirun or the
supervisor (and resumes with `--resume auto`), or stops a rank. A round fails if the job reports success prematurely,
loses a step of a snapshot, leaves a process or a file behind, resumes late, or ends with weights that differ from those
of an undisturbed job. At the end, the tool prints the seconds from each kind of event to the end of the first step
after it. Requires Linux and root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
from fake_nodes import FakeNodes, find_obstacle  # noqa: E402
from processes import is_alive  # noqa: E402

from neondist.io.checkpoint.snapshots import snapshot_folder  # noqa: E402
from neondist.io.run_event_log import read_events, read_run_key  # noqa: E402

FILE_TAIL = """
batch_size: 10
epochs: 4
dtype: float64
seed: 1
"""
DATA = "dataset: !Synthetic {shape: [9, 8, 2], classes: 4, train: 120, test: 5}\n"
LAYERS_FILE = f"""!FitExperiment
{DATA}backend: numpy
model: !ConvnetDist
  layers:
    - !ConvLayerDist {{out_channels: 3, kernel_size: 3, padding: 1, activation: !ReLU {{}}}}
    - !BatchNormLayerDist {{}}
    - !LocalFilteringLayerDist {{out_channels: 3, kernel_size: 2}}
    - !DropoutLayerDist {{rate: 0.2}}
    - !FCLayerDist {{out_features: 4}}
  optimizer: !Adam {{learning_rate: 0.01}}
{FILE_TAIL}"""
TORCH_FILE = f"""!FitExperiment
{DATA}model: !TorchModel {{factory: 'nets:net', loss: !TorchLoss {{}}, optimizer: !TorchOptimizer {{name: Adam}}}}
{FILE_TAIL}"""
NETS_MODULE = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(216, 4))
"""
DIGITS_FILE = (ROOT / "yaml" / "mnist_distarray_convnet.yaml").read_text()
DIGITS_FILE = DIGITS_FILE.replace("\nepochs: 6", "\nepochs: 1\ndtype: float64")
EPOCHS = {"layers": 4, "torch": 4, "digits": 1}
EVENTS = ("rank", "daemon", "mpirun", "supervisor", "stop", "two")
KINDS = ("layers", "torch")  # and "digits" with --only
NODES = ("nodeA", "nodeB", "nodeC")
LEASE, NOTICE_SECONDS, ROUND_TIMEOUT = 2.0, 5.0, 600.0
STARTUP_SECONDS = {"torch": 10.0}
"""Additional seconds of a model: three ranks import PyTorch and capture the module."""


class Round:
    """Job with random failures.

    Parameters
    ----------
    number, seed : int
    base : Path
    patience : float
        Factor by which time limits are multiplied, for a busy machine.
    kinds : sequence of str
        Kinds of models, used in turn.
    """

    def __init__(self, number: int, seed: int, base: Path, patience: float, kinds: Sequence[str] = KINDS) -> None:
        self.rng = random.Random(f"{seed} {number}")
        self.number, self.patience = number, patience
        self.kind = kinds[number % len(kinds)]
        self.elastic = number // len(kinds) % 2 > 0
        self.folder = base / f"round-{number}"
        self.faults: list[str] = []
        self.events: list[str] = []
        self.resume_seconds: list[float] = []
        self.first_step_seconds: list[float] = []

    def play(self, reference: Path) -> dict[str, Any]:
        """Run the job with failures to its end, and return the result."""
        prepare(self.folder)
        self.nodes = FakeNodes(self.folder, *NODES)
        try:
            job = self.start()
            for _ in range(self.rng.choice([1, 1, 2])):
                job = self.disturb(job)
            code = job.wait(ROUND_TIMEOUT)
            if code != 0:
                self.faults.append(f"exit code {code}: {(self.folder / 'log').read_text()[-600:]}")
            else:
                self.compare(reference)
            self.check_remains()
        finally:
            self.nodes.end()
        if not self.faults:
            shutil.rmtree(self.folder)
        return {
            "round": self.number, "kind": self.kind, "elastic": self.elastic, "events": self.events,
            "seconds": [round(t, 1) for t in self.resume_seconds],
            "first_steps": [round(t, 2) for t in self.first_step_seconds],
            "load": round(os.getloadavg()[0], 1), "faults": self.faults,
        }  # fmt: skip

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the job."""
        words = [f"{self.kind}.yaml", "--output", "out", "--snapshot", "1", "--lease", f"{LEASE}s", "--restarts", "9"]
        words += ["--import", "nets.py"] if self.kind == "torch" else []
        words += ["--hosts-from", "hosts", "--elastic", "2:3", "--cooldown", "5s"] if self.elastic else ["-n", "3"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "neondist", "run", *words, *options],
                cwd=self.folder, env=job_environment(self.folder) | self.nodes.env, stdout=log, stderr=log,
            )  # fmt: skip

    def newest_step(self) -> int:
        """Return the step of the newest complete snapshot, that is, one stored on two nodes."""
        files = snapshot_folder(read_run_key(self.folder / "out")).glob("*.h5")
        copies = Counter(int(path.stem[-10:]) for path in files)
        return max((step for step, count in copies.items() if count > 1), default=-1)

    def disturb(self, job: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Disturb the job at a random step, and wait until it resumes or ends."""
        target_step, end = self.newest_step() + self.rng.randrange(2, 12), time.monotonic() + ROUND_TIMEOUT
        while self.newest_step() < target_step and job.poll() is None:
            if time.monotonic() > end:
                self.faults.append("no progress")
                return job
            time.sleep(0.05)
        event = self.rng.choice(EVENTS)
        events = self.rng.sample(EVENTS[:-1], 2) if event == "two" else [event]
        step, resumed, victims = self.newest_step(), self.resumes(), self.nodes.pids("rank")
        host_changes = self.count_host_changes()
        self.events.append("+".join(events))
        now = time.time()
        for name in events:
            self.trigger(name, job)
        if "supervisor" in events:
            job.wait()
            self.check_ended(victims)
            now, job = time.time(), self.start("--resume", "auto")
        while len(self.resumes()) == len(resumed):
            if job.poll() is not None:
                if job.returncode == 0 and len(self.resumes()) == len(resumed) and not self.is_complete():
                    self.faults.append(f"{events}: reported as success")
                return job
            if time.monotonic() > end:
                self.faults.append(f"{events}: does not resume")
                return job
            time.sleep(0.05)
        resume = self.resumes()[len(resumed)]
        while self.newest_step() <= resume["step"] and job.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        lease = LEASE if events == ["stop"] else 0  # with another event, the stopped rank is killed at once
        first = time.time() - now - lease
        delay = datetime.fromisoformat(resume["time"]).timestamp() - now - lease
        self.check_ended(victims)
        self.resume_seconds.append(delay)
        self.first_step_seconds.append(first)
        if self.count_host_changes() > host_changes:
            self.events[-1] += ", growth"
        elif first > (NOTICE_SECONDS + STARTUP_SECONDS.get(self.kind, 0.0)) * self.patience:
            self.faults.append(f"{events}: resumed after {delay:.1f} s, and the first step ended after {first:.1f} s")
        if resume["step"] < step:
            self.faults.append(f"{events}: resumes at step {resume['step']}, but step {step} was saved")
        return job

    def trigger(self, event: str, job: subprocess.Popen[bytes]) -> None:
        """Cause a failure."""
        if event == "supervisor":
            job.kill()
            return
        kind = {"daemon": "daemon", "mpirun": "mpirun"}.get(event, "rank")
        pids = self.nodes.pids(kind)
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.rng.choice(pids), signal.SIGSTOP if event == "stop" else signal.SIGKILL)

    def is_complete(self) -> bool:
        """Return whether the run was complete before the failure."""
        metrics = self.folder / "out" / "metrics.jsonl"
        return metrics.exists() and metrics.read_text().count("\n") == EPOCHS[self.kind]

    def resumes(self) -> list[dict[str, object]]:
        """Return the resume events of the log."""
        return [event for event in read_events(self.folder / "out") if event["event"] == "resume"]

    def count_host_changes(self) -> int:
        """Return the number of changes of hosts in the log."""
        return sum(event["event"] == "hosts" for event in read_events(self.folder / "out"))

    def check_ended(self, pids: list[int]) -> None:
        """Check that the ranks of the previous generation end in time."""
        end = time.monotonic() + NOTICE_SECONDS * self.patience
        while remaining := [pid for pid in pids if is_alive(pid)]:
            if time.monotonic() > end:
                self.faults.append(f"ranks left behind: {remaining}")
                return
            time.sleep(0.05)

    def check_remains(self) -> None:
        """Check that no process, shared memory or temporary file is left."""
        end = time.monotonic() + 15
        while True:
            remains = [str(path) for path in (self.folder / "tmp").iterdir()] + [
                str(process) for process in self.nodes.processes()
            ]
            remains += [str(path) for path in [snapshot_folder(read_run_key(self.folder / "out"))] if path.exists()]
            if not remains:
                return
            if time.monotonic() > end:
                self.faults.append(f"left behind: {remains}")
                return
            time.sleep(0.2)

    def compare(self, reference: Path) -> None:
        """Compare the weights with those of an undisturbed job."""
        tolerance = 1e-10 if self.elastic else 0.0
        with h5py.File(self.folder / "out" / "checkpoint.h5") as actual, h5py.File(reference) as expected:

            def compare_array(name: str, item: object) -> None:
                if isinstance(item, h5py.Dataset) and not np.allclose(item[()], actual[name][()], tolerance, tolerance):
                    self.faults.append(f"different weights: {name}")

            for group in ("model", "optimizer"):
                expected[group].visititems(lambda name, item, group=group: compare_array(f"{group}/{name}", item))


def prepare(folder: Path) -> None:
    """Create the folder of a job."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    for name, text in {
        "layers.yaml": LAYERS_FILE,
        "torch.yaml": TORCH_FILE,
        "digits.yaml": DIGITS_FILE,
        "nets.py": NETS_MODULE,
    }.items():
        (folder / name).write_text(text)


def job_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a job, with its own temporary folder."""
    variables = {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    return {**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run_undisturbed(kind: str, base: Path) -> Path:
    """Run a job without failures; return its last checkpoint."""
    folder = base / f"reference-{kind}"
    prepare(folder)
    words = [f"{kind}.yaml", "-n", "3", "--output", "out", *(["--import", "nets.py"] if kind == "torch" else [])]
    subprocess.run(
        [sys.executable, "-m", "neondist", "run", *words], cwd=folder, env=job_environment(folder), check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder / "out" / "checkpoint.h5"


def summarise(rounds: Sequence[dict[str, Any]]) -> str:
    """Return the number of each kind of event, and the seconds to the end of the first step after it."""
    seconds: dict[str, list[float]] = {}
    for result in rounds:
        for event, first_step in zip(result["events"], result["first_steps"], strict=False):
            event, _, growth = event.partition(",")
            seconds.setdefault(growth.strip() or ("two" if "+" in event else event), []).append(first_step)
    lines = [
        f"seconds from an event to the end of the first step after it; a stopped rank: after its lease of"
        f" {LEASE:g} s expired; growth: the job regained a host before that step"
    ]
    for event, times in sorted(seconds.items()):
        lines.append(f"{event:>10}  {len(times):3} times  median {median(times):5.2f}  maximum {max(times):5.2f}")
    total = [first_step for times in seconds.values() for first_step in times]
    loads = [result["load"] for result in rounds]
    if total:
        lines.append(f"{'all':>10}  {len(total):3} times  median {median(total):5.2f}  maximum {max(total):5.2f}")
        lines.append(f"load of {os.cpu_count()} cores: {min(loads)} to {max(loads)}")
    return "\n".join(lines)


def main() -> int:
    """Run all rounds; return 1 if any has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("failure_rounds"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--patience", type=float, default=1.0, help="factor by which all time limits are multiplied")
    parser.add_argument("--only", choices=(*KINDS, "digits"), help="run only models of this kind")
    arguments = parser.parse_args()
    if reason := find_obstacle():
        parser.error(reason)
    base = arguments.folder.resolve()
    base.mkdir(parents=True, exist_ok=True)
    kinds = [arguments.only] if arguments.only else KINDS
    references = {kind: run_undisturbed(kind, base) for kind in kinds}
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.first, arguments.first + arguments.rounds):
        round_ = Round(number, arguments.seed, base, arguments.patience, kinds)
        result = round_.play(references[round_.kind])
        rounds.append(result)
        print(json.dumps(result), flush=True)
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
    failed = sum(bool(result["faults"]) for result in rounds)
    print(summarise(rounds))
    print(f"{failed} of {arguments.rounds} rounds failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
