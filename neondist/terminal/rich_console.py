"""Tables and progress bars on the terminal; imported only where needed, since rich is slow to import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console
from rich.segment import Segment

from .console import escape_invisible


class Console(console.Console):
    """Console that prints text without interpreting markup, and escapes control characters in the text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Any:
        """Render a text with invisible characters escaped, so that the width of the text is known."""
        return super().render_str(escape_invisible(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Yield printable segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_invisible(segment.text), segment.style)
