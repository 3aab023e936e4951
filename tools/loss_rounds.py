"""Supervised jobs over three nodes of this machine, each disturbed at random moments, and run to their ends.

python tools/loss_rounds.py [--rounds N] [--first N] [--seed S] [--folder DIR] [--results FILE] [--only KIND]

A round kills a rank, a node's daemon, mpirun or the supervisor (then `--resume auto`), stops a rank, or does two of
these at the same time, once or twice. It fails if the job reports success in between, loses a step that a snapshot had,
leaves a process or a file behind, goes on late, or comes to other weights than a job that nobody disturbed. At the end
it prints, for each kind of event, the seconds to the end of the first step after it. Needs Linux and root.
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
from fake_nodes import FakeNodes, missing  # noqa: E402
from processes import alive  # noqa: E402

from neondist.io.checkpoint.snapshots import folder_of  # noqa: E402
from neondist.io.generation_log import read_events, read_run_key  # noqa: E402

REST = """
batch_size: 10
epochs: 4
dtype: float64
seed: 1
"""
DATA = "dataset: !Synthetic {shape: [9, 8, 2], classes: 4, train: 120, test: 5}\n"
LAYERS = f"""!FitExperiment
{DATA}backend: numpy
model: !ConvnetDist
  layers:
    - !ConvLayerDist {{out_channels: 3, kernel_size: 3, padding: 1, activation: !ReLU {{}}}}
    - !BatchNormLayerDist {{}}
    - !LocalFilteringLayerDist {{out_channels: 3, kernel_size: 2}}
    - !DropoutLayerDist {{rate: 0.2}}
    - !FCLayerDist {{out_features: 4}}
  optimizer: !Adam {{learning_rate: 0.01}}
{REST}"""
TORCH = f"""!FitExperiment
{DATA}model: !TorchModel {{factory: 'nets:net', loss: !TorchLoss {{}}, optimizer: !TorchOptimizer {{name: Adam}}}}
{REST}"""
NETS = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(216, 4))
"""
DIGITS = (ROOT / "yaml" / "mnist_distarray_convnet.yaml").read_text()
DIGITS = DIGITS.replace("\nepochs: 6", "\nepochs: 1\ndtype: float64")
EPOCHS = {"layers": 4, "torch": 4, "digits": 1}
EVENTS = ("rank", "daemon", "mpirun", "supervisor", "stop", "two")
KINDS = ("layers", "torch")  # and "digits", where it is asked for
NODES = ("nodeA", "nodeB", "nodeC")
LEASE, SOON, LIMIT = 2.0, 5.0, 600.0
MORE = {"torch": 10.0}
"""Seconds that a model takes beside: three ranks import PyTorch, and capture the module."""


