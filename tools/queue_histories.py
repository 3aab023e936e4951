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
    """Run histories; print what happened in them, and the seed of one that fails."""
    one = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    one.add_argument("--cases", type=int, default=2000)
    one.add_argument("--seed", type=int, default=None, help="of the first history (default: another one every time)")
    one.add_argument("--jobs", type=int, default=1)
    given = one.parse_args()
    first = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    happened: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(given.jobs) as pool:
        for found in pool.map(partial(_kept_small, Path(folder)), range(first, first + given.cases), chunksize=50):
            happened.update(found)
    print(f"{given.cases} histories from seed {first}: {dict(happened)}")
    return 0


def _kept_small(folder: Path, seed: int) -> dict[str, int]:
    found = run_history(seed, folder)
    for path in folder.glob(f"{seed}.sqlite*"):
        path.unlink()
    return found


if __name__ == "__main__":
    sys.exit(main())
