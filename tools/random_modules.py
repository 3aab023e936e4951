"""Random PyTorch modules on tiles: python tools/random_modules.py [--cases N] [--seed S] [--first K] [--jobs J].

Each case is a random module, whose outputs, gradients and buffers on two grids of virtual ranks are those of one
process, in float64 (tests/helpers/random_modules.py says how). Wrong ones are printed as programs, as small as they
could be made; the exit code is 1 if there are any.
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the modules are tiny
os.environ.setdefault("TORCH_LOGS", "-all")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from random_modules import attempt, draw, shrink


def tried(seed: int, number: int, small: bool) -> list[tuple[str, str]]:
    """Return the outcome of a case on each of its grids, and what to print."""
    drawn, found = draw(seed, number), []
    for grid, outcome in attempt(drawn):
        kind, _, why = outcome.partition(": ")
        if kind == "wrong":
            case = shrink(drawn, grid) if small else drawn
            mode = "training" if case.training else "evaluation"
            why = f"seed {seed}, case {number}, {grid}: {why}\n{case.shapes}, in {mode}\n{case.program()}"
        found.append((kind, why))
    return found


def main() -> int:
    """Try them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(f"{date.today():%Y%m%d}"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--large", action="store_true", help="print wrong ones as they are")
    given = parser.parse_args()
    numbers, begin = range(given.first, given.first + given.cases), time.monotonic()
    results, refusals = Counter(), Counter()
    with ProcessPoolExecutor(given.jobs) as pool:
        every = pool.map(tried, [given.seed] * given.cases, numbers, [not given.large] * given.cases, chunksize=5)
        for done, found in enumerate(every, start=1):
            for kind, why in found:
                results[kind] += 1
                if kind == "refused":
                    refusals[why.partition(": ")[2].partition(";")[0]] += 1
                if kind == "wrong":
                    print(why, flush=True)
            if done % 100 == 0:
                print(
                    f"{done} modules in {time.monotonic() - begin:.0f} s: {told(results)}", file=sys.stderr, flush=True
                )
    print(f"seed {given.seed}, {given.cases} modules in {time.monotonic() - begin:.0f} s: {told(results)}")
    for why, count in refusals.most_common():
        print(f"{count:5d}  {why}")
    return int(results["wrong"] > 0)


def told(counts: Counter) -> str:
    """Return counts as text, the most frequent first."""
    return ", ".join(f"{key} {count}" for key, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
