"""Every code block of README and docs/ runs, in the order of its page."""

import runpy

import pytest
from doc_blocks import blocks
from doc_place import ROOT, Place
from test_docs_examples import EXAMPLES, WITH_TORCH

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

NEEDS = {
    "assistants.md": ["torch"],
    "getting_started.md": ["nibabel"],
    "inference.md": ["torch", "tifffile"],
    "pytorch.md": ["torch"],
    "whole_slide.md": ["torch", "tifffile", "skimage", "zarr"],
}
"""optional packages"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, tmp_path, request):
    place = Place(tmp_path)
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    if page.name in ("assistants.md", "pytorch.md"):
        request.getfixturevalue("captured_once")
    if page.name == "pytorch.md":
        place.env["NEONDIST_TESTS_HIDE"] = "matplotlib"
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
            _run_console(place, block, where)
        else:
            assert block.language in ("text", "yaml", "json") or block.language.startswith("{"), (
                f"{where}: who runs this?"
            )


def _run_python(place, block):
    """Run a block in this process, which has imported all that it needs; none sees another's names."""
    name = f"block_{block.line}.py"
    place.write(name, block.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.folder)
        patch.syspath_prepend(place.folder)
        runpy.run_path(name, run_name="__main__")


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
