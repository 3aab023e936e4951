"""Stress test of seven kinds of jobs, which receive signals at random moments and are then resumed to their end.

python tools/signal_rounds.py [--rounds N] [--seed S] [--beside K] [--folder DIR] [--results FILE]

A round fails if the job hangs, prints a traceback, ends with an exit code other than those in docs/cluster.md, leaves a
process or a folder behind, or if `--resume auto` does not reach the weights of an undisturbed job.
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
from processes import is_alive, kill, list_children  # noqa: E402

from neondist.launcher.mpirun import find_mpirun  # noqa: E402

DATA = "dataset: !Synthetic {shape: [12, 10, 1], classes: 3, train: 24, test: 12}\n"
FILE_TAIL = (
    "batch_size: 4\nepochs: 3\ndtype: float64\nbackend: numpy\nseed: 1\ncheckpoint: {every_steps: 1}\n"
    "# slow.py slows down each step\n"
)
TOY_FILE = f"""!FitExperiment
{DATA}model: !ConvnetDist
  layers:
    - !ConvLayerDist {{out_channels: 2, kernel_size: 3, padding: 1, activation: !Slow {{}}}}
    - !MaxPoolingLayerDist {{kernel_size: 2}}
    - !FCLayerDist {{out_features: 3}}
  optimizer: !SGD {{learning_rate: 1e-2, momentum: 0.9}}
{FILE_TAIL}"""
GB_FILE = f"""!FitExperiment
{DATA}model: !GBDist
  layers:
    - !LocalFilteringLayerDist {{out_channels: 2, kernel_size: 3}}
    - !LocalFilteringLayerDist {{out_channels: 2, kernel_size: 2}}
    - !FCLayerDist {{out_features: 3, activation: !Slow {{}}}}
  num_pretrain_epochs: 1
  num_initial_epochs: 1
  optimizer: !SGD {{learning_rate: 1e-2}}
{FILE_TAIL}"""
SLOW_MODULE = """
import time
import neondist as nd
class Slow(nd.Activation):
    "Identity function with a delay."
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
ROUND_TIMEOUT = 240.0


