"""Jobs of seven kinds, each disturbed by signals at a random moment, and then run to its end: nothing may be lost.

python tools/signal_rounds.py [--rounds N] [--seed S] [--beside K] [--folder DIR] [--results FILE]

A round fails if the job hangs, prints a traceback, ends with another exit code than docs/cluster.md says, leaves a
process or a folder behind, or if `--resume auto` does not come to the weights of a job that nobody disturbed.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
from processes import alive, children, kill  # noqa: E402

from neondist.launcher.mpirun import find_mpirun  # noqa: E402

DATA = "dataset: !Synthetic {shape: [12, 10, 1], classes: 3, train: 24, test: 12}\n"
REST = (
    "batch_size: 4\nepochs: 3\ndtype: float64\nbackend: numpy\nseed: 1\ncheckpoint: {every_steps: 1}\n"
    "# slow.py makes a step last a moment\n"
)
TOY = f"""!FitExperiment
{DATA}model: !ConvnetDist
  layers:
    - !ConvLayerDist {{out_channels: 2, kernel_size: 3, padding: 1, activation: !Slow {{}}}}
    - !MaxPoolingLayerDist {{kernel_size: 2}}
    - !FCLayerDist {{out_features: 3}}
  optimizer: !SGD {{learning_rate: 1e-2, momentum: 0.9}}
{REST}"""
GB = f"""!FitExperiment
{DATA}model: !GBDist
  layers:
    - !LocalFilteringLayerDist {{out_channels: 2, kernel_size: 3}}
    - !LocalFilteringLayerDist {{out_channels: 2, kernel_size: 2}}
    - !FCLayerDist {{out_features: 3, activation: !Slow {{}}}}
  num_pretrain_epochs: 1
  num_initial_epochs: 1
  optimizer: !SGD {{learning_rate: 1e-2}}
{REST}"""
SLOW = """
import time
import neondist as nd
class Slow(nd.Activation):
    "The identity, after a moment."
    def fprop(self, z):
        time.sleep(0.03)
        return z
    def bprop(self, y, dy):
        return dy
