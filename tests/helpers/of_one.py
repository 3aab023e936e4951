"""References of one process, computed by one rank for all, which would otherwise share the same few cores."""

from mpi4py import MPI


def of_one(compute):
    """Return what `compute()` returns on rank 0, on every rank."""
    world = MPI.COMM_WORLD
    return world.bcast(compute() if world.rank == 0 else None)
