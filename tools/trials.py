"""Random cases on several processes, for random_graphs.py, random_modules.py and operator_samples.py."""

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


def create_parser(doc: str) -> argparse.ArgumentParser:
    """Return the argument parser of a tool, described by the first line of its docstring."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(f"{date.today():%Y%m%d}"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    return parser


def run_cases(attempt: Callable[..., Any], arguments: argparse.Namespace, *options: Any) -> Iterator[Any]:
    """Yield attempt(seed, number, *options) for each case, and report progress."""
    numbers, begin = range(arguments.first, arguments.first + arguments.cases), time.monotonic()
    # CUDA cannot be used in a fork of a process that has initialised it
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(attempt, repeat(arguments.seed), numbers, *map(repeat, options), chunksize=5)
        for done, result in enumerate(results, start=1):
            yield result
            if done % 100 == 0 or done == arguments.cases:
                print(f"{done} cases in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def format_counts(counts: Counter) -> str:
    """Format counts, the most frequent first."""
    return ", ".join(f"{key} {count}" for key, count in counts.most_common())