"""
KINDS = ("serial", "ranks", "mpirun", "virtual", "gb", "resume", "apply")
ACTIONS = (
    "INT", "TERM", "USR1", "USR1 TERM", "TERM TERM", "INT INT", "USR1 INT", "STOP CONT",
    "rank USR1", "rank TERM", "rank STOP CONT", "rank KILL", "mpirun KILL", "main KILL",
)  # fmt: skip
LIMIT = 240.0


def words(kind: str, folder: Path, resume: bool, rng: random.Random) -> list[str]:
    """Return the command of a job."""
    neondist = [sys.executable, "-m", "neondist"]
    file = "gb.yaml" if kind == "gb" else "toy.yaml"
    common = [file, "--import", "slow.py", *(["--stall-timeout", "120s"] if kind != "apply" else [])]
    if kind == "apply":
        command = ["evaluate", *common, "--checkpoint", "trained.h5"]
        if rng.random() < 0.5:
            command = ["predict", *common, "--checkpoint", "trained.h5", "--input", "images.npy", "--output", "y.npy"]
        return [*neondist, *command, *(["-n", "2"] if rng.random() < 0.5 else [])]
    run = [*neondist, "run", *common, "--output", "out", *(["--resume", "auto"] if resume else [])]
    if kind == "virtual":
        return [*run, "--virtual", "2"]
    if kind == "mpirun":
        return [*find_mpirun(os.environ).command(2), *run]
    return [*run, *(["-n", "2"] if kind == "ranks" or (kind != "serial" and rng.random() < 0.5) else [])]


class Round:
    """One job that is disturbed."""

    def __init__(
        self, number: int, seed: int, base: Path, durations: dict[str, float], actions: Sequence[str] = ACTIONS
    ) -> None:
        self.rng = random.Random(f"{seed} {number}")
        self.number, self.durations = number, durations
        self.kind = KINDS[number % len(KINDS)]
        self.action = self.rng.choice(actions)
        self.folder = base / f"round-{number}"
        self.faults: list[str] = []
        self.listened = True
        self.codes: list[int | None] = []

    def play(self, reference: Path | None) -> dict[str, object]:
        """Disturb the job, run it to its end, and return what was found."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.folder.parent / "start", self.folder)
        if self.kind == "resume":
            shutil.copytree(self.folder.parent / "half", self.folder / "out")
        moment = self.rng.uniform(0, 1.1 * self.durations[self.kind])
        command = words(self.kind, self.folder, self.kind == "resume", self.rng)
        self.disturbed(command, moment)
        if self.codes[-1] != 0:
            again = command if self.kind == "apply" else words(self.kind, self.folder, True, self.rng)
            code, said, _ = self.run(again)
            self.codes.append(code)
            if code != 0:
                self.faults.append(f"lost: the next run ended with {code}: {said[-300:]}")
        if self.kind != "apply" and reference is not None and not self.faults:
            self.compare(reference)
        if not self.faults:
            shutil.rmtree(self.folder)
        return {
            "round": self.number, "kind": self.kind, "action": self.action, "moment": round(moment, 2),
            "codes": self.codes, "faults": self.faults, "command": " ".join(command[1:]),
        }  # fmt: skip

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a job with a temporary folder of its own."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        env = {**os.environ, **find_mpirun(os.environ).environment(), "TMPDIR": str(self.folder / "tmp")}
        env |= {"OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "torch matplotlib"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "helpers" / "lean"), str(ROOT)])
        return subprocess.Popen(
            command, cwd=self.folder, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=(self.folder / "stdout").open("w"), stderr=(self.folder / "stderr").open("w"),
        )  # fmt: skip

    def run(self, command: list[str]) -> tuple[int | None, str, float]:
        """Run a job that nobody disturbs; return its exit code, its errors and its seconds."""
        began = time.monotonic()
        process = self.start(command)
        code = self.wait(process)
        return code, (self.folder / "stderr").read_text(), time.monotonic() - began

    def wait(self, process: subprocess.Popen[str]) -> int | None:
        """Return the exit code; None, after killing everything, if it hangs."""
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            below = children(process.pid)
            self.faults.append(f"hangs: {below}")
            kill([process.pid, *(pid for pid, _ in below)])
            process.wait()
            return None

    def disturbed(self, command: list[str], moment: float) -> None:
        """Run a job and send it signals."""
        began = time.monotonic()
        process = self.start(command)
        time.sleep(moment)
        everything = children(process.pid)
        victim = self.send(process, everything)
        code = self.wait(process)
        self.codes.append(code)
        said = (self.folder / "stderr").read_text()
        if self.listened and ("Traceback" in said or "Exception ignored" in said):  # before, it is Python that starts
            self.faults.append("traceback: " + said[-1500:])
        if code is not None and code not in self.allowed(victim):
            self.faults.append(
                f"exit code {code}, {victim} at {moment:.2f} s of {time.monotonic() - began:.1f}: {said[-300:]}"
            )
        end = time.monotonic() + 30
        pids = [pid for pid, _ in everything]
        mpiruns_own = "mpirun" in command[0] and (victim, self.action) != ("", "")
        while left := [pid for pid in pids if alive(pid)] or (
            [] if mpiruns_own else list((self.folder / "tmp").glob("*"))
        ):
            if time.monotonic() > end:
                self.faults.append(f"left: {left}")
                kill(pids)
                break
            time.sleep(0.1)

    def send(self, process: subprocess.Popen[str], everything: list[tuple[int, str]]) -> str:
        """Send the signals of the action; return whom: main, rank, or mpirun."""
        first, _, rest = self.action.partition(" ")
        names = rest.split() if first in ("rank", "mpirun", "main") else self.action.split()
        ranks = [pid for pid, name in everything if name.startswith("python")]
        launchers = [pid for pid, name in everything if name.startswith(("mpirun", "prterun"))]
        chosen, victim = process.pid, "main"
        if first == "rank" and ranks:
            chosen, victim = self.rng.choice(ranks), "rank"
        elif first == "mpirun" and launchers:
            chosen, victim = launchers[0], "mpirun"
        self.listened = listens(chosen)
        for at, name in enumerate(names):
            if at:
                time.sleep(self.rng.choice([0, self.rng.uniform(0, 1.5)]))
            if process.poll() is None:
                try:
                    os.kill(chosen, getattr(signal, f"SIG{name}"))
                except ProcessLookupError:
                    break
        return victim

    def allowed(self, victim: str) -> set[int]:
        """Return the exit codes that the docs say; a process that does not listen yet ends as all processes do."""
        names = set(self.action.split()) - {"rank", "main", "mpirun"}
        codes = {0}
        stops = self.kind != "apply"
        plain = self.kind == "mpirun"
        for name in names & {"TERM", "USR1", "INT", "KILL"}:
            number = getattr(signal, f"SIG{name}")
            dies = {-number, 128 + number}
            if name == "KILL" or name == "INT":
                codes |= dies | ({1, 143, 137} if plain else set()) | (set() if self.listened else {1})
            elif stops and victim == "main" and not plain:
                codes |= {75} | (set() if self.listened else dies)
            elif stops:  # mpirun, or a rank, which may not listen yet
                codes |= {75} | dies | ({1, 143, 137} if plain else set())
            else:
                codes |= dies
        if "INT" in names and "USR1" in names:
            codes |= {75}
        return codes

    def compare(self, reference: Path) -> None:
        """The weights are those of a job that nobody disturbed."""
        with h5py.File(self.folder / "out" / "checkpoint.h5") as here, h5py.File(reference) as there:
            if sorted(here["model"]) != sorted(there["model"]):
                self.faults.append("other arrays")

            def look(name: str, item: object) -> None:
                if isinstance(item, h5py.Dataset) and not np.allclose(item[()], here["model"][name][()], 1e-10, 1e-12):
                    self.faults.append(f"other weights: {name}")

            there["model"].visititems(look)


def listens(pid: int) -> bool:
    """Tell whether a process handles SIGUSR1 by now, which is when it has begun to run code of ours."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def prepared(base: Path) -> dict[str, Path]:
    """Make the folder that a round begins with, a run that is half done, and what undisturbed jobs come to."""
    start = base / "start"
    start.mkdir(parents=True)
    (start / "toy.yaml").write_text(TOY)
    (start / "gb.yaml").write_text(GB)
    (start / "slow.py").write_text(SLOW)
    np.save(start / "images.npy", np.zeros((20, 12, 10, 1), np.float32))
    found = {}
    for kind in ("serial", "gb"):
        one = Round(0, 0, base, {})
        one.folder = base / f"reference-{kind}"
        shutil.copytree(start, one.folder)
        code, said, _ = one.run(words(kind, one.folder, False, random.Random(3)))
        assert code == 0, said
        found[kind] = one.folder / "out" / "checkpoint.h5"
    shutil.copy(found["serial"], start / "trained.h5")
    one.folder = base / "half-job"
    shutil.copytree(start, one.folder)
    code, said, _ = one.run([*words("serial", one.folder, False, random.Random(3)), "--set", "epochs=1"])
    assert code == 0, said
    shutil.copytree(one.folder / "out", base / "half")
    return found


def main() -> int:
    """Play all rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--beside", type=int, default=1, help="jobs at the same time")
    parser.add_argument("--folder", type=Path, default=Path("signal_rounds"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", help="actions that have this word, such as INT")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background ignores it, and so would the jobs
    actions = [action for action in ACTIONS if arguments.only is None or arguments.only in action.split()]
    base = arguments.folder.resolve()
    shutil.rmtree(base, ignore_errors=True)
    references = prepared(base)
    durations = {}
    for at, kind in enumerate(KINDS):
        one = Round(at, arguments.seed, base, {})
        shutil.copytree(base / "start", one.folder)
        if kind == "resume":
            shutil.copytree(base / "half", one.folder / "out")
        code, said, durations[kind] = one.run(words(kind, one.folder, kind == "resume", random.Random(1)))
        assert code == 0, (kind, code, said)
        shutil.rmtree(one.folder)
    print("seconds of undisturbed jobs:", {kind: round(seconds, 1) for kind, seconds in durations.items()}, flush=True)

    def play(number: int) -> dict[str, object]:
        one = Round(number, arguments.seed, base, durations, actions)
        try:
            found = one.play(references["gb" if one.kind == "gb" else "serial"])
        except Exception as error:
            found = {
                "round": number,
                "kind": one.kind,
                "action": one.action,
                "faults": [f"script: {error!r}"],
                "codes": [],
            }
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
        if found["faults"]:
            print(json.dumps(found), flush=True)
        return found

    rounds = range(arguments.first, arguments.first + arguments.rounds)
    with ThreadPoolExecutor(arguments.beside) as pool:
        results = list(pool.map(play, rounds))
    return table(results)


def table(results: list[dict[str, object]]) -> int:
    """Print rounds, failed rounds and first exit codes by kind; return how many failed."""
    print(f"{'kind':10}{'rounds':>8}{'failed':>8}  exit codes")
    for kind in KINDS:
        mine = [one for one in results if one["kind"] == kind]
        codes = Counter(one["codes"][0] for one in mine if one["codes"])  # type: ignore[index]
        told = "  ".join(f"{code}: {count}" for code, count in codes.most_common())
        print(f"{kind:10}{len(mine):8}{sum(bool(one['faults']) for one in mine):8}  {told}")
    return sum(bool(one["faults"]) for one in results)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
