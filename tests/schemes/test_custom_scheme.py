"""Example of a custom scheme, and the size of the schemes."""

import runpy
from pathlib import Path

import neondist as nd

ROOT = Path(__file__).resolve().parents[2]


def test_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_scheme.py"), run_name="__main__")
    assert "instead of" in capsys.readouterr().out


def test_schemes_have_at_most_sixty_lines():
    example = (ROOT / "examples" / "own_scheme.py").read_text().split("# begin scheme\n")[1].split("# end scheme")[0]
    assert len(example.splitlines()) <= 60
    assert nd.schemes.ExchangePolicy.__doc__
    schemes = {file.name: file.read_text() for file in (ROOT / "neondist" / "halo" / "policies").glob("*.py")}
    assert "(ExchangePolicy):" in schemes["tower.py"]
    assert {
        name for name, text in schemes.items() if "(ExchangePolicy):" in text and len(text.splitlines()) > 60
    } == set()
