"""Optimiser rules: hand-computed steps, in-place updates, dtypes, empty arrays and error messages."""

import tracemalloc

import numpy as np
import pytest

from neondist.errors import ConfigError
from neondist.optim import SGD, Adam, CosineDecay, StepDecay

ALL = [SGD(0.1), SGD(0.1, momentum=0.9, weight_decay=0.01, nesterov=True), Adam(weight_decay=0.01)]


def test_momentum_by_hand():
    params = np.array([1.0])
    slots = SGD(0.5, momentum=0.5).create_slots(params)
    for step, expected in enumerate([0.0, -1.5, -3.25]):  # steps of 0.5 * (2, 3, 3.5)
        SGD(0.5, momentum=0.5).update(params, np.array([2.0]), slots, step)
        assert params[0] == expected


@pytest.mark.parametrize("optimizer", ALL)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_updates_are_in_place_and_keep_the_dtype(optimizer, dtype):
    params, grads = np.ones(10, dtype), np.ones(10, dtype)
    slots = optimizer.create_slots(params)
    before = dict(slots)
    optimizer.update(params[:5], grads[:5], {name: slot[:5] for name, slot in slots.items()}, 0)
    assert params.dtype == dtype
    assert (params[:5] != 1).all()
    assert (params[5:] == 1).all()
    assert all(slots[name] is before[name] and slots[name].dtype == dtype for name in slots)


@pytest.mark.parametrize("optimizer", ALL)
def test_no_parameters(optimizer):
    optimizer.update(np.zeros(0), np.zeros(0), optimizer.create_slots(np.zeros(0)), 0)


@pytest.mark.parametrize("optimizer", ALL)
def test_no_large_temporaries(optimizer):
    size = 2_000_000
    params, grads = np.ones(size, np.float32), np.ones(size, np.float32)
    slots = optimizer.create_slots(params)
    tracemalloc.start()
    optimizer.update(params, grads, slots, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size  # a quarter of one array


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SGD(learning_rate=-0.1), "learning_rate"),
        (lambda: SGD(learning_rate=float("nan")), "learning_rate"),
        (lambda: SGD(learning_rate=float("inf")), "learning_rate"),
        (lambda: SGD(learning_rate=True), "learning_rate"),
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(momentum=-0.1), "momentum"),
        (lambda: SGD(weight_decay=-1), "weight_decay"),
        (lambda: SGD(nesterov=True), "nesterov"),
        (lambda: SGD(momentum=0.9, nesterov="yes"), "nesterov"),
        (lambda: SGD(schedule=0.1), "schedule"),
        (lambda: Adam(learning_rate=-1), "learning_rate"),
        (lambda: Adam(beta1=1), "beta1"),
        (lambda: Adam(beta2=1.5), "beta2"),
        (lambda: Adam(eps=0), "eps"),
        (lambda: StepDecay(0, 0.1), "every_epochs"),
        (lambda: StepDecay(1.5, 0.1), "every_epochs"),
        (lambda: StepDecay(3, 0), "factor"),
        (lambda: CosineDecay(0), "epochs"),
    ],
)
def test_values_out_of_range(make, field):
    with pytest.raises(ConfigError, match=rf"^(\w+: )?{field}: .*(give|requires|expected)"):
        make()


def test_quoted_number_has_a_hint():
    with pytest.raises(ConfigError, match="got the text '1e-3'; remove the quotes"):
        SGD(learning_rate="1e-3")


def test_schedules():
    steps = StepDecay(every_epochs=2, factor=0.5)
    assert [steps.factor(e) for e in (0, 1.9, 2, 3.5, 4)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = CosineDecay(epochs=4)
    assert [round(cosine.factor(e), 12) for e in (0, 2, 4, 9)] == [1, 0.5, 0, 0]
    assert SGD().rate_factor_at(7) == 1
    assert SGD(schedule=steps).rate_factor_at(2) == 0.5
