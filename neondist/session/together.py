"""Work that every rank does alone: if it fails on one, it fails on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm import Transport, agree


@contextmanager
def together(world: Transport) -> Iterator[None]:
    """Run a block that does not communicate; then agree on whether a rank raised (collective)."""
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    agree(world, error)
