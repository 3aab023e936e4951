"""The first example of AutoDist: the losses of one process, and a few changed lines."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_PROCESS, DISTRIBUTED = (ROOT / "examples" / name for name in ("autodist_one_process.py", "autodist.py"))


def code_of(path):
    return path.read_text(encoding="utf-8").split('"""', 2)[2].strip().splitlines()


def test_losses_are_those_of_one_process(monkeypatch):
    pytest.importorskip("torch")
    from virtual_script import printed_by

    expected = printed_by(ONE_PROCESS, 2)
    assert re.fullmatch(r"step: 1, train_loss: \d\.\d{9}", expected[-1])
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert sorted(printed_by(DISTRIBUTED, 2, ranks=2)) == sorted(2 * expected)  # virtual ranks share one output


def test_the_documentation_shows_how_the_scripts_differ():
    changes = [
        line
        for line in difflib.unified_diff(code_of(ONE_PROCESS), code_of(DISTRIBUTED), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("---", "+++") and line[1:].strip()
    ]
    assert len(changes) <= 6
    page = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
    assert "\n".join(changes) in page
