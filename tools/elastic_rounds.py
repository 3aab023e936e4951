"""Asynchronous jobs of workers and servers, some of whose processes are killed: each record is applied once an epoch.

python tools/elastic_rounds.py [--rounds N] [--seed S] [--kinds worker rank server master supervisor]
                               [--num-workers MIN:MAX] [--digits] [--whole]

With MIN:MAX workers, the list of slots changes at random meanwhile, so that workers end and start besides. With
--digits the jobs train the digits of the package, and their error on the test digits must be at most 3.5 %.
A round fails if the job hangs, leaves a process behind, or does not end with success and the servers' counters at one
for each record and epoch. Where the supervisor is killed, and with it all others, the same command with --resume auto
has to end so.
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
from definitions import MODEL, drawn, write_csv  # noqa: E402
from processes import alive, children, kill  # noqa: E402

RECORDS, EPOCHS, SIZE = 320, 3, 16
LIMIT = 900.0
FORKED = "neondist-fork", "serve "
KINDS = ("worker", "rank", "server", "master", "supervisor")
SLOW = MODEL.replace("def forward(self, x):", "def forward(self, x):\n        import time\n\n        time.sleep(0.03)")
MNIST = "!MNIST {}"
DIGITS, MOST_ERROR = 10_000, 0.035


def command(rng: random.Random, tiles: str, bounds: str | None, digits: bool) -> list[str]:
    """Return the command of a job."""
    data = ["model_slow.py", "--training-data", "train.csv", "--minibatch-size", SIZE]
    if digits:
        data = ["digits.py", "--training-data", MNIST, "--validation-data", MNIST]
    more = ["--num-epochs", EPOCHS, "--num-minibatches-per-task", rng.choice([1, 3, 8])]
    workers: object = 2 if tiles != "1x1" else rng.choice([2, 3])
    places = ["--num-workers", bounds or workers, "--num-ps", rng.choice([1, 2])]
    places += ["--hosts-from", "hosts", "--wait", "1h"] if bounds else []
    strategy = ["--distribution-strategy", "ParameterServerStrategy", "--use-async", "--tiles", tiles]
    words = ["train", *data, *more, *places, *strategy, "--output", "run", "--checkpoint-steps", rng.choice([0, 1, 10])]
    return [sys.executable, "-m", "neondist", *map(str, words)]


def vary_slots(folder: Path, bounds: str, width: int, rng: random.Random, ended: threading.Event) -> None:
    """List other numbers of slots now and then, which are enough for MIN to MAX workers."""
    low, high = map(int, bounds.split(":"))
    slots = high
    while True:
        (folder / "new").write_text(f"localhost:{slots * width}\n")
        os.replace(folder / "new", folder / "slots")
        if ended.wait(rng.uniform(1.0, 20.0)):
            return
        slots = rng.randint(low, high)


def targets(job: int, kind: str) -> list[int]:
    """Return the processes of a kind in a job."""
    try:
        return _targets(job, kind)
    except psutil.Error:  # one has just ended
        return []


def _targets(job: int, kind: str) -> list[int]:
    if kind == "supervisor":
        return [job]
    found = psutil.Process(job).children()
    name = {"server": "serve ps", "master": "serve master"}.get(kind, "worker ")  # if they are forked
    if top := [one for one in found if one.name().startswith(name)]:
        return [one.pid for one in top]
    word = {"server": "ps", "master": "master"}.get(kind, "train")
    top = [one for one in found if word in _words(one) and not one.name().startswith(FORKED)]
    if kind != "rank":
        return [one.pid for one in top]
    inner = [rank for one in top for rank in one.children(recursive=True)]
    return [one.pid for one in inner if "train" in _words(one) and (up := one.parent()) and "prterun" in up.name()]


def _words(process: psutil.Process) -> list[str]:
    """Return the words of a command; a zombie has none."""
    with suppress(psutil.ZombieProcess):
        return process.cmdline()
    return []


def disturb(job: subprocess.Popen[str], kind: str, rng: random.Random) -> int:
    """Kill processes of a kind at random moments, and return how many."""
    killed, many = 0, rng.choice([1, 1, 2, 3]) if kind != "supervisor" else 1
    for _ in range(many):
        moment = time.monotonic() + rng.uniform(0.0, 15.0)
        while job.poll() is None:
            found = targets(job.pid, kind)
            if found and time.monotonic() > moment:
                kill([rng.choice(found)])
                killed += 1
                break
            time.sleep(0.02)
    return killed


def round_of(seed: int, kinds: list[str], bounds: str | None, digits: bool, whole: bool) -> tuple[str, int, str]:
    """Run a job and return what was killed, how often, and what is wrong."""
    rng = random.Random(seed)
    kind = rng.choice(kinds)
    with tempfile.TemporaryDirectory() as name:
        folder, ended = Path(name), threading.Event()
        (folder / "model_slow.py").write_text(SLOW)
        (folder / "digits.py").write_text((ROOT / "examples" / "mnist_definition.py").read_text())
        write_csv(folder / "train.csv", drawn(RECORDS))
        (folder / "hosts").write_text("#!/bin/sh\ncat slots\n")
        (folder / "hosts").chmod(0o700)
        tiles = "2x1" if kind == "rank" else "1x1" if whole else rng.choice(["1x1", "1x1", "2x1"])
        words = command(rng, tiles, bounds, digits)
        varied = random.Random(seed + 1), ended
        varying = threading.Thread(target=vary_slots, args=(folder, bounds, 1 + (tiles == "2x1"), *varied))
        if bounds:
            varying.start()
            while not (folder / "slots").exists():
                time.sleep(0.01)
        try:
            killed, code, left, text = disturbed(folder, words, kind, rng)
        finally:
            ended.set()
            if bounds:
                varying.join()
        changes = text.count("workers: ") if bounds else 0
        good = code == 0 and applied(digits) in text and "Traceback" not in text
        problem = left or ("" if good else f"exit code {code}: {text}")
        if digits and not problem:
            problem = judge(folder / "run")
        return f"{kind}, {changes} changes" if bounds else kind, killed, problem


def disturbed(folder: Path, words: list[str], kind: str, rng: random.Random) -> tuple[int, int | None, str, str]:
    """Run a command of which processes are killed; return how many, its exit code, what is left, and its output."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    watched: set[int] = set()
    with (folder / "output").open("w+") as output:
        job = subprocess.Popen(words, cwd=folder, stdout=output, stderr=output, text=True, env=env)
        if kind == "supervisor":
            while not targets(job.pid, "worker") and job.poll() is None:
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 15.0))
            watched |= {pid for pid, _ in children(job.pid)}
            killed = disturb(job, kind, random.Random(0))
            if left := _left(folder, watched):
                return killed, job.poll(), left, ""
            if killed:
                job = subprocess.Popen([*words, "--resume", "auto"], cwd=folder, stdout=output, stderr=output, env=env)
        else:
            killed = disturb(job, kind, rng)
        try:
            code = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            kill([pid for pid, _ in children(job.pid)] + [job.pid])
            return killed, None, "hangs", (folder / "output").read_text()
    return killed, code, _left(folder, watched), (folder / "output").read_text()


