"""How all measurements are told: a table on rank 0, and JSON in a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import write_text

if TYPE_CHECKING:
    from ...comm import Transport


def file_option(one: argparse.ArgumentParser) -> None:
    """Add --json."""
    one.add_argument("--json", metavar="FILE", help="write the results there as well")


def tell(world: Transport, made: dict[str, Any], table: Callable[[dict[str, Any]], Any], file: str | None) -> None:
    """Print the table on rank 0; write the JSON file if asked."""
    if world.rank:
        return
    from rich.console import Console

    Console(soft_wrap=True).print(table(made))
    if file is not None:
        write_text(Path(file), json.dumps(made, indent=2, default=str) + "\n")
