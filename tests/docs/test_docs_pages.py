"""Every code block of README and docs/ runs, in the order of its page."""

import runpy

import pytest
from doc_blocks import blocks
from doc_place import ROOT, Place
from test_docs_examples import EXAMPLES, WITH_TORCH

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTORCH = ROOT / "docs" / "pytorch.md"
LAUNCHERS = "python ", "mpirun ", "torchrun "

NEEDS = {
    "assistants.md": ["torch"],
    "getting_started.md": ["nibabel"],
    "inference.md": ["torch", "tifffile"],
    "pytorch.md": ["torch"],
    "whole_slide.md": ["torch", "tifffile", "skimage", "zarr"],
}
"""optional packages"""


def _is_example(command):
    """Tell whether another test runs this command, perhaps on another size."""
    return any(
        command.startswith(f"{launcher} examples/{name}")
        for launcher in ("python", "mpirun -n 4 python")
        for name in (*EXAMPLES, *WITH_TORCH)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, tmp_path, request):
    place = Place(tmp_path)
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    if page.name in ("assistants.md", "pytorch.md"):
        request.getfixturevalue("captured_once")
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if "not run" in block.marks:
            continue
        if "in" in block.marks:
            assert block.text in (ROOT / block.marks["in"]).read_text(), where
        elif "file" in block.marks:
            place.write(block.marks["file"], block.text)
        elif block.language == "python":
            _run_python(place, block)
        elif block.language == "console":
            assert block.commands, where
            _run_console(place, block, where, processes=page != PYTORCH)
        else:
            assert block.language in ("text", "yaml", "json") or block.language.startswith("{"), (
                f"{where}: who runs this?"
            )


@pytest.mark.parametrize("command", [
    command for block in blocks(PYTORCH) if block.language == "console" and "not run" not in block.marks
    for command, _ in block.commands if command.startswith(LAUNCHERS) and not _is_example(command)
])  # fmt: skip
@pytest.mark.long
def test_command_that_imports_pytorch(command, tmp_path):
    """Each process takes seconds for that, and the commands of the page need nothing of each other."""
    pytest.importorskip("torch")
    place = Place(tmp_path)
    place.env["NEONDIST_TESTS_HIDE"] = "matplotlib"
    for block in blocks(PYTORCH):
        if "file" in block.marks:
            place.write(block.marks["file"], block.text)
    done = place.run(command)
    assert done.returncode == 0, done.stdout


def _run_python(place, block):
    """Run a block in this process, which has imported all that it needs; none sees another's names."""
    name = f"block_{block.line}.py"
    place.write(name, block.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.folder)
        patch.syspath_prepend(place.folder)
        runpy.run_path(name, run_name="__main__")


def _run_console(place, block, where, processes):
    last = len(block.commands) - 1
    for at, (command, shown) in enumerate(block.commands):
        if _is_example(command) or (not processes and command.startswith(LAUNCHERS)):
            continue
        done = place.run(command)
        expected = int(block.marks.get("exit") or 0) if at == last else 0
        assert done.returncode == expected, f"{where}: {command}\n{done.stdout}"
        if "exact" in block.marks:
            assert _lines(done.stdout) == _lines(shown), f"{where}: {command} now prints\n{done.stdout}"


def _lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]
