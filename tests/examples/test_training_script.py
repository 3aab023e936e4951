"""The training script on tiles has the losses and scores of one process, and few lines of its own."""

import re
from difflib import ndiff
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ORIGINAL, TILED = EXAMPLES / "training_script_one_process.py", EXAMPLES / "training_script.py"


@pytest.mark.long
def test_numbers_are_those_of_one_process(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("tensorboardX")
    from virtual_script import printed_by

    figures = []
    for ranks in (1, 3):
        text = "\n".join(printed_by(TILED, tmp_path / str(ranks), ranks=ranks))
        figures.append(np.array(re.findall(r"loss ([\d.]+)  IoU ([\d.]+)", text), float))
        state = torch.load(tmp_path / str(ranks) / "checkpoint.pt", weights_only=True)
        assert state["epoch"] == 2
    assert figures[0].shape == (3, 2)
    assert figures[0][2, 0] < 0.9 * figures[0][0, 0]
    np.testing.assert_allclose(figures[1][:, 0], figures[0][:, 0], rtol=1e-6)
    np.testing.assert_allclose(figures[1][:, 1], figures[0][:, 1], atol=1e-3)


def test_six_lines_differ():
    code = [path.read_text(encoding="utf-8").split('"""', 2)[2].splitlines() for path in (ORIGINAL, TILED)]
    lines = [[line.strip() for line in each if line.strip()] for each in code]  # indented ones are the same
    assert len([line for line in ndiff(*lines) if line[0] == "+"]) <= 6
