"""Training script on tiles: losses and scores of one process, and few different lines."""

import re
from difflib import ndiff
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ORIGINAL, TILED = EXAMPLES / "training_script_one_process.py", EXAMPLES / "training_script.py"


@pytest.mark.long
def test_metrics_match_one_process(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("tensorboardX")
    from virtual_script import run_script

    metrics = []
    for ranks in (1, 3):
        text = "\n".join(run_script(TILED, tmp_path / str(ranks), ranks=ranks))
        metrics.append(np.array(re.findall(r"loss ([\d.]+)  IoU ([\d.]+)", text), float))
        state = torch.load(tmp_path / str(ranks) / "checkpoint.pt", weights_only=True)
        assert state["epoch"] == 2
    assert metrics[0].shape == (3, 2)
    assert metrics[0][2, 0] < 0.9 * metrics[0][0, 0]
    np.testing.assert_allclose(metrics[1][:, 0], metrics[0][:, 0], rtol=1e-6)
    np.testing.assert_allclose(metrics[1][:, 1], metrics[0][:, 1], atol=1e-3)


def test_six_lines_differ():
    code = [path.read_text(encoding="utf-8").split('"""', 2)[2].splitlines() for path in (ORIGINAL, TILED)]
    lines = [[line.strip() for line in script if line.strip()] for script in code]  # indentation does not count
    assert len([line for line in ndiff(*lines) if line[0] == "+"]) <= 6
