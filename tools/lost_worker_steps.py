"""Benchmark of the step times of the remaining workers before and during the loss of a worker.

python tools/lost_worker_steps.py [--tiles 2x1] [--kills 10] [--seconds 0.1]

The job has three workers and two servers; `feed` sleeps for a fixed time per minibatch, in place of the computation on
separate cores. Workers are killed one after the other. The loss lasts from the kill to the first step of the restarted
worker. For each kill, the tool prints the median step time of the other workers during the loss and during a period of
equal length before it, and their ratio.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tools")]
from elastic_rounds import find_targets  # noqa: E402
from model_definition import MODEL_DEFINITION, draw_records, write_csv  # noqa: E402
from processes import kill, list_children  # noqa: E402

BATCH_SIZE, SETTLED_STEPS = 16, 30
CHECKED_BATCHES = 4
"""Maximum number of minibatches that a process feeds to validate its input, before its first step."""
LOGGED_STEP = """def feed(records, mode):
    import os
    import pathlib
    import time

    with pathlib.Path(f"steps-{{os.getpid()}}").open("a") as file:
        file.write(f"{{time.time()}}\\n")
    time.sleep({seconds})
"""


def read_steps(folder: Path) -> dict[int, list[float]]:
    """Return the times at which each process began a minibatch, by pid."""
    return {
        int(path.name.partition("-")[2]): [float(line) for line in path.read_text().split("\n")[:-1]]
        for path in folder.glob("steps-*")
    }


def step_times(times: list[float], start: float, end: float) -> list[float]:
    """Return the seconds between the steps that a process began within a period."""
    within = [moment for moment in times if start <= moment <= end]
    return [after - before for before, after in itertools.pairwise(within)]


def wait_for_steps(
    job: subprocess.Popen[bytes], folder: Path, started: float, processes: int
) -> dict[int, list[float]]:
    """Wait until `processes` processes have each taken SETTLED_STEPS steps since `started`; return all steps."""
    while job.poll() is None:
        steps = read_steps(folder)
        if sum(sum(moment > started for moment in times) >= SETTLED_STEPS for times in steps.values()) >= processes:
            return steps
        time.sleep(0.1)
    sys.exit((folder / "output").read_text())


def kill_worker(job: subprocess.Popen[bytes], folder: Path, index: int, ranks: int) -> tuple[float, float, float]:
    """Kill a worker; return the seconds of the loss, and the median step times of the others before and during it."""
    known = set(wait_for_steps(job, folder, time.time(), 3 * ranks))
    victims = find_targets(job.pid, "worker")
    victim = victims[index % len(victims)]
    ended = {victim, *(pid for pid, _ in list_children(victim))}
    moment = time.time()
    kill([victim])
    while not (new := [times[CHECKED_BATCHES] for pid, times in read_steps(folder).items()
                       if pid not in known and len(times) > CHECKED_BATCHES]):  # fmt: skip
        time.sleep(0.05)
    restarted = min(new)
    steps = {pid: times for pid, times in read_steps(folder).items() if pid in known - ended}
    before, during = (
        [seconds for times in steps.values() for seconds in step_times(times, start, end)]
        for start, end in ((2 * moment - restarted, moment), (moment, restarted))
    )
    return restarted - moment, statistics.median(before), statistics.median(during)


def main() -> None:
    """Run the job, and print a line per kill and the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiles", choices=("1x1", "2x1"), default="2x1")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, ratios = Path(name), list[float]()
        step = LOGGED_STEP.format(seconds=arguments.seconds)
        (folder / "model.py").write_text(MODEL_DEFINITION.replace("def feed(records, mode):\n", step))
        write_csv(folder / "train.csv", draw_records(100 * BATCH_SIZE))
        data = ["model.py", "--training-data", "train.csv", "--minibatch-size", BATCH_SIZE, "--num-epochs", 1000]
        places = ["--num-workers", 3, "--num-ps", 2, "--tiles", arguments.tiles]
        words = ["train", *data, *places, "--distribution-strategy", "ParameterServerStrategy", "--use-async"]
        with (folder / "output").open("w") as output:
            command = [sys.executable, "-m", "neondist", *map(str, words), "--output", "run"]
            job = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        try:
            for index in range(arguments.kills):
                loss, before, during = kill_worker(job, folder, index, 2 if arguments.tiles == "2x1" else 1)
                ratios.append(during / before)
                print(
                    f"loss of {loss:4.1f} s: step time of the others {1e3 * before:6.1f} ms before,"
                    f" {1e3 * during:6.1f} ms during: {ratios[-1]:.3f}",
                    flush=True,
                )
        finally:
            job.terminate()
            job.wait()
    print(f"{len(ratios)} losses: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
