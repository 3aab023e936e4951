"""Random histories of a task queue (lost, late and stopped workers, reopened files, restored weights): `make hunt`.

.venv/bin/python tools/queue_histories.py --cases 10000 --jobs 2
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from queue_histories import run_history


def main() -> int:
    """Run histories; print the events in them, and the seed of a failing one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None, help="seed of the first history (default: random)")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    events: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(arguments.jobs) as pool:
        seeds = range(first, first + arguments.cases)
        for counts in pool.map(partial(_run_and_remove, Path(folder)), seeds, chunksize=50):
            events.update(counts)
    print(f"{arguments.cases} histories from seed {first}: {dict(events)}")
    return 0


def _run_and_remove(folder: Path, seed: int) -> dict[str, int]:
    events = run_history(seed, folder)
    for path in folder.glob(f"{seed}.sqlite*"):
        path.unlink()
    return events


if __name__ == "__main__":
    sys.exit(main())
