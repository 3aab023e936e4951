"""Test that the example resumes on a different number of ranks."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from virtual_script import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torch_resume.py"


def train(*words, ranks=1):
    return re.findall(r"loss ([\d.]+)", "\n".join(run_script(SCRIPT, *words, ranks=ranks)))


@pytest.mark.long
def test_torch_resume(tmp_path):
    expected = train(8, tmp_path / "full.safetensors")
    assert len(expected) == 8
    interrupted = train(3, tmp_path / "parts.safetensors", ranks=2)
    assert interrupted + train(8, tmp_path / "parts.safetensors") == expected
