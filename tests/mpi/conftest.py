"""Tests that run inside mpirun; test_under_mpirun.py starts them."""

import os

import pytest

INSIDE = "NEONDIST_MPI_TEST" in os.environ
collect_ignore_glob = [] if INSIDE else ["test_*.py"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A rank that fails alone would leave the others waiting: end them all, after saying why."""
    outcome = yield
    report = outcome.get_result()
    if INSIDE and report.failed:
        from mpi4py import MPI

        print(f"\nrank {MPI.COMM_WORLD.rank}: {item.nodeid}\n{report.longreprtext}", flush=True)
        MPI.COMM_WORLD.Abort(1)
