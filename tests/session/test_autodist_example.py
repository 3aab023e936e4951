"""First AutoDist example: the losses of one process, and few changed lines."""

import difflib
import re
import sys
from pathlib import Path

import pytest
from cli_runs import run_command

ROOT = Path(__file__).resolve().parents[2]
ONE_PROCESS, DISTRIBUTED = (ROOT / "examples" / name for name in ("autodist_one_process.py", "autodist.py"))


def read_code(path):
    return path.read_text(encoding="utf-8").split('"""', 2)[2].strip().splitlines()


def test_losses_match_one_process(monkeypatch):
    pytest.importorskip("torch")
    from virtual_script import run_script

    expected = run_script(ONE_PROCESS, 2)
    assert re.fullmatch(r"step: 1, train_loss: \d\.\d{9}", expected[-1])
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert sorted(run_script(DISTRIBUTED, 2, ranks=2)) == sorted(2 * expected)  # virtual ranks share stdout


def test_documentation_shows_the_changed_lines():
    changes = [
        line
        for line in difflib.unified_diff(read_code(ONE_PROCESS), read_code(DISTRIBUTED), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("---", "+++") and line[1:].strip()
    ]
    assert len(changes) <= 6
    page = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
    assert "\n".join(changes) in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'none.yaml'", "none.yaml: no such file"),
        ("'two.yaml', 'PSX'", "strategy: unknown builder 'PSX'; did you mean 'PS'?"),
        ("'two.yaml', grid={'rows': 3}", "grid (replicas: 1, rows: 3, cols: any) does not match 2 ranks"),
    ],
)
def test_mistakes_before_the_start_of_ranks(tmp_path, arguments, message):
    """Print one message with the line of the script, and exit with code 2."""
    (tmp_path / "two.yaml").write_text("nodes: [{address: localhost, cpus: [0, 1]}]")
    (tmp_path / "script.py").write_text(f"import neondist as nd\n\nd = nd.AutoDist({arguments})\n")
    code, out, err = run_command([sys.executable, "script.py"], tmp_path)
    assert (code, out) == (2, "")
    assert (err.startswith("error: "), f"script.py:3: {message}" in err, err.count("\n")) == (True, True, 1), err
