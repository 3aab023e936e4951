"""Stress test of asynchronous jobs with killed processes: each record is applied once per epoch.

python tools/elastic_rounds.py [--rounds N] [--seed S] [--kinds worker rank server master supervisor]
                               [--num-workers MIN:MAX] [--digits] [--single-tile]

With MIN:MAX workers, the list of slots changes at random, so that workers are also released and added. With --digits,
the jobs train the digits of the package with 3 workers of 2 tiles and 2 servers, and their error on the test digits
must be at most 3.5 %. A round fails if the job hangs, leaves a process behind, does not succeed, or has not applied
each record once per epoch. After the supervisor is killed, and with it all other processes, the same command with
--resume auto must succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
from model_definition import MODEL_DEFINITION, draw_records, write_csv  # noqa: E402
from processes import is_alive, kill, list_children  # noqa: E402

RECORDS, EPOCHS, BATCH_SIZE = 320, 3, 16
ROUND_TIMEOUT = 900.0
FORKED_TITLES = "neondist-fork", "serve "
VICTIM_KINDS = ("worker", "rank", "server", "master", "supervisor")
SLOW_MODEL = MODEL_DEFINITION.replace(
    "def forward(self, x):", "def forward(self, x):\n        import time\n\n        time.sleep(0.03)"
)
MNIST = "!MNIST {}"
NUM_DIGITS, MAX_ERROR = 10_000, 0.035


def draw_command(rng: random.Random, tiles: str, bounds: str | None, digits: bool) -> list[str]:
    """Return the command line of a job."""
    data = ["model_slow.py", "--training-data", "train.csv", "--minibatch-size", BATCH_SIZE]
    if digits:
        data = ["digits.py", "--training-data", MNIST, "--validation-data", MNIST, "--minibatch-size", 2 * BATCH_SIZE]
    plan = ["--num-epochs", EPOCHS, "--num-minibatches-per-task", rng.choice([1, 3, 8])]
    workers: object = 3 if digits else 2 if tiles != "1x1" else rng.choice([2, 3])
    places = ["--num-workers", bounds or workers, "--num-ps", 2 if digits else rng.choice([1, 2])]
    places += ["--hosts-from", "hosts", "--wait", "1h"] if bounds else []
    strategy = ["--distribution-strategy", "ParameterServerStrategy", "--use-async", "--tiles", tiles]
    words = ["train", *data, *plan, *places, *strategy, "--output", "run", "--checkpoint-steps", rng.choice([0, 1, 10])]
    return [sys.executable, "-m", "neondist", *map(str, words)]


def vary_slots(folder: Path, bounds: str, width: int, rng: random.Random, ended: threading.Event) -> None:
    """Change the number of slots at random intervals, within the slots of MIN to MAX workers."""
    low, high = map(int, bounds.split(":"))
    slots = high
    while True:
        (folder / "new").write_text(f"localhost:{slots * width}\n")
        os.replace(folder / "new", folder / "slots")
        if ended.wait(rng.uniform(1.0, 20.0)):
            return
        slots = rng.randint(low, high)


def find_targets(job: int, kind: str) -> list[int]:
    """Return the pids of a kind of process in a job."""
    try:
        return _targets(job, kind)
    except psutil.Error:  # a process has just ended
        return []


def _targets(job: int, kind: str) -> list[int]:
    if kind == "supervisor":
        return [job]
    processes = psutil.Process(job).children()
    name = {"server": "serve ps", "master": "serve master"}.get(kind, "worker ")  # titles of forked processes
    word = {"server": "ps", "master": "master"}.get(kind, "train")
    matches = [process for process in processes if process.name().startswith(name)] or [
        process
        for process in processes
        if word in _command_words(process) and not process.name().startswith(FORKED_TITLES)
    ]
    if kind != "rank":
        return [process.pid for process in matches]
    ranks = [rank for process in matches for rank in process.children(recursive=True)]
    return [
        one.pid for one in ranks if "train" in _command_words(one) and (up := one.parent()) and "prterun" in up.name()
    ]


def _command_words(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty for a zombie."""
    with suppress(psutil.ZombieProcess):
        return process.cmdline()
    return []


def kill_process_of(job: subprocess.Popen[str], kind: str, rng: random.Random) -> int:
    """Kill processes of a kind at random moments; return their number."""
    killed, count = 0, rng.choice([1, 1, 2, 3]) if kind != "supervisor" else 1
    for _ in range(count):
        moment = time.monotonic() + rng.uniform(0.0, 15.0)
        while job.poll() is None:
            pids = find_targets(job.pid, kind)
            if pids and time.monotonic() > moment:
                kill([rng.choice(pids)])
                killed += 1
                break
            time.sleep(0.02)
    return killed


