"""Tables and progress bars on the terminal; imported where one is drawn, since rich is slow to import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console
from rich.segment import Segment

from .console import escape_invisible


class Console(console.Console):
    """A console that prints text as it is: no markup of rich, and no control characters but its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Any:
        """Return a text of visible characters only, so that its width is known."""
        return super().render_str(escape_invisible(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Yield printable segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_invisible(segment.text), segment.style)
