"""Random cases on several processes: what random_graphs.py, random_modules.py and operator_samples.py share."""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from itertools import repeat
from typing import Any


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the options of a tool with this docstring."""
    found = argparse.ArgumentParser(description=doc.partition("\n")[0])
    found.add_argument("--cases", type=int, default=300)
    found.add_argument("--seed", type=int, default=int(f"{date.today():%Y%m%d}"))
    found.add_argument("--first", type=int, default=0)
    found.add_argument("--jobs", type=int, default=1)
    return found


def tried(attempt: Callable[..., Any], given: argparse.Namespace, *more: Any) -> Iterator[Any]:
    """Yield attempt(seed, number, *more) for each case, and say how many there have been."""
    numbers, begin = range(given.first, given.first + given.cases), time.monotonic()
    # a GPU that the parent has asked for cannot be used in a fork
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        every = pool.map(attempt, repeat(given.seed), numbers, *map(repeat, more), chunksize=5)
        for done, found in enumerate(every, start=1):
            yield found
            if done % 100 == 0 or done == given.cases:
                print(f"{done} cases in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def told(counts: Counter) -> str:
    """Return counts as text, the most frequent first."""
    return ", ".join(f"{key} {count}" for key, count in counts.most_common())
