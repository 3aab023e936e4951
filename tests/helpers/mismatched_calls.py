"""Mismatched collective calls: ranks that make different calls or exit early."""

from itertools import permutations

import pytest

import neondist as nd
from neondist.errors import RemoteError


def find_undetected_pairs(create_state, calls, ranks=2):
    """Make a different call on rank 1 than on the others, for all pairs; return the pairs without the expected error.

    Parameters
    ----------
    create_state : callable
        Returns the argument of the calls for a world.
    calls : dict of name to callable
        Calls by their names in messages.
    """

    def body(world):
        state, undetected = create_state(world), []
        for first, second in permutations(calls, 2):
            try:
                calls[second if world.rank == 1 else first](state)
            except nd.ConfigError as error:
                if (
                    f"rank 1: the call is {second}, but {first} on rank 0" not in str(error)
                    or not error.raised_on_all_ranks
                ):
                    undetected.append((first, second, str(error)))
            else:
                undetected.append((first, second, "nothing"))
        return undetected

    return nd.loopback.run(ranks, body, timeout=60.0)[0]


def check_early_exit(create_state, calls):
    """Check that the exit of rank 1 before each call raises an error on the others that names rank and call."""
    for name, call in calls.items():

        def body(world, call=call):
            state = create_state(world)
            if world.rank != 1:
                call(state)

        with pytest.raises(RemoteError, match=f"rank 1 has ended, but rank 0 waits for it, in {name}"):
            nd.loopback.run(2, body, timeout=60.0)


def list_public_methods(cls):
    """Return the names of public methods that a class defines itself."""
    return {name for name, value in vars(cls).items() if not name.startswith("_") and callable(value)}
