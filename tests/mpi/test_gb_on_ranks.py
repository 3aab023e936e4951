"""Pretraining over MPI, on any number of ranks."""

from common_checks import max_relative_difference
from gb_runs import pretrain_and_fit, run_pretraining_steps
from mpi4py import MPI
from root_rank import compute_on_root

import neondist as nd

world = MPI.COMM_WORLD


def test_pretraining_matches_one_process():
    """Train one kind of model; tests on virtual ranks cover the others."""
    expected = compute_on_root(lambda: run_pretraining_steps("unshared"))
    for replicas in {r for r in (1, 2) if world.size % r == 0}:
        actual = run_pretraining_steps("unshared", nd.ProcessGrid(world, replicas=replicas))
        assert max_relative_difference(actual, expected) < 1e-9


def test_complete_run_matches_one_process():
    assert max_relative_difference(pretrain_and_fit(nd.ProcessGrid(world)), compute_on_root(pretrain_and_fit)) < 1e-9
