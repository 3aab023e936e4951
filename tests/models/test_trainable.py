"""A model and a stage of its pretraining are the same to the training loop."""

from typing import runtime_checkable

import numpy as np
import pytest
from gb_runs import built

import neondist as nd
from neondist.models import Trainable
from neondist.train.loop import evaluate, train_loop
from neondist.train.state import TrainState

Asked = runtime_checkable(Trainable)


class Only:
    """Shows what Trainable names, and nothing else."""

    def __init__(self, trained):
        object.__setattr__(self, "trained", trained)

    def __getattr__(self, name):
        named = {*Trainable.__annotations__, *(one for one in dir(Trainable) if not one.startswith("_"))}
        assert name in named, f"the loop asks for '{name}', of which Trainable says nothing"
        return getattr(self.trained, name)

    def __setattr__(self, name, value):
        assert name in Trainable.__annotations__
        setattr(self.trained, name, value)


@pytest.mark.parametrize("of", ["model", "stage"])
def test_a_model_and_a_stage_are_trainable_by_what_the_protocol_says_alone(of):
    model, _ = built("unshared")
    trained = model if of == "model" else model.stages[0]
    assert isinstance(trained, Asked)
    assert not isinstance(model.layers[0], Asked)
    data = nd.Synthetic(shape=model.input_shape, classes=4, train=12, test=6)
    data.open(model.grid)
    before = evaluate(Only(trained), data.test, 6)["loss"]
    run = TrainState(Only(trained), data, 2, 6)
    train_loop(run, metrics=[])
    assert trained.step == 4
    assert np.isfinite(before)
    assert run.history[-1]["test_loss"] != before
