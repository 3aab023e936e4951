"""Every code block of README and docs/ runs, in the order of its page."""

import shlex

import pytest
from doc_blocks import blocks
from doc_place import ROOT, Place
from test_docs_examples import EXAMPLES, WITH_TORCH

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ONE_BY_ONE = "import runpy, sys; [runpy.run_path(name, run_name='__main__') for name in sys.argv[1:]]"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, tmp_path, request):
    place = Place(tmp_path)
    if page.name == "pytorch.md":
        pytest.importorskip("torch")
        request.getfixturevalue("captured_once")
        place.env["NEONDIST_TESTS_HIDE"] = "matplotlib"
    waiting = []
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if "not run" in block.marks:
            continue
        if "in" in block.marks:
            assert block.text in (ROOT / block.marks["in"]).read_text(), where
        elif block.language == "python" and "file" not in block.marks:
            waiting.append(block)
        elif "file" in block.marks:
            _run_python(place, waiting, page.name)
            place.write(block.marks["file"], block.text)
        elif block.language == "console":
            _run_python(place, waiting, page.name)
            assert block.commands, where
            _run_console(place, block, where)
        else:
            assert block.language in ("text", "yaml", "json") or block.language.startswith("{"), (
                f"{where}: who runs this?"
            )
    _run_python(place, waiting, page.name)


def _run_python(place, waiting, page):
    """Run the blocks so far in one process, which imports PyTorch once; none sees another's names."""
    names = [f"block_{block.line}.py" for block in waiting]
    for name, block in zip(names, waiting, strict=True):
        place.write(name, block.text)
    waiting.clear()
    if names:
        done = place.run(shlex.join(["python", "-c", ONE_BY_ONE, *names]))
        assert done.returncode == 0, f"{page}: {names}\n{done.stdout}"


def _run_console(place, block, where):
    last = len(block.commands) - 1
    for at, (command, shown) in enumerate(block.commands):
        if _is_example(command):
            continue
        done = place.run(command)
        expected = int(block.marks.get("exit") or 0) if at == last else 0
        assert done.returncode == expected, f"{where}: {command}\n{done.stdout}"
        if "exact" in block.marks:
            assert _lines(done.stdout) == _lines(shown), f"{where}: {command} now prints\n{done.stdout}"


def _is_example(command):
    """Tell whether another test runs this command, perhaps on another size."""
    return any(
        command.startswith(f"{launcher} examples/{name}")
        for launcher in ("python", "mpirun -n 4 python")
        for name in (*EXAMPLES, *WITH_TORCH)
    )


def _lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]