def command_words(kind: str, folder: Path, resume: bool, rng: random.Random) -> list[str]:
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
    """Job that receives signals."""

    def __init__(
        self, number: int, seed: int, base: Path, durations: dict[str, float], actions: Sequence[str] = ACTIONS
    ) -> None:
        self.rng = random.Random(f"{seed} {number}")
        self.number, self.durations = number, durations
        self.kind = KINDS[number % len(KINDS)]
        self.action = self.rng.choice(actions)
        self.folder = base / f"round-{number}"
        self.faults: list[str] = []
        self.had_handlers = True
        self.codes: list[int | None] = []

    def play(self, reference: Path | None) -> dict[str, object]:
        """Send signals to the job, run it to its end, and return the result."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.folder.parent / "start", self.folder)
        if self.kind == "resume":
            shutil.copytree(self.folder.parent / "half", self.folder / "out")
        delay = self.rng.uniform(0, 1.1 * self.durations[self.kind])
        command = command_words(self.kind, self.folder, self.kind == "resume", self.rng)
        self.disturb(command, delay)
        if self.codes[-1] != 0:
            next_command = command if self.kind == "apply" else command_words(self.kind, self.folder, True, self.rng)
            code, errors, _ = self.run(next_command)
            self.codes.append(code)
            if code != 0:
                self.faults.append(f"lost: the next run ended with {code}: {errors[-300:]}")
        if self.kind != "apply" and reference is not None and not self.faults:
            self.compare(reference)
        if not self.faults:
            shutil.rmtree(self.folder)
        return {
            "round": self.number, "kind": self.kind, "action": self.action, "moment": round(delay, 2),
            "codes": self.codes, "faults": self.faults, "command": " ".join(command[1:]),
        }  # fmt: skip

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a job with its own temporary folder."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        env = {**os.environ, **find_mpirun(os.environ).environment(), "TMPDIR": str(self.folder / "tmp")}
        env |= {"OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "torch matplotlib"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "helpers" / "lean"), str(ROOT)])
        return subprocess.Popen(
            command, cwd=self.folder, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=(self.folder / "stdout").open("w"), stderr=(self.folder / "stderr").open("w"),
        )  # fmt: skip

    def run(self, command: list[str]) -> tuple[int | None, str, float]:
        """Run a job undisturbed; return its exit code, its errors and its seconds."""
        start = time.monotonic()
        process = self.start(command)
        code = self.wait(process)
        return code, (self.folder / "stderr").read_text(), time.monotonic() - start

    def wait(self, process: subprocess.Popen[str]) -> int | None:
        """Return the exit code; kill all processes and return None if it hangs."""
        try:
            return process.wait(ROUND_TIMEOUT)
        except subprocess.TimeoutExpired:
            descendants = list_children(process.pid)
            self.faults.append(f"hangs: {descendants}")
            kill([process.pid, *(pid for pid, _ in descendants)])
            process.wait()
            return None

    def disturb(self, command: list[str], delay: float) -> None:
        """Run the job and send it signals."""
        start = time.monotonic()
        process = self.start(command)
        time.sleep(delay)
        processes = list_children(process.pid)
        victim = self.send(process, processes)
        code = self.wait(process)
        self.codes.append(code)
        errors = (self.folder / "stderr").read_text()
        if self.had_handlers and ("Traceback" in errors or "Exception ignored" in errors):  # else still starting
            self.faults.append("traceback: " + errors[-1500:])
        if code is not None and code not in self.allowed_codes(victim):
            self.faults.append(
                f"exit code {code}, {victim} at {delay:.2f} s of {time.monotonic() - start:.1f}: {errors[-300:]}"
            )
        end = time.monotonic() + 30
        pids = [pid for pid, _ in processes]
        ignore_folder = "mpirun" in command[0] and (victim, self.action) != ("", "")
        while remains := [pid for pid in pids if is_alive(pid)] or (
            [] if ignore_folder else list((self.folder / "tmp").glob("*"))
        ):
            if time.monotonic() > end:
                self.faults.append(f"left behind: {remains}")
                kill(pids)
                break
            time.sleep(0.1)

    def send(self, process: subprocess.Popen[str], processes: list[tuple[int, str]]) -> str:
        """Send the signals of the action; return their target: main, rank, or mpirun."""
        first_word, _, other_words = self.action.partition(" ")
        names = other_words.split() if first_word in ("rank", "mpirun", "main") else self.action.split()
        ranks = [number for number, name in processes if name.startswith("python")]
        launchers = [number for number, name in processes if name.startswith(("mpirun", "prterun"))]
        pid, target = process.pid, "main"
        if first_word == "rank" and ranks:
            pid, target = self.rng.choice(ranks), "rank"
        elif first_word == "mpirun" and launchers:
            pid, target = launchers[0], "mpirun"
        self.had_handlers = handles_signals(pid)
        for index, name in enumerate(names):
            if index:
                time.sleep(self.rng.choice([0, self.rng.uniform(0, 1.5)]))
            if process.poll() is None:
                try:
                    os.kill(pid, getattr(signal, f"SIG{name}"))
                except ProcessLookupError:
                    break
        return target

    def allowed_codes(self, victim: str) -> set[int]:
        """Return the documented exit codes, including those of processes without signal handlers yet."""
        names = set(self.action.split()) - {"rank", "main", "mpirun"}
        codes = {0}
        can_stop = self.kind != "apply"
        is_mpirun = self.kind == "mpirun"
        for name in names & {"TERM", "USR1", "INT", "KILL"}:
            number = getattr(signal, f"SIG{name}")
            killed_codes = {-number, 128 + number}
            if name == "KILL" or name == "INT":
                codes |= killed_codes | ({1, 143, 137} if is_mpirun else set()) | (set() if self.had_handlers else {1})
            elif can_stop and victim == "main" and not is_mpirun:
                codes |= {75} | (set() if self.had_handlers else killed_codes)
            elif can_stop:  # mpirun, or a rank, which may not have installed its handlers yet
                codes |= {75} | killed_codes | ({1, 143, 137} if is_mpirun else set())
            else:
                codes |= killed_codes
        if "INT" in names and "USR1" in names:
            codes |= {75}
        return codes

    def compare(self, reference: Path) -> None:
        """Compare the weights with those of an undisturbed job."""
        with h5py.File(self.folder / "out" / "checkpoint.h5") as ours, h5py.File(reference) as expected:
            if sorted(ours["model"]) != sorted(expected["model"]):
                self.faults.append("different arrays")

            def compare_array(name: str, item: object) -> None:
                if isinstance(item, h5py.Dataset) and not np.allclose(item[()], ours["model"][name][()], 1e-10, 1e-12):
                    self.faults.append(f"different weights: {name}")

            expected["model"].visititems(compare_array)


def handles_signals(pid: int) -> bool:
    """Return whether a process has a handler for SIGUSR1, which neondist installs when it starts."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def prepare(base: Path) -> dict[str, Path]:
    """Create the initial folder of rounds, a half-finished run, and the results of undisturbed jobs."""
    start = base / "start"
    start.mkdir(parents=True)
    (start / "toy.yaml").write_text(TOY_FILE)
    (start / "gb.yaml").write_text(GB_FILE)
    (start / "slow.py").write_text(SLOW_MODULE)
    np.save(start / "images.npy", np.zeros((20, 12, 10, 1), np.float32))
    references = {}
    for kind in ("serial", "gb"):
        round_ = Round(0, 0, base, {})
        round_.folder = base / f"reference-{kind}"
        shutil.copytree(start, round_.folder)
        code, errors, _ = round_.run(command_words(kind, round_.folder, False, random.Random(3)))
        assert code == 0, errors
        references[kind] = round_.folder / "out" / "checkpoint.h5"
    shutil.copy(references["serial"], start / "trained.h5")
    round_.folder = base / "half-job"
    shutil.copytree(start, round_.folder)
    code, errors, _ = round_.run(
        [*command_words("serial", round_.folder, False, random.Random(3)), "--set", "epochs=1"]
    )
    assert code == 0, errors
    shutil.copytree(round_.folder / "out", base / "half")
    return references


