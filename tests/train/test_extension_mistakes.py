"""Mistakes in custom costs, metrics, initialisers, optimisers, data sets, augmentations and strategies."""

import numpy as np
import pytest

import neondist as nd
from neondist import loopback
from neondist.strategies.strategy import ParameterStrategy


def sum_of(layer_or_cost, y, targets, sum_over_tiles=None):
    return y.sum()


def gradient_of_ones(cost, y, targets, sum_over_tiles=None):
    return np.ones_like(y)


def sums_of_ones(metric, y, targets):
    return [float(y.sum()), y.size]


COST = (nd.Cost, {"local_sum": sum_of, "local_sum_gradient": gradient_of_ones})
METRIC = (nd.Metric, {"name": "own", "local_sums": sums_of_ones})
INITIALIZER = (nd.Initializer, {"values": lambda self, key, indices, fan_in, fan_out: 0.1 * (indices % np.uint64(3))})
TRANSFORM = (nd.Transform, {"transform_image": lambda self, cells, source, box, draw: cells})


class Waves(nd.Dataset):
    def check(self):
        self.sample_shape, self.classes = (7, 6, 1), 3

    def open_splits(self, grid):
        tile = (slice(None), *grid.tile_box((7, 6)).slices)
        images = np.random.default_rng(0).normal(size=(4, 7, 6, 1)).astype("f4")[tile]
        return nd.Split(images, np.arange(4) % 3), nd.Split(images, np.arange(4) % 3)


class Descent(nd.Optimizer):
    def apply(self, params, grads, slots, scratch, rate, step):
        params -= rate * grads


class ReturningDescent(nd.Optimizer):
    def apply(self, params, grads, slots, scratch, rate, step):
        return params - rate * grads


class EveryRank(nd.strategies.StrategyBuilder):
    def __init__(self, group: int):
        self.group = group

    def assign(self, specs, replicas, servers):
        return {spec.name: ParameterStrategy("allreduce", group=self.group) for spec in specs}


def create(kind, **members):
    base, defaults = kind
    return type("Own", (base,), defaults | members)()


def train(comm=None, cost=None, metric=None, initializer=None, transform=None, dataset=None, optimizer=None, **options):
    layers = [nd.ConvLayerDist(2, 3, padding=1, weights_init=initializer), nd.FCLayerDist(3)]
    model = nd.ConvnetDist(layers, cost=cost or nd.CrossEntropy(), optimizer=optimizer or Descent(0.1), **options)
    settings = {"metrics": [metric] if metric else [], "augment": [transform] if transform else []}
    experiment = nd.FitExperiment(dataset or Waves(), model, batch_size=3, **settings)
    experiment.run(nd.ProcessGrid(comm), hooks=[])


def test_valid_extensions_train():
    own = {"cost": create(COST), "initializer": create(INITIALIZER), "transform": create(TRANSFORM)}
    train(**own, metric=create(METRIC), strategy=EveryRank(1))
    train(**own, metric=create(METRIC, local_sums=lambda *_: [1], result=lambda metric, sums: {"own": 1.0}))


RESULTS = {
    "no cost": ({"cost": create(COST, local_sum=lambda *_: None)}, "Own.local_sum returns an object of type NoneType"),
    "several costs": ({"cost": create(COST, local_sum=lambda c, y, *_: y[0])}, r"local_sum returns shape \(3,\)"),
    "no gradient": (
        {"cost": create(COST, local_sum_gradient=lambda *_: None)},
        "gradient returns .*NoneType; expected",
    ),
    "narrow gradient": (
        {"cost": create(COST, local_sum_gradient=lambda c, y, *_: y[:, :1])},
        r"gradient returns shape \(3, 1\) and dtype float32; expected an array of shape \(3, 3\)",
    ),
    "rounded gradient": (
        {"cost": create(COST, local_sum_gradient=lambda c, y, *_: y.astype("f2"))},
        "and dtype float16; expected",
    ),
    "no sums": ({"metric": create(METRIC, local_sums=lambda *_: None)}, "Own.local_sums returns nan; expected a sum"),
    "one sum": ({"metric": create(METRIC, local_sums=lambda *_: [1.0])}, r"local_sums returns \[1.0\]; expected a sum"),
    "other sums": (
        {"metric": create(METRIC, local_sums=lambda m, y, t: [1.0] * (1 + len(y)))},
        "always the same number",
    ),
    "no values": (
        {"initializer": create(INITIALIZER, values=lambda *_: None)},
        "Own.values returns NoneType; expected",
    ),
    "few values": (
        {"initializer": create(INITIALIZER, values=lambda *_: np.zeros(3))},
        r"returns shape \(3,\) and dtype float64; expected float64 values of the shape \(3, 3, 1, 2\)",
    ),
    "no cells": (
        {"transform": create(TRANSFORM, transform_image=lambda *_: None)},
        r"augment: Own returns NoneType for Box.*; expected an array of shape \(\d, 6, 1\)",
    ),
    "few cells": (
        {"transform": create(TRANSFORM, transform_image=lambda self, cells, *_: cells[1:])},
        r"augment: Own returns \(\d, 6, 1\) for Box",
    ),
    "other cells": (
        {"transform": create(TRANSFORM, source_box=lambda self, box, draw: box.shift((-1, 0)))},
        "augment: Own: source_box Box.* is not inside Box.*max_source_box; extend max_source_box",
    ),
    "no splits": (
        {"dataset": create((Waves, {}), open_splits=lambda *_: None)},
        "open_splits returns NoneType; expected",
    ),
    "one split": (
        {"dataset": create((Waves, {}), open_splits=lambda self, grid: Waves.open_splits(self, grid)[0])},
        "open_splits returns Split; expected",
    ),
    "arrays": ({"dataset": create((Waves, {}), open_splits=lambda *_: [np.zeros(3)] * 2)}, "open_splits returns list"),
    "returned update": ({"optimizer": ReturningDescent(0.1)}, "ReturningDescent.apply returns a value; update params"),
}


@pytest.mark.parametrize(("members", "message"), RESULTS.values(), ids=RESULTS)
def test_invalid_results_name_the_class(members, message):
    def job(comm):
        with pytest.raises(nd.NeondistError, match=message):
            train(comm, **members)

    loopback.run(2, job)


def test_named_strategies_require_their_arguments():
    train(strategy="EveryRank(group=1)")
    with pytest.raises(nd.ConfigError, match=r"EveryRank requires 'group'; write EveryRank\(group=...\)"):
        train(strategy="EveryRank")
    with pytest.raises(nd.ConfigError, match="EveryRank has no argument 'groups'; did you mean 'group'"):
        train(strategy="EveryRank(groups=1)")