class Round:
    """One job that is disturbed.

    Parameters
    ----------
    number, seed : int
    base : Path
    patience : float
        Factor by which this machine may be late, for what else it does.
    kinds : sequence of str
        Of models, in turn.
    """

    def __init__(self, number: int, seed: int, base: Path, patience: float, kinds: Sequence[str] = KINDS) -> None:
        self.rng = random.Random(f"{seed} {number}")
        self.number, self.patience = number, patience
        self.kind = kinds[number % len(kinds)]
        self.elastic = number // len(kinds) % 2 > 0
        self.folder = base / f"round-{number}"
        self.faults: list[str] = []
        self.events: list[str] = []
        self.late: list[float] = []
        self.steps: list[float] = []

    def play(self, reference: Path) -> dict[str, Any]:
        """Disturb the job, see it to its end, and return what was found."""
        prepare(self.folder)
        self.nodes = FakeNodes(self.folder, *NODES)
        try:
            job = self.start()
            for _ in range(self.rng.choice([1, 1, 2])):
                job = self.disturb(job)
            code = job.wait(LIMIT)
            if code != 0:
                self.faults.append(f"exit code {code}: {(self.folder / 'log').read_text()[-600:]}")
            else:
                self.compare(reference)
            self.look_for_remains()
        finally:
            self.nodes.end()
        if not self.faults:
            shutil.rmtree(self.folder)
        return {
            "round": self.number, "kind": self.kind, "elastic": self.elastic, "events": self.events,
            "seconds": [round(one, 1) for one in self.late], "first_steps": [round(one, 2) for one in self.steps],
            "load": round(os.getloadavg()[0], 1), "faults": self.faults,
        }  # fmt: skip

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start the job."""
        words = [f"{self.kind}.yaml", "--output", "out", "--snapshot", "1", "--lease", f"{LEASE}s", "--restarts", "9"]
        words += ["--import", "nets.py"] if self.kind == "torch" else []
        words += ["--hosts-from", "hosts", "--elastic", "2:3", "--cool-down", "5s"] if self.elastic else ["-n", "3"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "neondist", "run", *words, *more],
                cwd=self.folder, env=environment(self.folder) | self.nodes.env, stdout=log, stderr=log,
            )  # fmt: skip

    def step(self) -> int:
        """Return the step of the newest snapshot that two nodes have: before, it is not complete."""
        files = folder_of(read_run_key(self.folder / "out")).glob("*.h5")
        copies = Counter(int(path.stem[-10:]) for path in files)
        return max((step for step, count in copies.items() if count > 1), default=-1)

    def disturb(self, job: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Let the job come to a random step, disturb it, and wait until it goes on, or has ended before."""
        aim, end = self.step() + self.rng.randrange(2, 12), time.monotonic() + LIMIT
        while self.step() < aim and job.poll() is None:
            if time.monotonic() > end:
                self.faults.append("makes no step")
                return job
            time.sleep(0.05)
        event = self.rng.choice(EVENTS)
        both = self.rng.sample(EVENTS[:-1], 2) if event == "two" else [event]
        before, resumed, victims, changes = self.step(), self.resumes(), self.nodes.pids("rank"), self.changes()
        self.events.append("+".join(both))
        now = time.time()
        for one in both:
            self.strike(one, job)
        if "supervisor" in both:
            job.wait()
            self.gone(victims)
            now, job = time.time(), self.start("--resume", "auto")
        while len(self.resumes()) == len(resumed):
            if job.poll() is not None:
                if job.returncode == 0 and len(self.resumes()) == len(resumed) and not self.ended():
                    self.faults.append(f"{both}: reported as success")
                return job
            if time.monotonic() > end:
                self.faults.append(f"{both}: does not go on")
                return job
            time.sleep(0.05)
        found = self.resumes()[len(resumed)]
        while self.step() <= found["step"] and job.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        lease = LEASE if both == ["stop"] else 0  # beside another event it is ended with the others, at once
        first = time.time() - now - lease
        late = datetime.fromisoformat(found["time"]).timestamp() - now - lease
        self.gone(victims)
        self.late.append(late)
        self.steps.append(first)
        if self.changes() > changes:
            self.events[-1] += ", growth"
        elif first > (SOON + MORE.get(self.kind, 0.0)) * self.patience:
            self.faults.append(f"{both}: went on after {late:.1f} s, and the first step was over after {first:.1f} s")
        if found["step"] < before:
            self.faults.append(f"{both}: goes on at step {found['step']}, and step {before} was there")
        return job

    def strike(self, event: str, job: subprocess.Popen[bytes]) -> None:
        """Kill or stop something."""
        if event == "supervisor":
            job.kill()
            return
        kind = {"daemon": "daemon", "mpirun": "mpirun"}.get(event, "rank")
        pids = self.nodes.pids(kind)
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.rng.choice(pids), signal.SIGSTOP if event == "stop" else signal.SIGKILL)

    def ended(self) -> bool:
        """Whether the run is complete: nothing was there to be disturbed."""
        metrics = self.folder / "out" / "metrics.jsonl"
        return metrics.exists() and metrics.read_text().count("\n") == EPOCHS[self.kind]

    def resumes(self) -> list[dict[str, object]]:
        """Return the log's notes on where generations went on."""
        return [one for one in read_events(self.folder / "out") if one["event"] == "resume"]

    def changes(self) -> int:
        """Return how often the job has followed a change of its hosts."""
        return sum(one["event"] == "hosts" for one in read_events(self.folder / "out"))

    def gone(self, pids: list[int]) -> None:
        """Ranks of the generation before are gone soon."""
        end = time.monotonic() + SOON * self.patience
        while left := [pid for pid in pids if alive(pid)]:
            if time.monotonic() > end:
                self.faults.append(f"ranks are left: {left}")
                return
            time.sleep(0.05)

    def look_for_remains(self) -> None:
        """Nothing is left: no process, nothing in /dev/shm and in the temporary folder."""
        end = time.monotonic() + 15
        while True:
            left = [str(path) for path in (self.folder / "tmp").iterdir()] + [
                str(one) for one in self.nodes.processes()
            ]
            left += [str(one) for one in [folder_of(read_run_key(self.folder / "out"))] if one.exists()]
            if not left:
                return
            if time.monotonic() > end:
                self.faults.append(f"left: {left}")
                return
            time.sleep(0.2)

    def compare(self, reference: Path) -> None:
        """The weights are those of a job that nobody disturbed."""
        tolerance = 1e-10 if self.elastic else 0.0
        with h5py.File(self.folder / "out" / "checkpoint.h5") as here, h5py.File(reference) as there:

            def look(name: str, item: object) -> None:
                if isinstance(item, h5py.Dataset) and not np.allclose(item[()], here[name][()], tolerance, tolerance):
                    self.faults.append(f"other weights: {name}")

            for group in ("model", "optimizer"):
                there[group].visititems(lambda name, item, group=group: look(f"{group}/{name}", item))


