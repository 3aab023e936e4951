"""Mutation testing: apply each small mistake to a copy of the tree, and check that its tests fail.

python tools/mutate.py [WORD ...] [--list FILE] [--check] [--limit SECONDS] [--jobs N]

WORDs select mutations by name, file or tests. The exit code is 1 if a mutation survives, or is stale because its text
no longer occurs exactly once in its file; update stale mutations in tools/mutations.yaml.
"""

import argparse
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MUTATIONS_FILE = Path(__file__).with_name("mutations.yaml")
IGNORED_FILES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "demo", "docs", "build")
OUTCOMES = {0: "SURVIVED", 1: "killed"}
"""outcomes by exit code of pytest; negative codes are crashes, and other codes mean that no test ran"""


@dataclass(frozen=True)
class Mutation:
    """Small mistake in the code.

    Attributes
    ----------
    name : description of the mistake
    file : path relative to the root of the tree
    old, new : a short text that occurs exactly once in the file, and its replacement
    tests : tests that must detect it, as arguments of pytest
    why : consequence for users, if not clear from the name
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""

    def problem(self, root: Path) -> str | None:
        """Return the reason why the mutation cannot be applied to a tree, or None."""
        path = root / self.file
        count = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        if count != 1:
            return f"stale: its text occurs {count} times" if path.is_file() else "stale: no such file"
        missing = next((test for test in self.tests if not (root / test.partition("::")[0]).exists()), None)
        return f"stale: no {missing}" if missing else None


@contextlib.contextmanager
def apply_mutation(mutation, tree):
    """Apply a mutation to a tree within the block."""
    path = tree / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(original, encoding="utf-8")


def read_mutations(path):
    """Return the mutations of a list; names must differ."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    mutations = [Mutation(**fields | {"tests": tuple(fields["tests"].split())}) for fields in entries]
    names = [mutation.name for mutation in mutations]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        sys.exit(f"{path}: {', '.join(sorted(duplicates))}: given twice")
    return mutations


def select_mutations(mutations, words):
    """Return the mutations that contain one of the words; all if there are no words."""
    texts = [(mutation, " ".join((mutation.name, mutation.file, *mutation.tests)).lower()) for mutation in mutations]
    return [mutation for mutation, text in texts if not words or any(word.lower() in text for word in words)]


def run_tests(tree, tests, limit):
    """Run pytest in a tree; return its exit code, None on timeout, and the end of its output."""
    variables = "PYTHONDONTWRITEBYTECODE", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "OMP_NUM_THREADS"
    env = os.environ | dict.fromkeys(variables, "1") | {"NEONDIST_CASES": "all"}  # run all cases
    env["PYTHONPATH"] = os.pathsep.join([str(tree), *filter(None, [env.get("PYTHONPATH")])])
    plugins = ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]  # the latter selects the suite's examples
    command = [sys.executable, "-m", "pytest", "-x", "-q", *plugins, *tests]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = subprocess.Popen(command, cwd=tree, env=env, start_new_session=True, text=True, **pipes)
    try:
        text, _ = child.communicate(timeout=limit)
        return child.returncode, text[-2000:]
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # kill all processes of the tests
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def try_mutation(mutation, tree, limit):
    """Test a mutation in a copy; return 'killed ...', 'SURVIVED', 'stale: ...' or 'broken: ...'."""
    if problem := mutation.problem(tree):
        return problem
    with apply_mutation(mutation, tree):
        code, text = run_tests(tree, mutation.tests, limit)
    if code is None:
        return "killed (hang)"
    if code < 0:
        return "killed (crash)"
    return OUTCOMES.get(code) or f"broken: pytest ends with {code}: {text.strip().splitlines()[-1:]}"


def try_all(mutations, root, limit, jobs, report):
    """Test all mutations, report a line for each, and return those that were not killed."""
    trees = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="neondist-mutations-") as folder:
        for job in range(jobs):
            trees.put(Path(shutil.copytree(root, Path(folder) / str(job) / "tree", ignore=IGNORED_FILES)))

        def attempt(mutation):
            tree, start = trees.get(), time.monotonic()
            try:
                outcome = try_mutation(mutation, tree, limit)
            finally:
                trees.put(tree)
            report(f"{outcome:<14} {time.monotonic() - start:6.1f} s  {mutation.name}  ({' '.join(mutation.tests)})")
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(attempt, mutations))
    return [mutation for mutation, outcome in zip(mutations, outcomes, strict=True) if not outcome.startswith("killed")]


def passes_unmutated(mutations, root, limit):
    """Return whether the tests pass without mutations; otherwise their failures would be meaningless."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    with tempfile.TemporaryDirectory(prefix="neondist-mutations-") as folder:
        tree = Path(shutil.copytree(root, Path(folder) / "tree", ignore=IGNORED_FILES))
        code, text = run_tests(tree, tests, limit)
    if code != 0:
        outcome = f"do not end within {limit:g} s" if code is None else f"end with exit code {code}:\n{text}"
        print(f"without mutations, the tests {outcome}")
    return code == 0


def print_line(line):
    """Print a line and flush."""
    print(line, flush=True)


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--list", type=Path, default=MUTATIONS_FILE, help="file of mutations")
    parser.add_argument("--check", action="store_true", help="list stale mutations without running tests")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one mutation; a hang counts as killed")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent mutations")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the copies
    mutations = select_mutations(read_mutations(arguments.list), arguments.words)
    stale = {mutation: problem for mutation in mutations if (problem := mutation.problem(ROOT))}
    for mutation, problem in stale.items():
        print(f"{mutation.name}: {problem}: {mutation.file}")
    remaining = list(stale)
    if not arguments.check:
        usable = [mutation for mutation in mutations if mutation not in stale]
        passes = passes_unmutated(usable, ROOT, arguments.limit * len({mutation.tests for mutation in usable}))
        remaining += try_all(usable, ROOT, arguments.limit, arguments.jobs, print_line) if passes else usable
    print(f"{len(mutations)} mutations, {len(mutations) - len(remaining)} {'usable' if arguments.check else 'killed'}")
    sys.exit(bool(remaining))


if __name__ == "__main__":
    main()
