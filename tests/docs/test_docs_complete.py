"""Completeness of the documentation: public names, pages, links and drawings."""

import inspect
import re
import subprocess
import sys
from functools import reduce
from importlib import import_module
from xml.etree import ElementTree

import pytest
from doc_blocks import parse_blocks
from doc_sandbox import ROOT
from zoo import ZOO

import neondist as nd
from neondist import errors
from neondist.layers import Node

REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["neondist", "neondist.torch"])
def test_completion_offers_public_names(name):
    if name == "neondist.torch":
        pytest.importorskip("torch")
    package = import_module(name)
    assert {name for name in dir(package) if not name.startswith("__")} == {*package.__all__} - {"__version__"}


def test_reference_has_every_public_name():
    bases = [reduce(getattr, name.split("."), nd) for name in re.findall(r"^```\{public\} (\S+)", REFERENCE, re.M)]
    named = set(re.findall(r":: neondist\.(\w+)", REFERENCE))  # at least one name of a namespace
    missing = []
    for name in nd.__all__:
        value = getattr(nd, name)
        listed = inspect.isclass(value) and not inspect.isabstract(value) and issubclass(value, tuple(bases))
        if not (listed or name in named or name == "__version__"):
            missing.append(name)
    assert not missing, "add them to docs/reference.md"


def test_documented_errors_are_public():
    names = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    objects = [getattr(nd, name) for name in nd.__all__]
    members = [getattr(cls, name) for cls in filter(inspect.isclass, objects) for name in dir(cls) if name[0] != "_"]
    text = "\n".join(map(str, map(inspect.getdoc, objects + members)))
    assert {name for name in names if re.search(rf"\b{name}\b", text)} <= {*nd.__all__}


def test_readme_has_every_layer():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    nodes = [name for name in nd.__all__ if inspect.isclass(cls := getattr(nd, name)) and issubclass(cls, Node)]
    public = [name for name in nodes if not inspect.isabstract(getattr(nd, name))]
    missing = [name for name in public if f"`{name}`" not in readme]
    assert not missing, "add them to the table of layers in README.md"


def test_table_of_torch_operators_is_complete():
    pytest.importorskip("torch")
    from neondist.torch.ir.registry import POINTWISE_OPS, RULES, rule_table

    rows = rule_table()
    assert sorted(name for _, _, names in rows for name in names) == sorted(RULES.keys() | POINTWISE_OPS)
    for _, note, names in rows:
        is_sentence = note.split()[0].isalpha() and note.endswith(".")  # not 'Local: ...'
        assert is_sentence, f"the docstring of the rule of {names[0]} must begin with a sentence"
    assert "```{torch-operators}" in (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")


def test_table_of_torch_layers_is_complete():
    pytest.importorskip("torch")
    from neondist.torch.convert.operators import CONVERTERS, conversion_table

    assert sorted(name for _, _, names in conversion_table() for name in names) == sorted(CONVERTERS)
    assert all(note.endswith(".") for _, note, _ in conversion_table())
    assert "```{torch-layers}" in (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")


def test_pytorch_page_has_every_public_name():
    pytest.importorskip("torch")
    import neondist.torch as ndt

    page = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
    missing = [name for name in ndt.__all__ if not re.search(rf"neondist\.torch\.{name}\b", page)]
    assert not missing, "add them to docs/pytorch.md"


def test_changelog_counts_public_models():
    (count,) = re.findall(r"(\d+)\s+public\s+models", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert int(count) == len(ZOO)


@pytest.mark.parametrize(
    ("page", "methods"),
    [("pytorch", "`lowering` has the methods(.*?)[.] "), ("architecture", "methods of `PlanBuilder`:(.*?), whose arg")],
)
def test_methods_for_rules_exist(page, methods):
    pytest.importorskip("torch")
    from neondist.torch.lowering.lowering import Lowering

    (text,) = re.findall(methods, (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.S)
    names = re.findall(r"`([a-z_]+)`", text)
    assert len(names) == 6
    assert [name for name in names if not hasattr(Lowering, name)] == []


def test_drawings_are_current(tmp_path):
    script = ROOT / "docs" / "drawings" / "draw.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    generated = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "drawings").glob("*.svg")}
    assert generated == committed, "run: python docs/drawings/draw.py"


def test_drawings_are_used():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    for drawing in (ROOT / "docs" / "drawings").glob("*.svg"):
        assert f"drawings/{drawing.name}" in pages
    assert "](docs/drawings/idea.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_drawings_are_readable_on_dark_pages():
    for drawing in (ROOT / "docs" / "drawings").glob("*.svg"):
        svg = ElementTree.parse(drawing).getroot()
        _, _, *size = svg.attrib["viewBox"].split()
        background = next(shape for shape in svg if shape.tag.endswith("}rect"))
        assert (background.attrib["width"], background.attrib["height"], background.attrib["fill"]) == (
            *size,
            "#ffffff",
        )
        assert "fill-opacity" not in background.attrib


def test_links_between_pages_are_valid():
    for page in (ROOT / "README.md", ROOT / "llms.txt", *(ROOT / "docs").glob("*.md")):
        for target, anchor in re.findall(r"\]\(((?!https?:)[^)#]+)#?([^)]*)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            if anchor and not page.parent.samefile(ROOT / "docs"):  # Sphinx checks those within docs/
                headings = re.findall("^#+ (.*)", (page.parent / target).read_text(encoding="utf-8"), re.M)
                anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_llms_txt():
    listed = (ROOT / "llms.txt").read_text(encoding="utf-8")
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md"]
    assert not [page for page in pages if f"(docs/{page})" not in listed]


def test_first_steps_take_few_commands():
    commands = [
        command for block in parse_blocks(ROOT / "docs" / "getting_started.md") for command, _ in block.commands
    ]
    user_commands = [command for command in commands if not re.match(r"python (scans|photos)\.py", command)]
    assert 10 < len(user_commands) <= 15
