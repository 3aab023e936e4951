"""A disk that refuses any one call, and a process that ends before it: nothing half written, and the run goes on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHARE = 149  # about 15 of all faults; `python tests/helpers/storage_faults.py FOLDER 4` tries 500


def tried(folder, *words):
    script = Path(__file__).parents[1] / "helpers" / "storage_faults.py"
    command = [sys.executable, script, folder, *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "matplotlib"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong" in done.stdout


pytest.importorskip("torch")
linux = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="compiles a library to preload")


@linux
def test_faults_at_some_of_all_calls(tmp_path):
    tried(tmp_path, SHARE)


@linux
def test_ends_before_some_of_all_calls(tmp_path):
    """One command and the same anew: one in 150 of all calls, others in each suite."""
    tried(tmp_path, 150, int(os.environ["NEONDIST_SEED"]) % 150, "kill", "fresh", "GB", "resume")
