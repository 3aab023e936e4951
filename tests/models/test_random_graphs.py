"""Generated networks against PyTorch, serially and over virtual ranks: those of NEONDIST_SEED.

`make hunt` and `tools/random_graphs.py` try as many others as one likes.
"""

import os

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is the oracle here")

from graphs.case import Case, leaves
from graphs.check import check
from graphs.draw import IMAGES, draw_case
from graphs.play import Wrong
from graphs.shrink import shrink, smaller_cases

SEED = int(os.environ["NEONDIST_SEED"])
CASES, AT_ONCE = 15, 5  # tests/mpi has some more


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
@pytest.mark.long
def test_generated_networks_compute_what_pytorch_does(first):
    for number in range(first, first + AT_ONCE):
        case = draw_case(SEED, number)
        try:
            check(case)
        except Exception as error:
            small = shrink(case, check)
            with pytest.raises(Exception) as found:  # noqa: PT011
                check(small)
            raise AssertionError(f"NEONDIST_SEED={SEED}, case {number}: {found.value}\n\n{small.program()}") from error


TANH = ("Activation", {"name": "b", "activation": "Tanh"})
FOUND = {
    "lists without layers are no section": Case(
        (4, 1), [[], [], ("Conv", {"name": "a", "out_channels": 1, "kernel_size": 2}), ("LRN", {"name": "b"})],
        batch=1, steps=1, grid=(1, 1, 1, 2), recompute=True,
    ),
    "a stream's tiles without cells": Case(
        (1, 1, 1), [("Conv", {"name": "a", "out_channels": 1, "kernel_size": 1}), TANH],
        batch=1, steps=1, other=(1, 1, 1, 2), strips=1, memory="1TiB",
    ),
    "norms of one image, in a stream": Case(
        (4, 1), [("Sum", [("GroupNorm", {"name": "a", "groups": 1}), ("InstanceNorm", {"name": "b"})])],
        batch=1, steps=1, strips=1, memory="1TiB",
    ),
    "strips with as many cells, but more padding": Case(
        (3, 1), [("Conv", {"name": "a", "out_channels": 1, "kernel_size": 1, "padding": 2})],
        batch=1, steps=1, other=(1, 2, 1, 2), strips=1, memory="1TiB",
    ),
    "the contrast of a constant": Case(
        (1, 3, 1),
        [
            ("Conv", {"name": "a", "out_channels": 1, "kernel_size": 1, "activation": "Softmax"}),
            ("LCN", {"name": "b", "kernel_size": (1, 5), "min_deviation": "mean", "padding_mode": "reflect"}),
        ],
        batch=1, steps=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once(name):
    check(FOUND[name])


@pytest.mark.long
def test_every_layer_is_drawn():
    drawn = {kind for number in range(40) for kind, _ in leaves(draw_case(0, number).network)}
    assert drawn == set(IMAGES)


def test_the_same_number_draws_the_same_case():
    assert repr(draw_case(3, 5)) == repr(draw_case(3, 5))
    assert repr(draw_case(3, 5)) != repr(draw_case(4, 5))


def test_a_program_is_the_case():
    case = draw_case(1, 7)
    found = []
    code = case.program().replace("from graphs.check import check\n", "")
    exec(code, {"check": found.append})
    assert found == [case]


def test_a_failing_case_is_shrunk():
    """Whoever finds that something with tanh is wrong is shown a tanh and nothing else."""

    def check(case):
        for _, given in leaves(case.network):
            if given.get("activation") == "Tanh":
                raise Wrong(f"one process: layer {given['name']}")
        assert case.layout == "plain", "a mistake of another kind"

    inside = [("Conv", {"name": "b", "out_channels": 3, "kernel_size": 3, "padding": 1, "activation": "Tanh"})]
    network = [("BatchNorm", {"name": "a"}), ("Sum", [inside, []]), ("FC", {"name": "c", "out_features": 2})]
    small = shrink(Case((4, 3, 3), network, batch=3, grid=(1, 1, 1, 2), layout="fortran"), check)
    only = ("Conv", {"name": "b", "out_channels": 1, "kernel_size": 1, "activation": "Tanh"})
    assert small == Case((1, 1, 1), [only], batch=1, steps=1)


def test_smaller_cases_are_others():
    case = Case((3, 2), [("Sum", [[("Conv", {"name": "c", "out_channels": 2, "kernel_size": 3, "padding": 1})], []])])
    assert case not in list(smaller_cases(case))
    assert all(np.prod(smaller.shape) <= 6 for smaller in smaller_cases(case))
