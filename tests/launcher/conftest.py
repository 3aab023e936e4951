"""Fixtures of the tests of jobs."""

import pytest
from cli_runs import EXPERIMENT

from neondist.launcher import members


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with an experiment, and a script that prints the hosts of its file `hosts`."""
    monkeypatch.setattr(members, "HOST_LIST_POLL_SECONDS", 0.01)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "sh -c 'case $* in *grep*) exit 116; esac' sh")  # all hosts are usable
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    (tmp_path / "discover").write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    (tmp_path / "discover").chmod(0o755)
    (tmp_path / "out").mkdir()
    return tmp_path
