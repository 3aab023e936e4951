"""Shell completion: commands, options, files, and fields after --set."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .arguments import normalise_option_words


def print_completions(parser: argparse.ArgumentParser) -> None:
    """Print completions of the command line in argcomplete's environment variables, and exit."""
    from argcomplete import autocomplete
    from argcomplete.completers import FilesCompleter

    def complete_word(
        prefix: str, action: argparse.Action, parsed_args: argparse.Namespace, **options: Any
    ) -> list[str]:
        if action.dest in ("settings", "spaces"):
            return settable_fields(getattr(parsed_args, "file", None))
        return list(FilesCompleter()(prefix=prefix, action=action, parsed_args=parsed_args, **options))

    line, point = os.environ.get("COMP_LINE", ""), int(os.environ.get("COMP_POINT", 0))
    head, _, word = line[:point].rpartition(" ")
    typed = head.split()
    repeated = "".join(
        f"{option} " for option in normalise_option_words([*typed, "x="])[len(normalise_option_words(typed)) : -1]
    )  # implicit --set
    if repeated and not word.startswith("-"):
        os.environ |= {"COMP_LINE": f"{head} {repeated}{word}{line[point:]}", "COMP_POINT": str(point + len(repeated))}
    completer: Any = complete_word
    autocomplete(parser, default_completer=completer)


def settable_fields(file: str | None) -> list[str]:
    """Return the fields of an experiment file that --set can change."""
    import neondist.train  # noqa: F401  registers the classes that a file may name

    from ..config.keys import settable_keys

    return [] if file is None else settable_keys(file)
