"""Fixtures of the tests of commands."""

import pytest
from cli_runs import EXPERIMENT


@pytest.fixture
def folder(tmp_path):
    """Return a folder with an experiment, `toy.yaml`."""
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    return tmp_path


@pytest.fixture
def pids(folder):
    """Return a function that lists the process ids written by `--import write_pid.py`."""
    (folder / "write_pid.py").write_text("import os, pathlib\npathlib.Path(f'pid{os.getpid()}').touch()\n")
    return lambda: [int(path.name[3:]) for path in folder.glob("pid*")]
