"""Benchmark of two jobs of 4 workers on 6 slots: elastic and concurrent, or gang-scheduled one after the other.

python tools/shared_slots.py [--slots 6] [--workers 4] [--seconds 1] [--minibatches 320] [--later 20]

Workers sleep for a fixed time per minibatch, in place of the computation on a separate core or device, so that six
slots can be tested on a machine with fewer cores. The start of a process is not simulated, and takes longer on few
cores. The two pairs of jobs differ only in --num-workers: 1:4 is elastic; 4:4 is a gang, which waits for 4 slots.

The tool prints the makespans, from the submission of the first job to the end of the second, and how long the second
job waits for its first slots after it has imported its libraries and checked its input.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
from model_definition import MODEL_DEFINITION, draw_records, write_csv  # noqa: E402

BATCH_SIZE, RECORDS_PER_TASK, EPOCHS = 8, 4, 2
MAX_MAKESPAN_RATIO, MAX_WAIT_SECONDS = 0.83, 5.0
SLEEPING_FORWARD = """def forward(self, x):
        import pathlib, time

        if self.training and torch.is_grad_enabled() and len(x) == {size}:
            time.sleep({seconds})
"""


@dataclass
class Job:
    """Submitted job."""

    folder: Path
    process: subprocess.Popen[str]
    output: IO[str]
    submitted: float

    def events(self, kind: str) -> list[tuple[float, dict[str, object]]]:
        """Return the events of a kind, with seconds since the submission."""
        path, events = self.folder / "generations.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            event = json.loads(line)
            if event["event"] == kind:
                events.append((datetime.fromisoformat(event["time"]).timestamp() - self.submitted, event))
        return events

    def finish(self) -> None:
        """Wait for the end; exit unless the job has trained each record once per epoch."""
        code = self.process.wait()
        self.output.seek(0)
        text = self.output.read()
        if code or f"in each of {EPOCHS} epochs, each once" not in text:
            sys.exit(f"{self.folder.name}: exit code {code}: {text}")


def submit(folder: Path, name: str, bounds: str) -> Job:
    """Start a job."""
    tasks = ["--minibatch-size", BATCH_SIZE, "--num-minibatches-per-task", RECORDS_PER_TASK, "--num-epochs", EPOCHS]
    servers = ["--distribution-strategy", "ParameterServerStrategy", "--use-async", "--num-ps", 1]
    words = ["train", "model_sleeps.py", "--training-data", "train.csv", *tasks, *servers]
    words += ["--num-workers", bounds, "--hosts-from", "hosts", "--wait", "1h", "--output", name]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    output, submitted = (folder / f"{name}.txt").open("w+"), time.time()
    command = [sys.executable, "-m", "neondist", *map(str, words)]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
    return Job(folder / name, process, output, submitted)


def run_pair(folder: Path, kind: str, bounds: str, later: float) -> tuple[float, Job]:
    """Run two jobs, the second one submitted `later` seconds after the first; return the makespan and the second."""
    first = submit(folder, f"{kind}-1", bounds)
    time.sleep(later)
    second = submit(folder, f"{kind}-2", bounds)
    first.finish()
    second.finish()
    makespan = time.time() - first.submitted
    for name, job in (("first", first), ("second", second)):
        changes = [f"{at:.1f} s: {scale['before']} -> {scale['workers']}" for at, scale in job.events("scale")]
        (slots_time, slots_event), (begin, start) = job.events("slots")[0], job.events("start")[0]
        print(
            f"{kind}, {name} job: {start['workers']} workers started {begin:.1f} s after submission, slots at"
            f" {slots_time:.1f} s after a wait of {slots_event['waited']:.1f} s; {', '.join(changes) or 'no changes'}",
            flush=True,
        )
    return makespan, second


def main() -> int:
    """Run both pairs, print the measurements, and return 1 if they miss the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds that a worker sleeps per minibatch")
    parser.add_argument("--minibatches", type=int, default=320, help="minibatches of each job")
    parser.add_argument("--later", type=float, default=20.0, help="seconds between the two submissions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = MODEL_DEFINITION.replace(
            "def forward(self, x):", SLEEPING_FORWARD.format(size=BATCH_SIZE, seconds=arguments.seconds)
        )
        (folder / "model_sleeps.py").write_text(text)
        (folder / "hosts").write_text(f"localhost:{arguments.slots}\n")
        write_csv(folder / "train.csv", draw_records(arguments.minibatches * BATCH_SIZE // EPOCHS))
        duration = arguments.minibatches * arguments.seconds / arguments.workers
        print(f"each job sleeps for {duration:.0f} s with {arguments.workers} workers", flush=True)
        elastic, second = run_pair(folder, "elastic", f"1:{arguments.workers}", arguments.later)
        waited = second.events("slots")[0][1]["waited"]
        gang, _ = run_pair(folder, "gang", f"{arguments.workers}:{arguments.workers}", arguments.later)
    ratio = elastic / gang
    print(
        f"makespan: elastic {elastic:.1f} s, one after the other {gang:.1f} s, ratio {ratio:.3f} (goal"
        f" {MAX_MAKESPAN_RATIO})"
    )
    assert isinstance(waited, float)
    print(f"elastic, second job: waited {waited:.1f} s for slots (goal {MAX_WAIT_SECONDS:g} s)")
    return int(ratio > MAX_MAKESPAN_RATIO or waited > MAX_WAIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
