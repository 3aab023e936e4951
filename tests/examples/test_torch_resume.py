"""The script that goes on where it stopped, on any number of ranks."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from virtual_script import printed_by

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torch_resume.py"


def losses_of(*words, ranks=1):
    return re.findall(r"loss ([\d.]+)", "\n".join(printed_by(SCRIPT, *words, ranks=ranks)))


@pytest.mark.long
def test_torch_resume(tmp_path):
    expected = losses_of(8, tmp_path / "whole.safetensors")
    assert len(expected) == 8
    begun = losses_of(3, tmp_path / "parts.safetensors", ranks=2)
    assert begun + losses_of(8, tmp_path / "parts.safetensors") == expected
