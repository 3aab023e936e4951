"""All ranks raise, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import errors
from .transport import Transport


def agree(transport: Transport, error: Exception | None) -> None:
    """Raise on every rank if any rank has an error; collective.

    A rank with an error of its own raises that; the others raise the same kind of UserError with the message of the
    first failing rank if that was one (so that every rank ends with exit code 2), else RemoteError. A UserError
    that is raised is marked `agreed`.
    """
    report = None if error is None else (type(error).__name__, isinstance(error, errors.UserError), str(error))
    failures = [(rank, r) for rank, r in enumerate(transport.allgather(report)) if r is not None]
    if error is not None:
        raise error.on_all_ranks() if isinstance(error, errors.UserError) else error
    if failures:
        rank, (kind, is_users, message) = failures[0]
        if is_users:
            of_kind: type[errors.UserError] = getattr(errors, kind, errors.UserError)
            raise of_kind(message).on_all_ranks()
        raise errors.RemoteError(f"rank {rank} failed: {kind}: {message}")


@contextmanager
def all_or_none(world: Transport) -> Iterator[None]:
    """Run a block that does not communicate; then agree on whether a rank raised (collective)."""
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    agree(world, error)
