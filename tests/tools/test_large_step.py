"""What a step on a large image is compared with, on one that fits."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import large_step


def test_a_step_is_what_few_repeats_say_of_many(tmp_path, monkeypatch, capsys):
    options = ["--extent", "384", "--square", "32", "--dtype", "float64", "--file", str(tmp_path / "large.h5")]
    monkeypatch.setattr(sys, "argv", ["large_step.py", *options])
    assert large_step.main() == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "of its largest value" in line]) == 9
    monkeypatch.setattr(large_step, "LABEL", 4)  # the file has the other
    assert large_step.main() == 1