def applied(digits: bool) -> str:
    """Return what a job says whose records were each applied once an epoch."""
    return f"applied: {DIGITS if digits else RECORDS} records in each of {EPOCHS} epochs, each once; "


def judge(run: Path) -> str:
    """Return what is wrong with the error of a run."""
    error = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation_error"]
    print(f"  error {100 * error:.2f} %", flush=True)
    return "" if error <= MOST_ERROR else f"an error of {100 * error:.2f} %"


def _left(folder: Path, watched: set[int]) -> str:
    """Return which processes of a job are still there."""
    end = time.monotonic() + 60  # workers try services again for some seconds
    while time.monotonic() < end:
        left = {pid for pid in watched if alive(pid)}
        for one in psutil.process_iter(["cwd"]):
            if one.info["cwd"] == str(folder) and alive(one.pid):
                left.add(one.pid)
        if not left:
            return ""
        time.sleep(0.2)
    kill(left)
    return f"{len(left)} processes are left"


def main() -> int:
    """Run the rounds, print what went wrong, and return 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--num-workers", metavar="MIN:MAX", help="let the number of workers change")
    parser.add_argument("--whole", action="store_true", help="workers of one tile, unless a rank is to be killed")
    parser.add_argument("--digits", action="store_true", help="train the digits, and compare the error")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    kills, wrong = 0, 0
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        kind, killed, problem = round_of(
            seed, arguments.kinds, arguments.num_workers, arguments.digits, arguments.whole
        )
        counts[kind.partition(",")[0]] += 1
        kills += killed
        wrong += bool(problem)
        print(f"seed {seed}: {killed} x {kind}: {problem or 'right'}", flush=True)
    rounds = ", ".join(f"{count} of {kind}" for kind, count in sorted(counts.items()))
    print(f"{arguments.rounds} rounds ({rounds}), {kills} processes killed, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
