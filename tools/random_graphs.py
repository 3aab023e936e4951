"""Generated networks against PyTorch: python tools/random_graphs.py [--cases N] [--seed S] [--first K] [--jobs J].

Each case is a random network, trained serially and on two grids of virtual ranks (tests/helpers/graphs says how).
Wrong ones are printed as programs, as small as they could be made; the exit code is 1 if there are any.
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the networks are tiny
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from graphs.case import Case, leaves, ranks_of
from graphs.check import check
from graphs.draw import draw_case
from graphs.shrink import shrink


def attempt(seed: int, number: int) -> tuple[str, Case, str]:
    """Return what came of a case, the case, and what to print."""
    case = draw_case(seed, number)
    try:
        return check(case), case, ""
    except Exception:
        small = shrink(case, check)
    try:
        check(small)
    except Exception as error:
        return "wrong", case, f"seed {seed}, case {number}: {type(error).__name__}: {error}\n\n{small.program()}"
    return "wrong", case, f"seed {seed}, case {number}: not always\n\n{small.program()}"


def main() -> int:
    """Try them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(f"{date.today():%Y%m%d}"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    numbers, begin = range(given.first, given.first + given.cases), time.monotonic()
    results, tried = Counter(), {"layers": Counter(), "schemes": Counter(), "ranks": Counter()}
    with ProcessPoolExecutor(given.jobs) as pool:
        for result, case, text in pool.map(attempt, [given.seed] * given.cases, numbers, chunksize=5):
            results[result] += 1
            tried["layers"].update(kind for kind, _ in leaves(case.network))
            tried["schemes"].update(
                {case.scheme, *(given["scheme"] for _, given in leaves(case.network) if "scheme" in given)}
            )
            tried["ranks"].update([ranks_of(case.grid), ranks_of(case.other)])
            if text:
                print(text, flush=True)
            if results.total() % 100 == 0:
                print(f"{results.total()} cases in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    print(f"seed {given.seed}, {given.cases} cases in {time.monotonic() - begin:.0f} s: {told(results)}")
    for name, counts in tried.items():
        print(f"{name}: {told(counts)}")
    return int(results["wrong"] > 0)


def told(counts: Counter) -> str:
    """Return counts as text, the most frequent first."""
    return ", ".join(f"{key} {count}" for key, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
