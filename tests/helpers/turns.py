"""Cases and grids that take turns: other ones with each NEONDIST_SEED, and all with NEONDIST_CASES=all."""

import os
import zlib

SEED, EVERY = int(os.environ.get("NEONDIST_SEED", "20")), os.environ.get("NEONDIST_CASES") == "all"


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
