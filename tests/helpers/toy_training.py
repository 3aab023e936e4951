"""Toy model and dataset that record the calls of the training loop, and a small experiment."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from neondist.comm import ProcessGrid
from neondist.costs import CrossEntropy
from neondist.data import Dataset, Split, Synthetic
from neondist.layers import ConvLayerDist, DropoutLayerDist, FCLayerDist, MaxPoolingLayerDist, ReLU
from neondist.models import ConvnetDist
from neondist.optim import SGD
from neondist.train import FitExperiment, Hook


class ToyModel:
    """Model with one weight per class, scaled by the mean of all cells, that records its batches."""

    def __init__(self, optimizer=None, classes=3):
        self.grid, self.dtype, self.seed = ProcessGrid.serial(), np.dtype("float64"), 7
        self.optimizer, self.cost = optimizer or SGD(0.1), CrossEntropy()
        self.output_shape, self.bytes_sent, self.bytes_summed = (classes,), 0, 0
        self.step, self.learning_rate_scale, self.accumulate = 0, 1.0, 1
        self.weights = np.linspace(-1, 1, classes)
        self.slots = self.optimizer.create_slots(self.weights)
        self.output = SimpleNamespace(sum_over_ranks=lambda array, replicas=False: array)
        self.batches, self.scales, self.target_batches, self.training = [], [], [], []
        self.leaves, self.whole_model, self.remote_update, self.loss_scaler = [], self, None, None

    def begin_epoch(self, epoch, seen=0):
        pass

    def use_averaged_weights(self):
        return nullcontext()

    def wait_for_messages(self):
        pass

    @property
    def display_name(self):
        return "ToyModel"

    def fprop(self, x, training=True, batch_size=None):
        self.training.append(training)
        return x.mean(axis=(1, 2)) * self.weights

    def train_batch(self, x, targets, batch_size=None):
        assert len(x) == len(targets) == batch_size
        self.batches.append(x[:, 0, 0, 0].tolist())
        self.target_batches.append(targets.tolist())
        self.scales.append(self.learning_rate_scale)
        self.step, self.bytes_sent = self.step + 1, self.bytes_sent + 10 * batch_size
        y = self.fprop(x)
        grads = (self.cost.local_sum_gradient(y, targets) * x.mean(axis=(1, 2))).sum(axis=0) / batch_size
        self.optimizer.update(self.weights, grads, self.slots, self.step - 1, self.learning_rate_scale)
        return self.cost.local_sum(y, targets) / batch_size

    def evaluate_batch(self, x, targets, batch_size):
        assert len(targets) == batch_size
        y = self.fprop(x, training=False)
        return y, targets, self.cost.local_sum(y, targets)

    def state(self):
        return {"toy/weights": self.weights.copy()}

    def load_state(self, state):
        self.weights[...] = state["toy/weights"]

    def optimizer_state(self):
        return {f"toy/weights/{name}": slot.copy() for name, slot in self.slots.items()}

    def load_optimizer_state(self, state):
        for name, slot in self.slots.items():
            slot[...] = state[f"toy/weights/{name}"]


class ToyData(Dataset):
    """Dataset whose sample i is an image of 2 x 2 cells with the value i; it need not be opened."""

    sample_shape, classes = (2, 2, 1), 3

    def __init__(self, train=10, test=7, validation=None):
        self.train, self.validation, self.test = (
            None if count is None else self.split(count) for count in (train, validation, test)
        )

    def check(self):
        pass

    def open_splits(self, grid):
        raise NotImplementedError

    def split(self, count):
        cells = np.broadcast_to(np.arange(count, dtype=float)[:, None, None, None], (count, 2, 2, 1))
        return Split(cells, np.arange(count) % 3, scale=1.0)


class Recorder(Hook):
    """Hook that records its calls and fails at `fail_at`."""

    def __init__(self, fail_at=None):
        self.calls, self.fail_at = [], fail_at

    def _call(self, name, run):
        self.calls.append((name, run.epoch, run.step))
        if (name, run.step) == self.fail_at:
            raise RuntimeError("the hook fails")

    def before_run(self, run):
        self._call("before_run", run)

    def after_step(self, run):
        self._call("after_step", run)

    def after_epoch(self, run):
        self._call("after_epoch", run)

    def on_stop(self, run):
        self._call("on_stop", run)

    def on_error(self, run, error):
        self._call("on_error", run)

    def after_run(self, run):
        self._call("after_run", run)


def make_experiment(epochs=2, layers=None, model=ConvnetDist, optimizer=None, dataset=None, **fields):
    """Return an experiment with a small float64 network and 45 samples.

    `layers` and `dataset` are factories, because virtual ranks share no objects.
    """
    layers = (
        layers()
        if layers
        else [
            ConvLayerDist(3, 3, padding=1, activation=ReLU()),
            MaxPoolingLayerDist(2),
            ConvLayerDist(4, 3, padding=1, activation=ReLU(), name="second"),
            DropoutLayerDist(0.2),
            FCLayerDist(4),
        ]
    )
    network = model(layers, optimizer=optimizer or SGD(0.05, momentum=0.9), dtype="float64")
    dataset = dataset() if dataset else Synthetic((13, 11, 2), classes=4, train=45, test=13)
    return FitExperiment(dataset, network, **{"batch_size": 10, "epochs": epochs} | fields)
