"""Sphinx: python -m sphinx -q -W -b html docs docs/_build/html."""

import inspect
import re
import sys
from functools import reduce
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1]))

import neondist

project = "neondist"
author = "the neondist developers"
copyright = author
version = release = neondist.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
default_role = "literal"  # `name` in a docstring is code

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # `np`, not the path of its module
autodoc_inherit_docstrings = False
maximum_signature_line_length = 90
napoleon_google_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # one entry may name several
napoleon_use_rtype = False

toc_object_entries_show_parents = "hide"  # navigation is narrow
html_theme = "alabaster"
html_theme_options = {
    "description": "Convolutional networks over MPI ranks",
    "page_width": "1180px",  # below it navigation follows the content
    "body_max_width": "1080px",
    "sidebar_width": "210px",
    "show_relbar_bottom": True,
}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_static_path = ["static"]
html_css_files = ["narrow.css"]
html_show_copyright = False
html_copy_source = False


class Public(SphinxDirective):
    """All public subclasses of a base class, so that new classes are documented automatically: {public} Layer."""

    required_arguments = 1

    def run(self):
        base = reduce(getattr, self.arguments[0].split("."), neondist)
        home, package, namespace = "neondist", neondist, self.arguments[0].rpartition(".")[0]
        if namespace in neondist.__all__:  # such as 'schemes'
            home, package = f"neondist.{namespace}", getattr(neondist, namespace)
        known = {name: getattr(package, name) for name in package.__all__}
        below = [name for name, cls in known.items() if inspect.isclass(cls) and issubclass(cls, base)]
        concrete = [name for name in sorted(below) if not inspect.isabstract(known[name]) and known[name] is not base]
        lines = ["```{eval-rst}", *(f".. autoclass:: {home}.{name}" for name in concrete), "```"]
        section = nodes.section()
        self.state.nested_parse(StringList(lines, source=str(self.env.docname)), self.content_offset, section)
        return section.children


class TorchTable(SphinxDirective):
    """Table of operators, from the rules: {torch-operators} lists all, {torch-layers} those converted to layers."""

    def run(self):
        section = nodes.section()
        made = torch_layers() if self.name == "torch-layers" else torch_operators()
        text = StringList(made.splitlines(), source=str(self.env.docname))
        self.state.nested_parse(text, self.content_offset, section)
        return section.children


def torch_operators():
    """Return the table in Markdown."""
    try:
        from neondist.torch.ir.registry import rule_table
    except ImportError:
        return "The documentation was built without PyTorch; the table is omitted."
    return operator_table("Kind | Distribution", rule_table())


def torch_layers():
    """Return the table of operators that are converted to layers, in Markdown."""
    try:
        from neondist.torch.convert.operators import conversion_table
    except ImportError:
        return "The documentation was built without PyTorch; the table is omitted."
    return operator_table("Layer | Conversion", conversion_table())


def operator_table(titles, rows):
    """Return rows of (kind, note, operators) in Markdown."""
    lines = [f"| Operators (`aten.`) | {titles} |", "| --- | --- | --- |"]
    for kind, note, names in rows:
        known = dict.fromkeys(name.removeprefix("aten.").removesuffix(".default") for name in names)
        lines.append(f"| {', '.join(f'`{name}`' for name in known)} | {kind} | {note} |")
    return "\n".join(lines)


def escape_stars(app, what, name, obj, options, lines):
    """Escape the stars in shapes such as (N, *spatial, C), which would begin emphasis."""
    for at, line in enumerate(lines):
        lines[at] = re.sub(r"(?<![\\*`\w])\*(?=\w)", r"\\*", line)


def keep_colons(app, what, name, obj, options, lines):
    """Keep the first line of an attribute: napoleon would take the text before a colon as its type."""
    if what in ("attribute", "property"):
        lines.insert(0, "\\")  # removed with the following newline


def setup(app):
    app.add_directive("public", Public)
    app.add_directive("torch-operators", TorchTable)
    app.add_directive("torch-layers", TorchTable)
    for process in (escape_stars, keep_colons):
        app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon
