"""Two jobs that want 4 workers each on 6 slots: elastic at the same time, against one after the other by gang.

python tools/shared_slots.py [--slots 6] [--workers 4] [--seconds 1] [--minibatches 320] [--later 20]

Workers sleep for a fixed time per minibatch, which stands for the computation on a core or a device of their own, so
that six slots can be tried on a machine with fewer cores. Starting a process is real work, though, and takes longer on
few cores. Both pairs run the same command but for --num-workers: 1:4 elastic; 4:4 by gang, which waits for 4 slots.

Printed are the makespans, from the submission of the first job to the end of the second, and how long the second one
waits for its first slots once it asks for them. Before that it imports its libraries and checks its input, as any job.
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
from definitions import MODEL, drawn, write_csv  # noqa: E402

SIZE, PER_TASK, EPOCHS = 8, 4, 2
GOAL, LATEST = 0.83, 5.0
SLEEPS = """def forward(self, x):
        import pathlib, time

        if self.training and torch.is_grad_enabled() and len(x) == {size}:
            time.sleep({seconds})
"""


@dataclass
class Job:
    """A job that was submitted."""

    folder: Path
    process: subprocess.Popen[str]
    output: IO[str]
    submitted: float

    def events(self, kind: str) -> list[tuple[float, dict[str, object]]]:
        """Return the events of a kind, with seconds since the submission."""
        path, found = self.folder / "generations.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            one = json.loads(line)
            if one["event"] == kind:
                found.append((datetime.fromisoformat(one["time"]).timestamp() - self.submitted, one))
        return found

    def finish(self) -> None:
        """Wait for the end, and exit if the job has not trained each record once."""
        code = self.process.wait()
        self.output.seek(0)
        text = self.output.read()
        if code or f"in each of {EPOCHS} epochs, each once" not in text:
            sys.exit(f"{self.folder.name}: exit code {code}: {text}")


def submit(folder: Path, name: str, bounds: str) -> Job:
    """Start a job."""
    tasks = ["--minibatch-size", SIZE, "--num-minibatches-per-task", PER_TASK, "--num-epochs", EPOCHS]
    servers = ["--distribution-strategy", "ParameterServerStrategy", "--use-async", "--num-ps", 1]
    words = ["train", "model_sleeps.py", "--training-data", "train.csv", *tasks, *servers]
    words += ["--num-workers", bounds, "--hosts-from", "hosts", "--wait", "1h", "--output", name]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    output, submitted = (folder / f"{name}.txt").open("w+"), time.time()
    command = [sys.executable, "-m", "neondist", *map(str, words)]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
    return Job(folder / name, process, output, submitted)


def pair(folder: Path, kind: str, bounds: str, later: float) -> tuple[float, Job]:
    """Run two jobs, the second one submitted `later` seconds after the first; return the makespan and the second."""
    first = submit(folder, f"{kind}-1", bounds)
    time.sleep(later)
    second = submit(folder, f"{kind}-2", bounds)
    first.finish()
    second.finish()
    makespan = time.time() - first.submitted
    for name, job in (("first", first), ("second", second)):
        changes = [f"{at:.1f} s: {one['before']} -> {one['workers']}" for at, one in job.events("scale")]
        (asked, slots), (begun, start) = job.events("slots")[0], job.events("start")[0]
        print(
            f"{kind}, {name} job: {start['workers']} workers are started {begun:.1f} s after its submission, slots at"
            f" {asked:.1f} s after a wait of {slots['waited']:.1f} s; {', '.join(changes) or 'no changes'}",
            flush=True,
        )
    return makespan, second


def main() -> int:
    """Run both pairs, print what was measured, and return 1 if it is not what was wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="that a worker sleeps for each minibatch")
    parser.add_argument("--minibatches", type=int, default=320, help="of each job")
    parser.add_argument("--later", type=float, default=20.0, help="seconds between the two submissions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = MODEL.replace("def forward(self, x):", SLEEPS.format(size=SIZE, seconds=arguments.seconds))
        (folder / "model_sleeps.py").write_text(text)
        (folder / "hosts").write_text(f"localhost:{arguments.slots}\n")
        write_csv(folder / "train.csv", drawn(arguments.minibatches * SIZE // EPOCHS))
        each = arguments.minibatches * arguments.seconds / arguments.workers
        print(f"each job sleeps for {each:.0f} s with {arguments.workers} workers", flush=True)
        elastic, second = pair(folder, "elastic", f"1:{arguments.workers}", arguments.later)
        waited = second.events("slots")[0][1]["waited"]
        gang, _ = pair(folder, "gang", f"{arguments.workers}:{arguments.workers}", arguments.later)
    ratio = elastic / gang
    print(f"makespan: elastic {elastic:.1f} s, one after the other {gang:.1f} s, ratio {ratio:.3f} (goal {GOAL})")
    assert isinstance(waited, float)
    print(f"elastic, second job: has waited {waited:.1f} s for slots (goal {LATEST:g} s)")
    return int(ratio > GOAL or waited > LATEST)


if __name__ == "__main__":
    sys.exit(main())
