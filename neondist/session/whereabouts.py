"""What a thread is doing, in words: read from its stack, so that a step pays nothing for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..comm import ProcessGrid

PACKAGE = str(Path(__file__).parents[1])
COMM = str(Path(__file__).parents[1] / "comm")


def whereabouts(frame: FrameType | None, grid: ProcessGrid | None) -> str:
    """Return in words what the thread of a stack is doing: what it waits for, or which code it is in, and the layer."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    doing = _doing(frames, grid)
    for each in frames:
        passing = each.f_code.co_name if each.f_code.co_name in ("forward", "backward") else ""
        layer = getattr(each.f_locals.get("self"), "name", None)
        if passing and layer:
            return f"{passing} pass of layer '{layer}': {doing}"
    return doing


def _doing(frames: list[FrameType], grid: ProcessGrid | None) -> str:
    """Return what the innermost frame of neondist's communication waits for, else where the code is."""
    waiting, inside = "", 0
    while inside < len(frames) and frames[inside].f_code.co_filename.startswith(COMM):
        frame, inside = frames[inside], inside + 1
        owner: Any = frame.f_locals.get("self")
        if hasattr(owner, "receives"):
            first = grid.rank - grid.tile if grid is not None else 0  # of this replica
            peers = sorted({first + message.peer for message in (*owner.receives, *owner.sends)})
            waiting = f"waits in its halo exchange for rank{'s'[: len(peers) > 1]} {', '.join(map(str, peers))}"
        elif hasattr(owner, "allreduce") and hasattr(owner, "size"):  # a transport
            waiting = f"waits in {frame.f_code.co_name} over {owner.size} ranks, "
    if waiting:
        return waiting + (_place(frames[inside]) if waiting.endswith(", ") else "")
    own = next((f for f in frames if not _is_library(f.f_code.co_filename)), frames[0] if frames else None)
    return "is gone" if own is None else f"waits for nobody, {_place(own)}"


def _place(frame: FrameType) -> str:
    return f"in {frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"


def _is_library(path: str) -> bool:
    return not path.startswith(PACKAGE) and (
        "site-packages" in path or path.startswith(sys.base_prefix + os.sep + "lib")
    )
