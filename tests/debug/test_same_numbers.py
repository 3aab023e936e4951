"""Bit for bit equal results of correct runs with and without the halo guard."""

import numpy as np
import pytest
from case_selection import select_cases
from halo_guard import guard
from invariance import KINDS, train
from scheme_runs import LAYERS, SCHEMES, build_model, draw_inputs, run_on_ranks, run_step

import neondist as nd


def check_guarded_results(job, ranks):
    """Compare the results of ranks with and without the guard."""
    guarded, plain = (
        run_on_ranks(ranks, lambda comm, after_build=after_build: job(comm, after_build))
        for after_build in (guard, None)
    )
    for actual, expected in zip(guarded, plain, strict=True):
        assert actual.keys() == expected.keys()
        for name in actual:
            np.testing.assert_array_equal(actual[name], expected[name], str(name))


@pytest.mark.parametrize(
    ("kind", "ranks"), select_cases([*((kind, 4) for kind in KINDS), ("everything", 1), ("segmentation", 9)])
)
@pytest.mark.long
def test_every_layer(kind, ranks):
    check_guarded_results(
        lambda comm, after_build: train(kind, nd.ProcessGrid(comm), steps=2, after_build=after_build), ranks
    )


@pytest.mark.parametrize("scheme", select_cases(SCHEMES))
def test_every_scheme(scheme):
    def job(comm, after_build):
        model = build_model(comm, LAYERS["conv"][1](scheme=scheme) + LAYERS["max"][1](scheme=scheme), (9, 8, 4))
        if after_build:
            after_build(model)
        passes = [run_step(model, number, *draw_inputs(model, seed=number)) for number in range(4)]
        return {(number, index): array for number, results in enumerate(passes) for index, array in enumerate(results)}

    check_guarded_results(job, 4)
