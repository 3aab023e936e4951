"""Asynchronous jobs of workers and servers, some of whose processes are killed: each record is applied once an epoch.

python tools/elastic_rounds.py [--rounds N] [--seed S] [--kinds worker rank server master supervisor]

A round fails if the job hangs, leaves a process behind, or does not end with success and the servers' counters at one
for each record and epoch. Where the supervisor is killed, and with it all others, the same command with --resume auto
has to end so.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
from definitions import MODEL, drawn, write_csv  # noqa: E402
from processes import alive, children, kill  # noqa: E402

RECORDS, EPOCHS, SIZE = 320, 3, 16
LIMIT = 240.0
KINDS = ("worker", "rank", "server", "master", "supervisor")
SLOW = MODEL.replace("def forward(self, x):", "def forward(self, x):\n        import time\n\n        time.sleep(0.03)")
APPLIED = f"applied: {RECORDS} records in each of {EPOCHS} epochs, each once; "


def command(folder: Path, rng: random.Random, tiles: str) -> list[str]:
    """Return the command of a job."""
    more = ["--minibatch-size", SIZE, "--num-epochs", EPOCHS, "--num-minibatches-per-task", rng.choice([1, 3, 8])]
    places = ["--num-workers", 2 if tiles != "1x1" else rng.choice([2, 3]), "--num-ps", rng.choice([1, 2])]
    strategy = ["--distribution-strategy", "ParameterServerStrategy", "--use-async", "--tiles", tiles]
    words = ["train", "model_slow.py", "--training-data", "train.csv", *more, *places, *strategy, "--output", "run"]
    words += ["--checkpoint-steps", rng.choice([0, 1, 10])]
    return [sys.executable, "-m", "neondist", *map(str, words)]


def targets(job: int, kind: str) -> list[int]:
    """Return the processes of a kind in a job."""
    if kind == "supervisor":
        return [job]
    word = {"server": "ps", "master": "master"}.get(kind, "train")
    top = [one for one in psutil.Process(job).children() if word in one.cmdline()]
    if kind != "rank":
        return [one.pid for one in top]
    inner = [rank for one in top for rank in one.children(recursive=True)]
    return [one.pid for one in inner if "train" in one.cmdline() and "prterun" in one.parent().name()]


def disturb(job: subprocess.Popen[str], kind: str, rng: random.Random) -> int:
    """Kill processes of a kind at random moments, and return how many."""
    killed, many = 0, rng.choice([1, 1, 2, 3]) if kind != "supervisor" else 1
    for _ in range(many):
        moment = time.monotonic() + rng.uniform(0.0, 15.0)
        while job.poll() is None:
            try:
                found = targets(job.pid, kind)
            except psutil.Error:
                found = []
            if found and time.monotonic() > moment:
                kill([rng.choice(found)])
                killed += 1
                break
            time.sleep(0.02)
    return killed


def round_of(seed: int, kinds: list[str]) -> tuple[str, int, str]:
    """Run a job and return what was killed, how often, and what is wrong."""
    rng = random.Random(seed)
    kind = rng.choice(kinds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model_slow.py").write_text(SLOW)
        write_csv(folder / "train.csv", drawn(RECORDS))
        tiles = "2x1" if kind == "rank" else rng.choice(["1x1", "1x1", "2x1"])
        words = command(folder, rng, tiles)
        with (folder / "output").open("w+") as output:
            job = subprocess.Popen(words, cwd=folder, stdout=output, stderr=output, text=True)
            watched: set[int] = set()
            if kind == "supervisor":
                while not targets(job.pid, "worker") and job.poll() is None:
                    time.sleep(0.02)
                time.sleep(rng.uniform(0.0, 15.0))
                watched |= {pid for pid, _ in children(job.pid)}
                killed = disturb(job, kind, random.Random(0))
                if left := _left(folder, watched):
                    return kind, killed, left
                if killed:
                    job = subprocess.Popen([*words, "--resume", "auto"], cwd=folder, stdout=output, stderr=output)
            else:
                killed = disturb(job, kind, rng)
            try:
                code = job.wait(LIMIT)
            except subprocess.TimeoutExpired:
                kill([pid for pid, _ in children(job.pid)] + [job.pid])
                return kind, killed, f"hangs: {(folder / 'output').read_text()}"
            text = (folder / "output").read_text()
        good = code == 0 and APPLIED in text and "Traceback" not in text
        return kind, killed, ("" if good else f"exit code {code}: {text}") or _left(folder, watched)


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
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    kills, wrong = 0, 0
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        kind, killed, problem = round_of(seed, arguments.kinds)
        counts[kind] += 1
        kills += killed
        wrong += bool(problem)
        print(f"seed {seed}: {killed} x {kind}: {problem or 'right'}", flush=True)
    rounds = ", ".join(f"{count} of {kind}" for kind, count in sorted(counts.items()))
    print(f"{arguments.rounds} rounds ({rounds}), {kills} processes killed, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
