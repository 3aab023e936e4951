"""Fixtures of the tests of commands."""

import pytest
from cli_runs import EXPERIMENT
from model_definition import MODEL_DEFINITION, draw_records, write_csv


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


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return the working directory, which holds a model and records."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"model_{tmp_path.name}.py").write_text(MODEL_DEFINITION)
    write_csv(tmp_path / "train.csv", draw_records(64))
    write_csv(tmp_path / "test.csv", draw_records(40, seed=1))
    return tmp_path
