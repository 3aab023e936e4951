"""Comparison of a case on PyTorch, one process and virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from neondist.comm import loopback

from . import predicted_bytes
from .build import find_refusal, is_exact
from .case import Case, Grid, count_ranks
from .execution import (
    Arrays,
    Mismatch,
    RankResult,
    draw_state,
    merge_results,
    run_first_part,
    run_second_part,
    run_torch,
)

TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
TIMEOUT_SECONDS = 120  # seconds that a virtual rank waits for a message on a busy machine
SENSITIVITY = 1e-3
"""A deviation is ignored if a perturbation of the images by this fraction of the tolerance causes a similar one, as at
a tie of a maximum or a root of zero."""


def check_case(case: Case) -> str:
    """Compare the results of PyTorch, one process and virtual ranks.

    Returns
    -------
    str
        'exact', 'approximate' (only shapes, finiteness and bytes are compared), or 'ill-conditioned'.

    Raises
    ------
    Mismatch
        If results differ.
    UserError
        If the network is invalid.
    """
    refusal = find_refusal(case)
    if refusal is not None:
        raise refusal
    state, output_shape = draw_state(case)
    with np.errstate(all="ignore"):
        expected = run_torch(case, state, output_shape)
    if not all(np.isfinite(array).all() and np.abs(array).max(initial=0) < 1e6 for array in expected.values()):
        return "ill-conditioned"
    serial = run_first_part(case, state)
    runs: list[tuple[str, Callable[[], list[Arrays]], bool]] = [
        ("one process", lambda: [merge_results(serial, run_second_part(case, serial))], True),
        (f"ranks {case.grid}, then {case.second_grid}", lambda: _run_on_ranks(case, state), is_exact(case)),
    ]
    for description, run, exact in runs:
        for arrays in run():
            name = find_difference(arrays, expected, TOLERANCE[case.dtype] if exact else np.inf)
            if name is None:
                continue
            if is_ill_conditioned(case, lambda other: run_torch(other, state, output_shape), name, arrays, expected):
                return "ill-conditioned"
            raise Mismatch(f"{description}: {name}: {_describe(arrays, expected, name)}")
    return "exact" if is_exact(case) else "approximate"


def find_difference(arrays: Arrays, expected: Arrays, tolerance: float) -> str | None:
    """Return the name of the first array that differs, or None."""
    if arrays.keys() != expected.keys():
        return f"arrays {sorted(arrays)}, expected {sorted(expected)}"
    for name, array in arrays.items():
        reference = expected[name]
        if array.shape != reference.shape or not np.isfinite(array).all():
            return name
        if not np.abs(array - reference).max(initial=0) <= tolerance * max(1.0, np.abs(reference).max(initial=0)):
            return name
    return None


def is_ill_conditioned(
    case: Case, compute: Callable[[Case], Arrays], name: str, arrays: Arrays, expected: Arrays
) -> bool:
    """Return whether tiny perturbations of the images, whose results `compute` returns, explain a difference."""
    if name not in arrays or arrays[name].shape != expected[name].shape:
        return False
    step = SENSITIVITY * TOLERANCE[case.dtype]
    perturbed = [
        compute(case.replace(perturbation=perturbation))[name] for perturbation in (step, -step, 10 * step, -10 * step)
    ]
    change = max(np.abs(array - expected[name]).max(initial=0) for array in perturbed)
    return bool(change > np.abs(arrays[name] - expected[name]).max(initial=0) / 100)


def check_bytes(case: Case, grid: Grid, ranks: Sequence[RankResult]) -> None:
    """Raise Mismatch if ranks have sent or reduced a different number of bytes than `neondist check` predicts."""
    steps = list(zip(*(result.sent for result in ranks), strict=True))
    predicted = predicted_bytes.PredictedBytes(case, grid)
    for step in steps:
        for rank, (samples, _, summed) in enumerate(step):
            if summed != predicted.summed(samples, rank):
                raise Mismatch(
                    f"bytes summed by rank {rank}: {summed}, but check predicts {predicted.summed(samples, rank)}"
                )
    full_steps = [step for step in steps if step[0][0] == case.batch]
    settled = full_steps[-2:]  # the first steps of stateful schemes differ
    if len(full_steps) < 2:
        return
    for name, expected in predicted.sent(case.batch).items():
        actual = sum(sent[name] for step in settled for _, sent, _ in step)
        if abs(actual - 2 * expected) > 2:  # averages are rounded
            raise Mismatch(f"bytes that {name} sends in two steps: {actual}, but check predicts {2 * expected}")


def _run_on_ranks(case: Case, state: Arrays) -> list[Arrays]:
    """Return the arrays of every rank, from the first grid and then the second."""
    firsts: list[RankResult] = loopback.run(
        count_ranks(case.grid), lambda comm: run_first_part(case, state, comm), timeout=TIMEOUT_SECONDS
    )
    for result in firsts[1:]:
        for name, array in result.arrays.items():
            if not np.array_equal(array, firsts[0].arrays[name]):
                raise Mismatch(f"ranks of {case.grid} differ in {name}")
    seconds = loopback.run(
        count_ranks(case.second_grid), lambda comm: run_second_part(case, firsts[0], comm), timeout=TIMEOUT_SECONDS
    )
    check_bytes(case, case.grid, firsts)
    check_bytes(case, case.second_grid, seconds)
    return [merge_results(firsts[0], second) for second in seconds]


def _describe(arrays: Arrays, expected: Arrays, name: str) -> str:
    if name not in arrays:
        return ""
    array, reference = arrays[name], expected[name]
    if array.shape != reference.shape:
        return f"shape {array.shape}, expected {reference.shape}"
    return f"off by {np.abs(array - reference).max(initial=0):.3g} of {np.abs(reference).max(initial=0):.3g}"
