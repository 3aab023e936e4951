"""Comparison of large-image steps with a reference, on an image that fits in memory."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")


@pytest.fixture(scope="module")
def tool():
    # load by path: other tools share names with helpers of tests
    spec = importlib.util.spec_from_file_location("large_step", Path(__file__).parents[2] / "tools" / "large_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_step_matches_its_reference(tool, tmp_path, monkeypatch, capsys):
    options = ["--extent", "384", "--square", "32", "--dtype", "float64", "--file", str(tmp_path / "large.h5")]
    monkeypatch.setattr(sys, "argv", ["large_step.py", *options])
    assert tool.main() == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "relative to the largest value" in line]) == 9
    monkeypatch.setattr(tool, "LABEL", 4)  # the file has another label
    assert tool.main() == 1
