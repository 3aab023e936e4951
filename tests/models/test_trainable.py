"""Training of models and pretraining stages through the Trainable protocol."""

from typing import runtime_checkable

import numpy as np
import pytest
from gb_runs import build_gb

import neondist as nd
from neondist.models import Trainable
from neondist.train.loop import evaluate, train_loop
from neondist.train.state import TrainState

CheckableTrainable = runtime_checkable(Trainable)


class TrainableProtocolProxy:
    """Proxy that exposes only the members of Trainable."""

    def __init__(self, target):
        object.__setattr__(self, "target", target)

    def __getattr__(self, name):
        members = {*Trainable.__annotations__, *(member for member in dir(Trainable) if not member.startswith("_"))}
        assert name in members, f"the loop uses '{name}', which Trainable does not declare"
        return getattr(self.target, name)

    def __setattr__(self, name, value):
        assert name in Trainable.__annotations__
        setattr(self.target, name, value)


@pytest.mark.parametrize("kind", ["model", "stage"])
def test_trainable_protocol_is_sufficient(kind):
    model, _ = build_gb("unshared")
    trainable = model if kind == "model" else model.stages[0]
    assert isinstance(trainable, CheckableTrainable)
    assert not isinstance(model.layers[0], CheckableTrainable)
    data = nd.Synthetic(shape=model.input_shape, classes=4, train=12, test=6)
    data.open(model.grid)
    before = evaluate(TrainableProtocolProxy(trainable), data.test, 6)["loss"]
    run = TrainState(TrainableProtocolProxy(trainable), data, 2, 6)
    train_loop(run, metrics=[])
    assert trainable.step == 4
    assert np.isfinite(before)
    assert run.history[-1]["test_loss"] != before
