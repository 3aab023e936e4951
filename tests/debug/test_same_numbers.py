"""A right run under guard gives the same numbers, bit for bit."""

import numpy as np
import pytest
from guarded import guard
from invariance import KINDS, train
from scheme_runs import LAYERS, SCHEMES, build, noise, on_ranks, step
from turns import some

import neondist as nd


def same(job, ranks):
    """Compare what ranks compute with a guard and without."""
    guarded, plain = (on_ranks(ranks, lambda comm, after=after: job(comm, after)) for after in (guard, None))
    for one, other in zip(guarded, plain, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], str(name))


@pytest.mark.parametrize(
    ("kind", "ranks"), some([*((kind, 4) for kind in KINDS), ("everything", 1), ("segmentation", 9)])
)
@pytest.mark.long
def test_every_layer(kind, ranks):
    same(lambda comm, after: train(kind, nd.ProcessGrid(comm), steps=2, after_build=after), ranks)


@pytest.mark.parametrize("scheme", some(SCHEMES))
def test_every_scheme(scheme):
    def job(comm, after):
        model = build(comm, LAYERS["conv"][1](scheme=scheme) + LAYERS["max"][1](scheme=scheme), (9, 8, 4))
        if after:
            after(model)
        passes = [step(model, number, *noise(model, seed=number)) for number in range(4)]
        return {(number, way): array for number, both in enumerate(passes) for way, array in enumerate(both)}

    same(job, 4)
