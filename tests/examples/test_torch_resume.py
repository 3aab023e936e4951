"""The script that goes on where it stopped, on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neondist.launcher.mpirun import find_mpirun

pytest.importorskip("torch")
pytest.importorskip("safetensors")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torch_resume.py"


def losses_of(steps, file, ranks=None):
    mpirun = find_mpirun(os.environ)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib", **mpirun.environment()}
    command = [*(mpirun.command(ranks) if ranks else ()), sys.executable, SCRIPT, str(steps), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"loss ([\d.]+)", done.stdout)


def test_torch_resume(tmp_path):
    expected = losses_of(8, tmp_path / "whole.safetensors")
    assert len(expected) == 8
    begun = losses_of(3, tmp_path / "parts.safetensors", 2)
    assert begun + losses_of(8, tmp_path / "parts.safetensors") == expected
