"""Summary of a model for terminals and notebooks."""

from __future__ import annotations

from html import escape


class Summary(str):
    """Text that is printed unchanged, and shown in a monospaced font in notebooks."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"
