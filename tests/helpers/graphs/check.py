"""One case, all comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from neondist.comm import loopback

from . import told
from .build import is_exact, refusal
from .case import Case, Grid, ranks_of
from .play import Arrays, Kept, Wrong, first_part, first_state, joined, of_torch, second_part

TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
TIMEOUT = 120  # seconds that a virtual rank waits for a message, on a busy machine
LOST = 1e-3
"""Numbers that change as much as they are off when images change by this part of the tolerance say nothing: a maximum
or a root is at its edge."""


def check(case: Case) -> str:
    """Compare PyTorch, one process and loopback ranks.

    Returns
    -------
    str
        'exact', 'approximate' (shapes, finite numbers and bytes alone), or 'ill-conditioned'.

    Raises
    ------
    Wrong
        Something is not as it should be.
    UserError
        There is no such network.
    """
    refused = refusal(case)
    if refused is not None:
        raise refused
    state, output_shape = first_state(case)
    with np.errstate(all="ignore"):
        expected = of_torch(case, state, output_shape)
    if not all(np.isfinite(array).all() and np.abs(array).max(initial=0) < 1e6 for array in expected.values()):
        return "ill-conditioned"
    alone = first_part(case, state)
    rounds: list[tuple[str, Callable[[], list[Arrays]], bool]] = [
        ("one process", lambda: [joined(alone, second_part(case, alone))], True),
        (f"ranks {case.grid}, then {case.other}", lambda: _on_ranks(case, state), is_exact(case)),
    ]
    for where, play, exact in rounds:
        for found in play():
            name = differs(found, expected, TOLERANCE[case.dtype] if exact else np.inf)
            if name is None:
                continue
            if ill_conditioned(case, lambda other: of_torch(other, state, output_shape), name, found, expected):
                return "ill-conditioned"
            raise Wrong(f"{where}: {name}: {_tell(found, expected, name)}")
    return "exact" if is_exact(case) else "approximate"


def differs(found: Arrays, expected: Arrays, tolerance: float) -> str | None:
    """Return the name of the first array that is not as expected, if any."""
    if found.keys() != expected.keys():
        return f"found {sorted(found)}, expected {sorted(expected)}"
    for name, array in found.items():
        other = expected[name]
        if array.shape != other.shape or not np.isfinite(array).all():
            return name
        if not np.abs(array - other).max(initial=0) <= tolerance * max(1.0, np.abs(other).max(initial=0)):
            return name
    return None


def ill_conditioned(case: Case, play: Callable[[Case], Arrays], name: str, found: Arrays, expected: Arrays) -> bool:
    """Tell whether images that are hardly others, of which `play` tells what comes, explain what differs."""
    if name not in found or found[name].shape != expected[name].shape:
        return False
    least = LOST * TOLERANCE[case.dtype]
    moved = [play(case.changed(nudge=nudge))[name] for nudge in (least, -least, 10 * least, -10 * least)]
    change = max(np.abs(array - expected[name]).max(initial=0) for array in moved)
    return bool(change > np.abs(found[name] - expected[name]).max(initial=0) / 100)


def check_bytes(case: Case, grid: Grid, ranks: Sequence[Kept]) -> None:
    """Raise Wrong if ranks have sent or summed other bytes than `neondist check` tells."""
    steps = list(zip(*(kept.sent for kept in ranks), strict=True))
    said = told.Told(case, grid)
    for step in steps:
        for rank, (samples, _, summed) in enumerate(step):
            if summed != said.summed(samples, rank):
                raise Wrong(f"bytes summed by rank {rank}: {summed}, but check tells {said.summed(samples, rank)}")
    whole = [step for step in steps if step[0][0] == case.batch]
    settled = whole[-2:]  # a scheme with a memory has other first steps
    if len(whole) < 2:
        return
    for name, expected in said.sent(case.batch).items():
        found = sum(sent[name] for step in settled for _, sent, _ in step)
        if abs(found - 2 * expected) > 2:  # means are rounded
            raise Wrong(f"bytes that {name} sends in two steps: {found}, but check tells {2 * expected}")


def _on_ranks(case: Case, state: Arrays) -> list[Arrays]:
    """Return what every rank found, on the first grid and then on the other."""
    firsts: list[Kept] = loopback.run(ranks_of(case.grid), lambda comm: first_part(case, state, comm), timeout=TIMEOUT)
    for one in firsts[1:]:
        for name, array in one.found.items():
            if not np.array_equal(array, firsts[0].found[name]):
                raise Wrong(f"ranks of {case.grid} differ in {name}")
    seconds = loopback.run(ranks_of(case.other), lambda comm: second_part(case, firsts[0], comm), timeout=TIMEOUT)
    check_bytes(case, case.grid, firsts)
    check_bytes(case, case.other, seconds)
    return [joined(firsts[0], second) for second in seconds]


def _tell(found: Arrays, expected: Arrays, name: str) -> str:
    if name not in found:
        return ""
    array, other = found[name], expected[name]
    if array.shape != other.shape:
        return f"shape {array.shape}, expected {other.shape}"
    return f"off by {np.abs(array - other).max(initial=0):.3g} of {np.abs(other).max(initial=0):.3g}"
