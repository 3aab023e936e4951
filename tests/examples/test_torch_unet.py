"""The U-Net in PyTorch: one process and tiles give the same losses; the scripts differ as the documentation shows."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neondist.launcher.mpirun import find_mpirun

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL, TILED = (ROOT / "examples" / name for name in ("torch_unet_one_process.py", "torch_unet.py"))
STEPS = "3"


def losses_of(script, launcher=(), **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib", **environment}
    command = [*launcher, sys.executable, script, STEPS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"loss ([\d.]+)", done.stdout)


def test_torch_unet():
    pytest.importorskip("torch")
    mpirun = find_mpirun(os.environ)
    expected = losses_of(ORIGINAL)
    assert len(expected) == 2
    assert float(expected[1]) < float(expected[0])
    assert losses_of(TILED, mpirun.command(2), **mpirun.environment()) == expected


def code_of(path):
    return path.read_text(encoding="utf-8").split('"""', 2)[2].strip().splitlines()


def test_the_documentation_shows_how_the_scripts_differ():
    changes = [
        line
        for line in difflib.unified_diff(code_of(ORIGINAL), code_of(TILED), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("---", "+++") and line[1:].strip()
    ]
    assert len([line for line in changes if line[0] == "+"]) <= 5
    page = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    assert [line for line in shown.splitlines() if line[0] in "+-"] == changes
