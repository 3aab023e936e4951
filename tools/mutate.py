"""Mutations: would a test notice a small mistake? Each is put into a copy of the tree, and its tests must fail there.

python tools/mutate.py [WORD ...] [--list FILE] [--check] [--limit SECONDS] [--jobs N]

WORDs choose the mutations whose name, file or tests have one of them. Exit code 1 if one survives or is stale, which
means that its text is no longer found exactly once in its file: then write it anew in tools/mutations.yaml.
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
LIST = Path(__file__).with_name("mutations.yaml")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "demo", "docs", "build")
OUTCOMES = {0: "SURVIVED", 1: "killed"}
"""by pytest's exit code; a negative one is a crash, the others say that no test ran"""


@dataclass(frozen=True)
class Mutation:
    """A small mistake.

    Attributes
    ----------
    name : what is wrong, in words
    file : from the root of the tree
    old, new : a short text that is in the file exactly once, and what takes its place
    tests : those meant to see it, as pytest takes them
    why : what it would do to a user, where the name does not say it
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""

    def problem(self, root: Path) -> str | None:
        """Return why the mutation cannot be made in a tree, or None."""
        path = root / self.file
        count = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        if count != 1:
            return f"stale: its text is found {count} times" if path.is_file() else "stale: no such file"
        missing = next((test for test in self.tests if not (root / test.partition("::")[0]).exists()), None)
        return f"stale: no {missing}" if missing else None


@contextlib.contextmanager
def mutated(mutation, tree):
    """Make the mistake in a tree for a while."""
    path = tree / mutation.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def read(path):
    """Return the mutations of a list; names must differ."""
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = [Mutation(**fields | {"tests": tuple(fields["tests"].split())}) for fields in told]
    twice = {one.name for one in found if [other.name for other in found].count(one.name) > 1}
    if twice:
        sys.exit(f"{path}: {', '.join(sorted(twice))}: given twice")
    return found


def chosen(mutations, words):
    """Return those that have one of the words; all, if there are no words."""
    texts = [(one, " ".join((one.name, one.file, *one.tests)).lower()) for one in mutations]
    return [one for one, text in texts if not words or any(word.lower() in text for word in words)]


def run_tests(tree, tests, limit):
    """Return pytest's exit code in a tree, None if it takes too long, and the end of what it says."""
    plain = "PYTHONDONTWRITEBYTECODE", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "OMP_NUM_THREADS"
    env = os.environ | dict.fromkeys(plain, "1") | {"NEONDIST_CASES": "all"}  # any of them may be what sees it
    env["PYTHONPATH"] = os.pathsep.join([str(tree), *filter(None, [env.get("PYTHONPATH")])])
    plugins = ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]  # the latter chooses the suite's examples
    command = [sys.executable, "-m", "pytest", "-x", "-q", *plugins, *tests]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = subprocess.Popen(command, cwd=tree, env=env, start_new_session=True, text=True, **pipes)
    try:
        text, _ = child.communicate(timeout=limit)
        return child.returncode, text[-2000:]
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # with all that the tests have started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def outcome(mutation, tree, limit):
    """Return what became of a mutation in a copy: 'killed ...', 'SURVIVED', 'stale: ...' or 'broken: ...'."""
    if problem := mutation.problem(tree):
        return problem
    with mutated(mutation, tree):
        code, text = run_tests(tree, mutation.tests, limit)
    if code is None:
        return "killed (hang)"
    if code < 0:
        return "killed (crash)"
    return OUTCOMES.get(code) or f"broken: pytest ends with {code}: {text.strip().splitlines()[-1:]}"


def try_all(mutations, root, limit, jobs, tell):
    """Tell a line for each mutation; return those that are not killed."""
    trees = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="neondist-mutations-") as folder:
        for job in range(jobs):
            trees.put(Path(shutil.copytree(root, Path(folder) / str(job) / "tree", ignore=LEFT_OUT)))

        def attempt(mutation):
            tree, start = trees.get(), time.monotonic()
            try:
                found = outcome(mutation, tree, limit)
            finally:
                trees.put(tree)
            tell(f"{found:<14} {time.monotonic() - start:6.1f} s  {mutation.name}  ({' '.join(mutation.tests)})")
            return found

        with ThreadPoolExecutor(jobs) as pool:
            found = list(pool.map(attempt, mutations))
    return [one for one, what in zip(mutations, found, strict=True) if not what.startswith("killed")]


def sound(mutations, root, limit):
    """Tell whether the tests pass where nothing is mutated; without that a failure says nothing."""
    tests = sorted({test for one in mutations for test in one.tests})
    with tempfile.TemporaryDirectory(prefix="neondist-mutations-") as folder:
        tree = Path(shutil.copytree(root, Path(folder) / "tree", ignore=LEFT_OUT))
        code, text = run_tests(tree, tests, limit)
    if code:
        print(f"without a mutation the tests end with {code}:\n{text}")
    return code == 0


def tell(line):
    """Print a line at once, also where nobody sits at a terminal."""
    print(line, flush=True)


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--list", type=Path, default=LIST, help="file of mutations")
    parser.add_argument("--check", action="store_true", help="tell which are stale, and run nothing")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one mutation; a hang counts as killed")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the copies go too
    mutations = chosen(read(given.list), given.words)
    stale = {one: problem for one in mutations if (problem := one.problem(ROOT))}
    for one, problem in stale.items():
        print(f"{one.name}: {problem}: {one.file}")
    left = list(stale)
    if not given.check:
        whole = [one for one in mutations if one not in stale]
        left += try_all(whole, ROOT, given.limit, given.jobs, tell) if sound(whole, ROOT, 10 * given.limit) else whole
    print(f"{len(mutations)} mutations, {len(mutations) - len(left)} {'usable' if given.check else 'killed'}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
