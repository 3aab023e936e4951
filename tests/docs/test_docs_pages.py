"""Code blocks of README and docs/, run in the order of their page."""

import runpy

import pytest
from doc_blocks import parse_blocks
from doc_sandbox import ROOT, DocSandbox
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
    """Return whether another test runs this command, possibly on another size."""
    return any(
        command.startswith(f"{launcher} examples/{name}")
        for launcher in ("python", "mpirun -n 4 python")
        for name in (*EXAMPLES, *WITH_TORCH)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, tmp_path, request):
    sandbox = DocSandbox(tmp_path)
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    if page.name in ("assistants.md", "pytorch.md"):
        request.getfixturevalue("shared_captures")
    for block in parse_blocks(page):
        location = f"{page.name}:{block.line}"
        if "not run" in block.marks:
            continue
        if "in" in block.marks:
            assert block.text in (ROOT / block.marks["in"]).read_text(), location
        elif "file" in block.marks:
            sandbox.write(block.marks["file"], block.text)
        elif block.language == "python":
            _run_python(sandbox, block)
        elif block.language == "console":
            assert block.commands, location
            _run_console(sandbox, block, location, processes=page != PYTORCH)
        else:
            assert block.language in ("text", "yaml", "json") or block.language.startswith("{"), (
                f"{location}: unknown language {block.language!r}"
            )


@pytest.mark.parametrize("command", [
    command for block in parse_blocks(PYTORCH) if block.language == "console" and "not run" not in block.marks
    for command, _ in block.commands if command.startswith(LAUNCHERS) and not _is_example(command)
])  # fmt: skip
@pytest.mark.long
def test_command_that_imports_pytorch(command, tmp_path):
    """Run commands one by one: importing PyTorch takes seconds, and the commands are independent."""
    pytest.importorskip("torch")
    sandbox = DocSandbox(tmp_path)
    sandbox.env["NEONDIST_TESTS_HIDE"] = "matplotlib"
    for block in parse_blocks(PYTORCH):
        if "file" in block.marks:
            sandbox.write(block.marks["file"], block.text)
    process = sandbox.run(command)
    assert process.returncode == 0, process.stdout


def _run_python(sandbox, block):
    """Run a block in this process, which has imported the package, with names of its own."""
    name = f"block_{block.line}.py"
    sandbox.write(name, block.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sandbox.folder)
        patch.syspath_prepend(sandbox.folder)
        runpy.run_path(name, run_name="__main__")


def _run_console(sandbox, block, location, processes):
    last = len(block.commands) - 1
    for i, (command, expected_output) in enumerate(block.commands):
        if _is_example(command) or (not processes and command.startswith(LAUNCHERS)):
            continue
        process = sandbox.run(command)
        expected = int(block.marks.get("exit") or 0) if i == last else 0
        assert process.returncode == expected, f"{location}: {command}\n{process.stdout}"
        if "exact" in block.marks:
            assert _lines(process.stdout) == _lines(expected_output), (
                f"{location}: {command} now prints\n{process.stdout}"
            )


def _lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]
