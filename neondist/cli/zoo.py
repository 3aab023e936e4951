"""`neondist zoo init`: a template of a model-definition project."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import OutputError
from ..io.files import make_folder, write_text
from ..io.regular_file import read_bytes
from ..terminal.console import emit
from . import options

_README = """\
# A model-definition project of neondist

`model.py` defines a PyTorch model, its loss and optimiser, and `feed`, which converts records to features and labels.

    neondist check model.py
    neondist data records '!MNIST {}' --to train.csv
    neondist data records '!MNIST {}' --role prediction --to test.csv
    neondist train model.py --training-data train.csv --validation-data test.csv --num-epochs 3 --output run
    neondist train model.py --training-data train.csv --distribution-strategy AllreduceStrategy --num-workers 2
    neondist evaluate model.py --validation-data test.csv --checkpoint run
    neondist predict model.py --prediction-data test.csv --checkpoint run
"""


def add_parser(commands: Any) -> None:
    """Register the commands."""
    zoo_parser = commands.add_parser("zoo", help="write an example model-definition file")
    subparsers = zoo_parser.add_subparsers(required=True, metavar="WHAT")
    cmd = subparsers.add_parser("init", help="write model.py and README.md", allow_abbrev=False)
    cmd.add_argument(
        "project", type=options.parse_as_path, nargs="?", default=Path("."), metavar="DIR",
        help="output folder (default: the current folder)",
    )  # fmt: skip
    cmd.set_defaults(command=write_model_project)


def write_model_project(arguments: argparse.Namespace) -> int:
    """Write the files; raise OutputError if one exists."""
    template = read_bytes(Path(__file__).with_name("model_definition.txt")).decode()
    file_texts = {"model.py": template, "README.md": _README}
    for name in file_texts:
        if (arguments.project / name).exists():
            raise OutputError(f"{arguments.project / name}: already exists; choose another folder")
    make_folder(arguments.project)
    for name, text in file_texts.items():
        write_text(arguments.project / name, text)
        emit(arguments.project / name)
    return 0
