"""Summary of a model for terminals and notebooks."""

from __future__ import annotations

from html import escape


class Summary(str):
    """Text that a prompt shows as it is, and a notebook in letters of one width."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"
