"""U-Net in PyTorch: equal losses in one process and on tiles, and documented differences of the scripts."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL, TILED = (ROOT / "examples" / name for name in ("torch_unet_one_process.py", "torch_unet.py"))


def test_torch_unet():
    pytest.importorskip("torch")
    from virtual_script import run_script

    expected, actual = (
        re.findall(r"loss ([\d.]+)", "\n".join(run_script(script, 3, ranks=ranks)))
        for script, ranks in ((ORIGINAL, 1), (TILED, 2))
    )
    assert len(expected) == 2
    assert float(expected[1]) < float(expected[0])
    assert actual == expected


def read_code(path):
    return path.read_text(encoding="utf-8").split('"""', 2)[2].strip().splitlines()


def test_documentation_shows_the_differences():
    changes = [
        line
        for line in difflib.unified_diff(read_code(ORIGINAL), read_code(TILED), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("---", "+++") and line[1:].strip()
    ]
    assert len([line for line in changes if line[0] == "+"]) <= 5
    for page in ("README.md", "docs/pytorch.md"):
        diffs = re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
        assert changes in [[line for line in block.splitlines() if line[0] in "+-"] for block in diffs], page
