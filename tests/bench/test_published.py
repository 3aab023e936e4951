"""The cost model against steps that others have measured on a large machine.

paraDL's logs (Kahira et al., An Oracle for Guiding Large-Scale Model/Hybrid Parallel Training of Convolutional Neural
Networks, HPDC 2021) have the seconds of an iteration on ABCI, by nodes: images cut over the 4 V100 of a node, batches
over the nodes. Two node counts calibrate; what is compared are the ratios of the others to the first.
"""

from itertools import pairwise

import pytest

import neondist as nd
from neondist.bench.model.dry_run import Notes
from neondist.bench.model.predict import calibrated, rescale_row, row_of
from neondist.bench.model.rank_profile import RankProfile
from neondist.geometry import GridShape
from neondist.plan import GRADIENTS
from neondist.system.machine import Link, Machine

PUBLISHED = {
    "resnet": (64, {8: 0.2441, 16: 0.2471, 32: 0.2446, 64: 0.2503, 128: 0.2536, 256: 0.2598}),
    "vgg": (32, {8: 4.124, 16: 4.210, 32: 4.351, 64: 4.553, 128: 4.680, 256: 4.686, 512: 4.884}),
}
# paraDL's 0.5 µs; NVLink 2 between the GPUs of a node, and two ports of EDR InfiniBand for each, from articles on ABCI
# (paraDL's own model of it has 12.5 GB/s)
ABCI = Machine(4, Link(5e-7, 5e10), Link(5e-7, 2.5e10))
relu = nd.ReLU


def conv(channels, kernel, stride=1):
    made = nd.ConvLayerDist(channels, kernel, stride, kernel // 2, bias=False)
    return [made, nd.BatchNormLayerDist()]


def bottleneck(channels, stride, first):
    main = [*conv(channels, 1), nd.ActivationLayerDist(relu()), *conv(channels, 3, stride)]
    main += [nd.ActivationLayerDist(relu()), *conv(4 * channels, 1)]
    return [nd.Sum([main, conv(4 * channels, 1, stride) if first else []]), nd.ActivationLayerDist(relu())]


def resnet():
    layers = [*conv(64, 7, 2), nd.ActivationLayerDist(relu()), nd.MaxPoolingLayerDist(3, 2, 1)]
    for number, (channels, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for at in range(blocks):
            layers += bottleneck(channels, 2 if number and not at else 1, not at)
    return [*layers, nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(1000)]


def vgg():
    layers = []
    for channels, count in (64, 2), (128, 2), (256, 3), (512, 3), (512, 3):
        layers += [nd.ConvLayerDist(channels, 3, padding=1, activation=relu()) for _ in range(count)]
        layers.append(nd.MaxPoolingLayerDist(2))
    hidden = [nd.FCLayerDist(4096, activation=relu()) for _ in range(2)]
    return [*layers, *hidden, nd.FCLayerDist(1000)]


PARAMETERS = {"resnet": 25_557_032, "vgg": 138_357_544}  # torchvision's resnet50 and vgg16


def rows_of(name):
    """Return what the model predicts from a plan alone, with a second of computing."""
    batch, published = PUBLISHED[name]
    made = []
    for nodes in published:
        shape = GridShape(nodes, 2, 2)
        plan = nd.ConvnetDist({"resnet": resnet, "vgg": vgg}[name]()).plan((224, 224, 3), shape, batch * nodes)
        assert sum(layer.parameters for layer in plan) == PARAMETERS[name]
        sums = plan.reduced(0) | {GRADIENTS: 4 * PARAMETERS[name]}  # there, every GPU has all weights
        notes = Notes([(2 * len(plan), plan.bytes(0))], [(shape.size, count) for count in sums.values()])
        made.append(row_of(shape, ABCI, RankProfile(1.0, notes)))
    return made


@pytest.mark.parametrize(("name", "most"), [("resnet", 0.03), ("vgg", 0.05)])
def test_ratios_to_the_first_node_count(name, most):
    rows, published = rows_of(name), PUBLISHED[name][1]
    times = dict(zip((row["ranks"] for row in rows), published.values(), strict=True))
    two = dict(list(times.items())[:2])
    machine = calibrated(ABCI, rows, two)
    found = [rescale_row(machine, row, ABCI)["seconds_per_step"] for row in rows]
    expected = list(times.values())
    assert found[:2] == pytest.approx(expected[:2])
    assert 0 < machine.jitter < 0.05
    errors = [a / found[0] / (b / expected[0]) - 1 for a, b in zip(found, expected, strict=True)]
    assert max(map(abs, errors)) < most, errors
    # messages alone, as the ring of paraDL's own model has them, say that nothing grows
    flat = [rescale_row(calibrated(ABCI, rows[:1], two), row, ABCI)["seconds_per_step"] for row in rows]
    assert flat[-1] / flat[0] < 1.01
    assert all(a < b for a, b in pairwise(found))
