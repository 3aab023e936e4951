"""Tests that run inside ranks of torch.distributed; test_under_torchrun.py starts them."""

import os

import pytest

INSIDE = "TORCHELASTIC_RUN_ID" in os.environ and "NEONDIST_MPI_TEST" in os.environ
collect_ignore_glob = [] if INSIDE else ["test_*.py"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A rank that fails alone would leave the others waiting: end them all, after saying why."""
    outcome = yield
    report = outcome.get_result()
    if INSIDE and report.failed:
        from neondist.torch.transport import world

        print(f"\nrank {os.environ['RANK']}: {item.nodeid}\n{report.longreprtext}", flush=True)
        world().abort(1)
