"""Cases, grids and long tests that take turns: others with each NEONDIST_SEED, and all with NEONDIST_CASES=all."""

import os
import random
import zlib
from collections import defaultdict

SEED, EVERY = int(os.environ.get("NEONDIST_SEED", "20")), os.environ.get("NEONDIST_CASES") == "all"
SHARE = 6
"""so many seeds in a row reach all long tests"""


def some(cases, share=2):
    """Return one in `share` of the cases; so many seeds in a row reach all."""
    cases = list(cases)
    return cases if EVERY else cases[SEED % share :: share]


def in_turn(grids, number=2):
    """Return some of the grids; which, depends on the test, and on the seed."""
    if EVERY:
        return tuple(grids)
    at = SEED + zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].encode())
    return tuple(grids[(at + more) % len(grids)] for more in range(number))


def taking_turns(items):
    """Return the collected tests of this run, and those of other seeds.

    Of those that are marked with `long` one in SHARE is run: so many of the cases of a test that has several.
    """
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") and not EVERY:
            functions[item.nodeid.partition("[")[0]].append(item)
    later = {case for name, cases in functions.items() for case in left_out(name, cases, SEED)}
    return [item for item in items if item not in later], [item for item in items if item in later]


def left_out(name, cases, seed):
    """Return the cases of a long test that other seeds run."""
    # in an order of their own: every sixth one of a table may be of the same dtype
    order = random.Random(name).sample(range(len(cases)), len(cases))
    first = seed + zlib.crc32(name.encode())
    return [case for at, case in zip(order, cases, strict=True) if (first + at) % SHARE]
