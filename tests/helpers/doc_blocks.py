"""The code blocks of a Markdown page, and what the comment in front of a block says of it.

<!-- not run: WHY -->     the block needs what a test has not, such as a cluster
<!-- file: NAME -->       the block is a file that later blocks use
<!-- in: NAME -->         the block is a part of a file of the repository
<!-- exact -->            the block shows all that its command prints
<!-- exit N -->           its last command ends with this code
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block and its marks."""

    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def commands(self):
        """Return [command, what it is shown to print] of a console block."""
        parts = re.split(r"^\$ ", self.text, flags=re.M)[1:]
        return [(command.strip(), shown) for command, _, shown in (part.partition("\n") for part in parts)]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(line, match["language"], match["text"], _marks(match["mark"] or "")))
    return found


def _marks(mark: str) -> dict[str, str]:
    if mark.startswith("not run:"):
        return {"not run": mark}
    words = (re.match(r"(file|in|exact|exit):? ?(.*)", part.strip()) for part in mark.split(",") if part.strip())
    return {word[1]: word[2] for word in words if word}
