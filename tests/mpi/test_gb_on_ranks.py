"""Pretraining over real MPI, at whatever rank count mpirun gives."""

from gb_runs import pretrain_and_fit, pretrain_steps
from mpi4py import MPI
from of_one import of_one
from support import worst

import neondist as nd

world = MPI.COMM_WORLD


def test_pretraining_is_the_same():
    """Virtual ranks go through all kinds."""
    expected = of_one(lambda: pretrain_steps("unshared"))
    for replicas in {r for r in (1, 2) if world.size % r == 0}:
        found = pretrain_steps("unshared", nd.ProcessGrid(world, replicas=replicas))
        assert worst(found, expected) < 1e-9


def test_a_whole_run_is_the_same():
    assert worst(pretrain_and_fit(nd.ProcessGrid(world)), of_one(pretrain_and_fit)) < 1e-9
