"""A disk that refuses any one call: one message, exit code 2, nothing half written, and the earlier run goes on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHARE = 97  # about 20 of all faults; `python tests/helpers/storage_faults.py FOLDER 4` tries 500


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="compiles a library to preload")
def test_faults_at_some_of_all_calls(tmp_path):
    script = Path(__file__).parents[1] / "helpers" / "storage_faults.py"
    command = [sys.executable, script, tmp_path, str(SHARE)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong" in done.stdout
