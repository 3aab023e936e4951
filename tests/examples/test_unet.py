"""The U-Net of examples/unet_retina.py on small crops: the same losses on 1 and 2 ranks, and a picture."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neondist.launcher.mpirun import find_mpirun

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "unet_retina.py"


def test_unet(tmp_path):
    pytest.importorskip("skimage", reason="the photograph comes with scikit-image")
    pytest.importorskip("matplotlib", reason="the picture is drawn by matplotlib")
    mpirun, losses = find_mpirun(os.environ), {}
    for ranks in (1, 2):
        picture = tmp_path / f"unet{ranks}.png"
        command = [sys.executable, SCRIPT, "--size", "64", "--steps", "2", "--output", picture]
        environment = {**os.environ, **mpirun.environment(), "OMP_NUM_THREADS": "1", "NEONDIST_TESTS_HIDE": "torch"}
        done = subprocess.run(
            [*mpirun.command(ranks), *command], env=environment, capture_output=True, text=True, timeout=480
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses[ranks] = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
        assert len(losses[ranks]) == 2
        assert picture.stat().st_size > 10_000
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
