"""Generated networks against PyTorch, serially and on virtual ranks: the cases of NEONDIST_SEED.

`make hunt` and `tools/random_graphs.py` run others.
"""

import os

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is the oracle here")

from graphs.case import Case, list_leaves
from graphs.check import check_case
from graphs.draw import IMAGE_LAYERS, draw_case
from graphs.execution import Mismatch
from graphs.shrink import generate_smaller, shrink

SEED = int(os.environ["NEONDIST_SEED"])
CASES, CASES_PER_TEST = 15, 5  # tests/mpi runs others


@pytest.mark.parametrize("first", range(0, CASES, CASES_PER_TEST))
@pytest.mark.long
def test_generated_networks_match_pytorch(first):
    for number in range(first, first + CASES_PER_TEST):
        case = draw_case(SEED, number)
        try:
            check_case(case)
        except Exception as error:
            small = shrink(case, check_case)
            with pytest.raises(Exception) as caught:  # noqa: PT011
                check_case(small)
            raise AssertionError(f"NEONDIST_SEED={SEED}, case {number}: {caught.value}\n\n{small.program()}") from error


TANH_LAYER = ("Activation", {"name": "b", "activation": "Tanh"})
REGRESSION_CASES = {
    "empty lists before a section": Case(
        (4, 1), [[], [], ("Conv", {"name": "a", "out_channels": 1, "kernel_size": 2}), ("LRN", {"name": "b"})],
        batch=1, steps=1, grid=(1, 1, 1, 2), recompute=True,
    ),
    "streamed tiles without cells": Case(
        (1, 1, 1), [("Conv", {"name": "a", "out_channels": 1, "kernel_size": 1}), TANH_LAYER],
        batch=1, steps=1, second_grid=(1, 1, 1, 2), strips=1, memory="1TiB",
    ),
    "streamed norms of one image": Case(
        (4, 1), [("Sum", [("GroupNorm", {"name": "a", "groups": 1}), ("InstanceNorm", {"name": "b"})])],
        batch=1, steps=1, strips=1, memory="1TiB",
    ),
    "strips of equal cells with more padding": Case(
        (3, 1), [("Conv", {"name": "a", "out_channels": 1, "kernel_size": 1, "padding": 2})],
        batch=1, steps=1, second_grid=(1, 2, 1, 2), strips=1, memory="1TiB",
    ),
    "contrast of a constant": Case(
        (1, 3, 1),
        [
            ("Conv", {"name": "a", "out_channels": 1, "kernel_size": 1, "activation": "Softmax"}),
            ("LCN", {"name": "b", "kernel_size": (1, 5), "min_deviation": "mean", "padding_mode": "reflect"}),
        ],
        batch=1, steps=1,
    ),
    "reduction before the backward pass of the first layer": Case(
        (5, 1), [("OwnCenter", {"name": "a"})], batch=1, steps=1, grid=(1, 1, 1, 2),
    ),
    "reduced array that the layer has saved, for parameters only": Case(
        (5, 1), [("OwnExcitation", {"name": "a"})], batch=1, steps=1, grid=(1, 1, 1, 2),
    ),
    "result of a reduction that a strip modifies": Case(
        (5, 1), [("OwnExcitation", {"name": "a"}), TANH_LAYER], batch=1, steps=1, strips=1, memory="1TiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REGRESSION_CASES)
def test_regressions(name):
    check_case(REGRESSION_CASES[name])


@pytest.mark.long
def test_all_layers_are_drawn():
    missing = set(IMAGE_LAYERS)
    for number in range(300):
        missing -= {kind for kind, _ in list_leaves(draw_case(0, number).network)}
        if not missing:
            return
    raise AssertionError(f"never drawn: {missing}")


def test_drawing_is_deterministic():
    assert repr(draw_case(3, 5)) == repr(draw_case(3, 5))
    assert repr(draw_case(3, 5)) != repr(draw_case(4, 5))


def test_program_reproduces_the_case():
    case = draw_case(1, 7)
    checked = []
    code = case.program().replace("from graphs.check import check_case\n", "")
    exec(code, {"check_case": checked.append})
    assert checked == [case]


def test_failing_cases_are_shrunk():
    """A failure of tanh is reduced to a single tanh layer."""

    def check(case):
        for _, arguments in list_leaves(case.network):
            if arguments.get("activation") == "Tanh":
                raise Mismatch(f"one process: layer {arguments['name']}")
        assert case.layout == "plain", "a different failure"

    branch = [("Conv", {"name": "b", "out_channels": 3, "kernel_size": 3, "padding": 1, "activation": "Tanh"})]
    network = [("BatchNorm", {"name": "a"}), ("Sum", [branch, []]), ("FC", {"name": "c", "out_features": 2})]
    small = shrink(Case((4, 3, 3), network, batch=3, grid=(1, 1, 1, 2), layout="fortran"), check)
    tanh_layer = ("Conv", {"name": "b", "out_channels": 1, "kernel_size": 1, "activation": "Tanh"})
    assert small == Case((1, 1, 1), [tanh_layer], batch=1, steps=1)


def test_smaller_cases_differ():
    case = Case((3, 2), [("Sum", [[("Conv", {"name": "c", "out_channels": 2, "kernel_size": 3, "padding": 1})], []])])
    assert case not in list(generate_smaller(case))
    assert all(np.prod(smaller.shape) <= 6 for smaller in generate_smaller(case))
