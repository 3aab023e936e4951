"""Selection of cases, grids and long tests by NEONDIST_SEED; NEONDIST_CASES=all selects all."""

import os
import random
import zlib
from collections import defaultdict

SEED, ALL_CASES = int(os.environ.get("NEONDIST_SEED", "20")), os.environ.get("NEONDIST_CASES") == "all"
LONG_TEST_PERIOD = 6
"""number of consecutive seeds that together run all long tests"""


def select_cases(cases, period=2):
    """Return one in `period` of the cases; `period` consecutive seeds select all."""
    cases = list(cases)
    return cases if ALL_CASES else cases[SEED % period :: period]


def select_grids(grids, number=2):
    """Return `number` grids, which depend on the test and the seed."""
    if ALL_CASES:
        return tuple(grids)
    start = SEED + zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].encode())
    return tuple(grids[(start + offset) % len(grids)] for offset in range(number))


def select_tests(items):
    """Return the collected tests of this run and the deselected ones.

    One in LONG_TEST_PERIOD of the cases of each test marked `long` is run.
    """
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") and not ALL_CASES:
            functions[item.nodeid.partition("[")[0]].append(item)
    deselected = {case for name, cases in functions.items() for case in list_deselected_cases(name, cases, SEED)}
    return [item for item in items if item not in deselected], [item for item in items if item in deselected]


def list_deselected_cases(name, cases, seed):
    """Return the cases of a long test that this seed does not run."""
    # shuffled, since every sixth case of a table may have the same dtype
    order = random.Random(name).sample(range(len(cases)), len(cases))
    first = seed + zlib.crc32(name.encode())
    return [case for position, case in zip(order, cases, strict=True) if (first + position) % LONG_TEST_PERIOD]
