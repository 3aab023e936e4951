"""State of autocast around a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """Return the autocast dtype for each of AUTOCAST_DEVICES, or None where autocast is off."""
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in AUTOCAST_DEVICES
    )


@contextmanager
def disable_autocast() -> Iterator[None]:
    """Disable autocast where it is on."""
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