def prepare(folder: Path) -> None:
    """Make the folder of a job."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    for name, text in {"layers.yaml": LAYERS, "torch.yaml": TORCH, "digits.yaml": DIGITS, "nets.py": NETS}.items():
        (folder / name).write_text(text)


def environment(folder: Path) -> dict[str, str]:
    """Return variables of a job, with a temporary folder of its own."""
    more = {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    return {**os.environ, **more, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def undisturbed(kind: str, base: Path) -> Path:
    """Return the last checkpoint of a job that nobody disturbs."""
    folder = base / f"reference-{kind}"
    prepare(folder)
    words = [f"{kind}.yaml", "-n", "3", "--output", "out", *(["--import", "nets.py"] if kind == "torch" else [])]
    subprocess.run(
        [sys.executable, "-m", "neondist", "run", *words], cwd=folder, env=environment(folder), check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder / "out" / "checkpoint.h5"


def summarise(rounds: Sequence[dict[str, Any]]) -> str:
    """Return, for each kind of event, how often it was and the seconds to the end of the first step after it."""
    seconds: dict[str, list[float]] = {}
    for one in rounds:
        for event, first in zip(one["events"], one["first_steps"], strict=False):
            event, _, growth = event.partition(",")
            seconds.setdefault(growth.strip() or ("two" if "+" in event else event), []).append(first)
    lines = [
        f"seconds from an event to the end of the first step after it; a stopped rank: beyond its lease of {LEASE:g} s;"
        " growth: the job has got a host back before that step"
    ]
    for event, found in sorted(seconds.items()):
        lines.append(f"{event:>10}  {len(found):3} times  median {median(found):5.2f}  maximum {max(found):5.2f}")
    every = [first for found in seconds.values() for first in found]
    loads = [one["load"] for one in rounds]
    if every:
        lines.append(f"{'all':>10}  {len(every):3} times  median {median(every):5.2f}  maximum {max(every):5.2f}")
        lines.append(f"load of {os.cpu_count()} cores: {min(loads)} to {max(loads)}")
    return "\n".join(lines)


def main() -> int:
    """Play all rounds; return 1 if any has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("loss_rounds"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--patience", type=float, default=1.0, help="factor for all limits of time, on a busy machine")
    parser.add_argument("--only", choices=(*KINDS, "digits"), help="models of one kind alone")
    arguments = parser.parse_args()
    if why := missing():
        parser.error(why)
    base = arguments.folder.resolve()
    base.mkdir(parents=True, exist_ok=True)
    kinds = [arguments.only] if arguments.only else KINDS
    references = {kind: undisturbed(kind, base) for kind in kinds}
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.first, arguments.first + arguments.rounds):
        one = Round(number, arguments.seed, base, arguments.patience, kinds)
        found = one.play(references[one.kind])
        rounds.append(found)
        print(json.dumps(found), flush=True)
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    failed = sum(bool(one["faults"]) for one in rounds)
    print(summarise(rounds))
    print(f"{failed} of {arguments.rounds} rounds failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
