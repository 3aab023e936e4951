"""Computation of references on one rank, because all ranks would compete for the same cores."""

from mpi4py import MPI


def compute_on_root(compute):
    """Return the result of `compute()` on rank 0 on every rank."""
    world = MPI.COMM_WORLD
    return world.bcast(compute() if world.rank == 0 else None)
