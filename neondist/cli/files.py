"""`neondist schema` and `report`: the JSON Schema of experiment files, and the HTML report of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..io.files import write_text
from ..terminal.console import emit
from . import options


def add_parser(commands: Any) -> None:
    """Register the commands."""
    cmd = commands.add_parser("schema", help="print the JSON Schema of experiment files, for editors")
    cmd.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE", help=options.IMPORT_HELP
    )
    cmd.add_argument(
        "--tags", action="store_true", help="print the YAML tags instead, for the editor setting yaml.customTags"
    )
    cmd.set_defaults(command=print_schema)

    cmd = commands.add_parser("report", help="write a report of a run, as a self-contained HTML page")
    cmd.add_argument("run", type=options.parse_path, metavar="DIR", help="the folder of the run")
    cmd.add_argument(
        "--to", type=options.parse_path, metavar="FILE.html", help="output file (default: report.html in the folder)"
    )
    cmd.set_defaults(command=write_report)


def write_report(arguments: argparse.Namespace) -> int:
    """Write the HTML report of a run."""
    from ..train.html_report import run_report_html as page

    folder = Path(arguments.run)
    report_path = Path(arguments.to or folder / "report.html")
    write_text(report_path, page(folder))
    emit(report_path)
    return 0


def print_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema, or with --tags the YAML tags."""
    import neondist.train  # noqa: F401  registers the classes that a file may name

    from ..config.schema import experiment_schema, yaml_custom_tags
    from .experiment import import_module

    for module in arguments.modules:
        import_module(module)
    emit(json.dumps(yaml_custom_tags() if arguments.tags else experiment_schema(), indent=1))
    return 0
