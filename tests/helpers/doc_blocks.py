"""Code blocks of a Markdown page, and the marks in the comment before a block.

<!-- not run: WHY -->     the block needs resources that tests do not have, such as a cluster
<!-- file: NAME -->       the block is a file for later blocks
<!-- in: NAME -->         the block is part of a file of the repository
<!-- exact -->            the block shows the complete output of its command
<!-- exit N -->           exit code of its last command
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """Fenced block and its marks."""

    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def commands(self):
        """Return the (command, printed output) pairs of a console block."""
        parts = re.split(r"^\$ ", self.text, flags=re.M)[1:]
        return [(command.strip(), output) for command, _, output in (part.partition("\n") for part in parts)]


def parse_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    result = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        result.append(Block(line, match["language"], match["text"], _parse_marks(match["mark"] or "")))
    return result


def _parse_marks(mark: str) -> dict[str, str]:
    if mark.startswith("not run:"):
        return {"not run": mark}
    matches = (re.match(r"(file|in|exact|exit):? ?(.*)", part.strip()) for part in mark.split(",") if part.strip())
    return {match[1]: match[2] for match in matches if match}
