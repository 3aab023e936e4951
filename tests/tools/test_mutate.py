"""Mutation testing: mistakes that tests detect, and mistakes that they do not."""

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
CODE = """\
def half(n):
    return n // 2


def next_even(n):
    while n % 2:
        n += 1
    return n
"""
TESTS = """\
from code_under_test import half, next_even


def test_half():
    assert half(4) == 2


def test_next_even():
    assert next_even(3) == 4
"""
MUTATIONS_FILE = """\
- {name: seen, file: code_under_test.py, old: n // 2, new: n // 3, tests: test_it.py}
- {name: not seen, file: code_under_test.py, old: n // 2, new: -(-n // 2), tests: 'test_it.py::test_half'}
- {name: endless, file: code_under_test.py, old: n += 1, new: n += 2, tests: test_it.py}
- {name: twice, file: code_under_test.py, old: return n, new: return 0, tests: test_it.py}
- {name: gone, file: code_under_test.py, old: n // 5, new: n, tests: test_it.py}
- {name: no file, file: other.py, old: n, new: n, tests: test_it.py}
- {name: no test, file: code_under_test.py, old: n // 2, new: n, tests: test_other.py}
- {name: no such test, file: code_under_test.py, old: n // 2, new: n, tests: 'test_it.py::test_other'}
"""


@pytest.fixture
def mutate(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import mutate

    yield mutate
    del sys.modules["mutate"]


@pytest.fixture
def tree(tmp_path):
    for name, text in ("code_under_test.py", CODE), ("test_it.py", TESTS), ("list.yaml", MUTATIONS_FILE):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.long
def test_outcomes_of_mutations(mutate, tree, monkeypatch):
    lines = []
    mutations = {mutation.name: mutation for mutation in mutate.read_mutations(tree / "list.yaml")}
    endless = mutations.pop("endless")
    remaining = mutate.try_all(list(mutations.values()), tree, 120, 1, lines.append)
    assert [mutation.name for mutation in remaining] == [name for name in mutations if name != "seen"]
    for name, outcome in {
        "seen": "killed ",
        "not seen": "SURVIVED",
        "twice": "stale: its text occurs 2 times",
        "gone": "stale: its text occurs 0 times",
        "no file": "stale: no such file",
        "no test": "stale: no test_other.py",
        "no such test": "broken: pytest ends with 4",
    }.items():
        assert next(line for line in lines if f" s  {name}  (test_" in line).startswith(outcome)
    assert mutate.try_all([endless], tree, 2, 1, lines.append) == []
    assert "killed (hang)" in lines[-1]
    assert (tree / "code_under_test.py").read_text() == CODE  # only copies were changed


@pytest.mark.long
def test_tests_must_pass_without_a_mutation(mutate, tree, capsys):
    mutations = mutate.read_mutations(tree / "list.yaml")[:1]
    assert mutate.passes_unmutated(mutations, tree, 120)
    (tree / "code_under_test.py").write_text(CODE.replace("n // 2", "n // 3"))
    assert not mutate.passes_unmutated(mutations, tree, 120)
    assert "assert 1 == 2" in capsys.readouterr().out
    (tree / "code_under_test.py").write_text(CODE.replace("n += 1", "n += 2"))
    assert not mutate.passes_unmutated(mutations, tree, 2)
    assert "the tests do not end within 2 s" in capsys.readouterr().out


def test_selection_by_words(mutate, tree):
    mutations = mutate.read_mutations(tree / "list.yaml")
    assert [mutation.name for mutation in mutate.select_mutations(mutations, ["ENDLESS", "other.py"])] == [
        "endless",
        "no file",
        "no test",
    ]
    assert mutate.select_mutations(mutations, []) == mutations


def test_names_are_unique(mutate, tree):
    (tree / "list.yaml").write_text(MUTATIONS_FILE.replace("name: gone", "name: seen"))
    with pytest.raises(SystemExit, match="seen: given twice"):
        mutate.read_mutations(tree / "list.yaml")
