"""Faults of single storage calls, and processes that end before them: no partial files, and runs resume."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHARE = 199  # about 10 of all faults; `python tests/helpers/storage_faults.py FOLDER 4` tries 500
ENDS = 150
SEED = int(os.environ["NEONDIST_SEED"])

pytest.importorskip("torch")


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="compiles a library to preload")
@pytest.mark.long
def test_faults_and_kills_at_sampled_calls(tmp_path):
    """Also end two kinds of commands before their calls; the seed selects the sample."""
    script = Path(__file__).parents[1] / "helpers" / "storage_faults.py"
    ends = ENDS, SEED % ENDS, "kill", "fresh", "GB", "resume"
    command = [sys.executable, script, tmp_path, *map(str, (SHARE, (SEED - 20) % SHARE, "and", *ends))]
    env = os.environ | {"OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib"}
    process = subprocess.run(command, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count(" 0 wrong") == 2
