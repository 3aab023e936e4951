"""Ranks that make different calls, or leave, at each of the collective calls of an interface."""

from itertools import permutations

import pytest

import neondist as nd
from neondist.errors import RemoteError


def refused_pairs(begin, calls, ranks=2):
    """Rank 1 makes another call than the others, for all pairs; return what is missing in their messages.

    Parameters
    ----------
    begin : callable
        Returns what the calls take, given a world.
    calls : dict of name to callable
        As messages name them.
    """

    def body(world):
        state, wrong = begin(world), []
        for one, other in permutations(calls, 2):
            try:
                calls[other if world.rank == 1 else one](state)
            except nd.ConfigError as error:
                if f"rank 1: the call is {other}, but {one} on rank 0" not in str(error) or not error.agreed:
                    wrong.append((one, other, str(error)))
            else:
                wrong.append((one, other, "nothing"))
        return wrong

    return nd.loopback.run(ranks, body, timeout=60.0)[0]


def check_leaving(begin, calls):
    """Rank 1 leaves before each call: the others have an error that names both."""
    for name, call in calls.items():

        def body(world, call=call):
            state = begin(world)
            if world.rank != 1:
                call(state)

        with pytest.raises(RemoteError, match=f"rank 1 has ended, but rank 0 waits for it, in {name}"):
            nd.loopback.run(2, body, timeout=60.0)


def methods(cls):
    """Public methods that a class defines itself."""
    return {name for name, value in vars(cls).items() if not name.startswith("_") and callable(value)}