def main() -> int:
    """Run all rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--beside", type=int, default=1, help="concurrent jobs")
    parser.add_argument("--folder", type=Path, default=Path("signal_rounds"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", help="only actions with this word, such as INT")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background scripts ignore SIGINT, and jobs inherit this
    actions = [action for action in ACTIONS if arguments.only is None or arguments.only in action.split()]
    base = arguments.folder.resolve()
    shutil.rmtree(base, ignore_errors=True)
    references = prepare(base)
    durations = {}
    for number, kind in enumerate(KINDS):
        round_ = Round(number, arguments.seed, base, {})
        shutil.copytree(base / "start", round_.folder)
        if kind == "resume":
            shutil.copytree(base / "half", round_.folder / "out")
        code, errors, durations[kind] = round_.run(
            command_words(kind, round_.folder, kind == "resume", random.Random(1))
        )
        assert code == 0, (kind, code, errors)
        shutil.rmtree(round_.folder)
    print("seconds of undisturbed jobs:", {kind: round(seconds, 1) for kind, seconds in durations.items()}, flush=True)

    def play(number: int) -> dict[str, object]:
        round_ = Round(number, arguments.seed, base, durations, actions)
        try:
            result = round_.play(references["gb" if round_.kind == "gb" else "serial"])
        except Exception as error:
            result = {
                "round": number,
                "kind": round_.kind,
                "action": round_.action,
                "faults": [f"script: {error!r}"],
                "codes": [],
            }
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
        if result["faults"]:
            print(json.dumps(result), flush=True)
        return result

    rounds = range(arguments.first, arguments.first + arguments.rounds)
    with ThreadPoolExecutor(arguments.beside) as pool:
        results = list(pool.map(play, rounds))
    return print_table(results)


def print_table(results: list[dict[str, object]]) -> int:
    """Print rounds, failed rounds and first exit codes by kind; return the number of failures."""
    print(f"{'kind':10}{'rounds':>8}{'failed':>8}  exit codes")
    for kind in KINDS:
        of_kind = [result for result in results if result["kind"] == kind]
        codes = Counter(result["codes"][0] for result in of_kind if result["codes"])  # type: ignore[index]
        summary = "  ".join(f"{code}: {count}" for code, count in codes.most_common())
        print(f"{kind:10}{len(of_kind):8}{sum(bool(result['faults']) for result in of_kind):8}  {summary}")
    return sum(bool(result["faults"]) for result in results)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
