"""Peak memory that `check --measure-memory` reports, compared with that of the ranks of a run."""

import os
import re
import sys
from pathlib import Path

import pytest
from availability import needs_mpirun
from cli_runs import build_command, mpirun_environment, run_command

from neondist.launcher.mpirun import find_mpirun

YAML = Path(__file__).parents[2] / "yaml"
SCRIPT = """
import sys
from neondist.bench.memory import peak_bytes
from neondist.cli import main

code = main()
sys.stdout.write(f"peak {peak_bytes()}\\n")  # a single write, because ranks share the output
sys.exit(code)
"""


@needs_mpirun
@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("synthetic_distarray_large.yaml", ["epochs=1", "dataset.train=40", "dataset.test=16"]),
        ("mnist_distarray_gb.yaml", ["epochs=1", "model.num_pretrain_epochs=1", "model.num_initial_epochs=1"]),
    ],
)
@pytest.mark.long
def test_measured_peak_memory_is_that_of_rank_0(tmp_path, file, settings):
    words, env = [YAML / file, "--set", *settings], {"OMP_NUM_THREADS": "1"}
    code, out, err = run_command(build_command("check", *words, "-n", 2, "--measure-memory"), tmp_path, **env)
    assert code == 0, err
    (expected,) = re.findall(r"^measured peak: ([\d.]+) MB for the whole process of rank 0", out, re.MULTILINE)
    run = [sys.executable, "-c", SCRIPT, "run", *map(str, words), "--output", "run"]
    code, out, err = run_command([*find_mpirun(os.environ).command(2), *run], tmp_path, **mpirun_environment(), **env)
    assert code == 0, err
    peaks = [int(peak) for peak in re.findall(r"^peak (\d+)$", out, re.MULTILINE)]
    assert len(peaks) == 2, out
    assert max(peaks) / 1.15 < float(expected) * 1e6 < max(peaks) * 1.15  # rank 0 draws, so it needs the most
