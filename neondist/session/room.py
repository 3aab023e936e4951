"""What does not fit into memory is a mistake in the experiment, and told as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError


@contextmanager
def room_for(field: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError about `field` where memory is not enough for the block.

    Raises
    ------
    ConfigError
        Instead of MemoryError.
    """
    try:
        yield
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        raise ConfigError(f"{field}: there is no memory for it{reason}; use more ranks, or {remedy}") from error