def run_round(seed: int, kinds: list[str], bounds: str | None, digits: bool, single_tile: bool) -> tuple[str, int, str]:
    """Run a job; return the kind of killed process, the number of kills, and the problem, if any."""
    rng = random.Random(seed)
    kind = rng.choice(kinds)
    with tempfile.TemporaryDirectory() as name:
        folder, ended = Path(name), threading.Event()
        (folder / "model_slow.py").write_text(SLOW_MODEL)
        (folder / "digits.py").write_text((ROOT / "examples" / "mnist_definition.py").read_text())
        write_csv(folder / "train.csv", draw_records(RECORDS))
        (folder / "hosts").write_text("#!/bin/sh\ncat slots\n")
        (folder / "hosts").chmod(0o700)
        tiles = "2x1" if kind == "rank" or digits else rng.choice(["1x1", "1x1", "2x1"])
        tiles = "1x1" if single_tile and kind != "rank" else tiles
        words = draw_command(rng, tiles, bounds, digits)
        thread_arguments = random.Random(seed + 1), ended
        thread = threading.Thread(target=vary_slots, args=(folder, bounds, 1 + (tiles == "2x1"), *thread_arguments))
        if bounds:
            thread.start()
            while not (folder / "slots").exists():
                time.sleep(0.01)
        try:
            killed, code, leftover, text = run_disturbed(folder, words, kind, rng)
        finally:
            ended.set()
            if bounds:
                thread.join()
        changes = text.count("workers: ") if bounds else 0
        succeeded = code == 0 and expected_applied_text(digits) in text and "Traceback" not in text
        problem = leftover or ("" if succeeded else f"exit code {code}: {text}")
        if digits and not problem:
            problem = check_result(folder / "run")
        return f"{kind}, {changes} changes" if bounds else kind, killed, problem


def run_disturbed(folder: Path, words: list[str], kind: str, rng: random.Random) -> tuple[int, int | None, str, str]:
    """Run a command while killing processes; return the number of kills, exit code, leftovers and output."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    pids: set[int] = set()
    with (folder / "output").open("w+") as output:
        job = subprocess.Popen(words, cwd=folder, stdout=output, stderr=output, text=True, env=env)
        if kind == "supervisor":
            while not find_targets(job.pid, "worker") and job.poll() is None:
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 15.0))
            pids |= {pid for pid, _ in list_children(job.pid)}
            killed = kill_process_of(job, kind, random.Random(0))
            if leftover := _find_leftovers(folder, pids):
                return killed, job.poll(), leftover, ""
            if killed:
                job = subprocess.Popen([*words, "--resume", "auto"], cwd=folder, stdout=output, stderr=output, env=env)
        else:
            killed = kill_process_of(job, kind, rng)
        try:
            code = job.wait(ROUND_TIMEOUT)
        except subprocess.TimeoutExpired:
            kill([pid for pid, _ in list_children(job.pid)] + [job.pid])
            return killed, None, "hangs", (folder / "output").read_text()
    return killed, code, _find_leftovers(folder, pids), (folder / "output").read_text()


def expected_applied_text(digits: bool) -> str:
    """Return the message of a job that applied each record once per epoch."""
    return f"applied: {NUM_DIGITS if digits else RECORDS} records in each of {EPOCHS} epochs, each once; "


def check_result(run: Path) -> str:
    """Return a description of a test error above the limit, or ''."""
    error = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation_error"]
    print(f"  error {100 * error:.2f} %", flush=True)
    return "" if error <= MAX_ERROR else f"test error {100 * error:.2f} %, expected at most {100 * MAX_ERROR:g} %"


def _find_leftovers(folder: Path, watched: set[int]) -> str:
    """Wait for the end of a job's processes, and kill the remaining ones; return a description of them."""
    end = time.monotonic() + 60  # workers retry services for some seconds
    while time.monotonic() < end:
        pids = {pid for pid in watched if is_alive(pid)}
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] == str(folder) and is_alive(process.pid):
                pids.add(process.pid)
        if not pids:
            return ""
        time.sleep(0.2)
    kill(pids)
    return f"{len(pids)} processes left behind"


def main() -> int:
    """Run the rounds, print problems, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=VICTIM_KINDS, default=list(VICTIM_KINDS))
    parser.add_argument("--num-workers", metavar="MIN:MAX", help="change the number of workers")
    parser.add_argument("--single-tile", action="store_true", help="use workers of one tile, unless a rank is killed")
    parser.add_argument("--digits", action="store_true", help="train the digits, and check the error")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    kills, failed = 0, 0
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        kind, killed, problem = run_round(
            seed, arguments.kinds, arguments.num_workers, arguments.digits, arguments.single_tile
        )
        counts[kind.partition(",")[0]] += 1
        kills += killed
        failed += bool(problem)
        print(f"seed {seed}: {killed} x {kind}: {problem or 'passed'}", flush=True)
    rounds = ", ".join(f"{count} of {kind}" for kind, count in sorted(counts.items()))
    print(f"{arguments.rounds} rounds ({rounds}), {kills} processes killed, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
