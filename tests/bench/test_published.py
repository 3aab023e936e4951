"""Cost model against published step times on a large machine.

paraDL's logs (Kahira et al., An Oracle for Guiding Large-Scale Model/Hybrid Parallel Training of Convolutional Neural
Networks, HPDC 2021) have the seconds of an iteration on ABCI, by nodes: images cut over the 4 V100 of a node, batches
over the nodes. Two node counts calibrate the model; the ratios of the others to the first are compared.
"""

from itertools import pairwise

import pytest

import neondist as nd
from neondist.bench.model.dry_run import DryRunMessageLog
from neondist.bench.model.predict import fit_machine, predict_step, rescale_row
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
    layer = nd.ConvLayerDist(channels, kernel, stride, kernel // 2, bias=False)
    return [layer, nd.BatchNormLayerDist()]


def bottleneck(channels, stride, first):
    main = [*conv(channels, 1), nd.ActivationLayerDist(relu()), *conv(channels, 3, stride)]
    main += [nd.ActivationLayerDist(relu()), *conv(4 * channels, 1)]
    return [nd.Sum([main, conv(4 * channels, 1, stride) if first else []]), nd.ActivationLayerDist(relu())]


def resnet():
    layers = [*conv(64, 7, 2), nd.ActivationLayerDist(relu()), nd.MaxPoolingLayerDist(3, 2, 1)]
    for number, (channels, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers += bottleneck(channels, 2 if number and not block else 1, not block)
    return [*layers, nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(1000)]


def vgg():
    layers = []
    for channels, count in (64, 2), (128, 2), (256, 3), (512, 3), (512, 3):
        layers += [nd.ConvLayerDist(channels, 3, padding=1, activation=relu()) for _ in range(count)]
        layers.append(nd.MaxPoolingLayerDist(2))
    hidden = [nd.FCLayerDist(4096, activation=relu()) for _ in range(2)]
    return [*layers, *hidden, nd.FCLayerDist(1000)]


PARAMETERS = {"resnet": 25_557_032, "vgg": 138_357_544}  # torchvision's resnet50 and vgg16


def predict_rows(name):
    """Return predictions from a plan alone, with one second of computation."""
    batch, published = PUBLISHED[name]
    rows = []
    for nodes in published:
        shape = GridShape(nodes, 2, 2)
        plan = nd.ConvnetDist({"resnet": resnet, "vgg": vgg}[name]()).plan((224, 224, 3), shape, batch * nodes)
        assert sum(layer.parameters for layer in plan) == PARAMETERS[name]
        sums = plan.reduction_bytes(0) | {GRADIENTS: 4 * PARAMETERS[name]}  # every GPU there has all weights
        messages = DryRunMessageLog([(2 * len(plan), plan.bytes(0))], [(shape.size, count) for count in sums.values()])
        rows.append(predict_step(shape, ABCI, RankProfile(1.0, messages)))
    return rows


@pytest.mark.parametrize(("name", "tolerance"), [("resnet", 0.03), ("vgg", 0.05)])
def test_ratios_to_the_first_node_count(name, tolerance):
    rows, published = predict_rows(name), PUBLISHED[name][1]
    times = dict(zip((row["ranks"] for row in rows), published.values(), strict=True))
    measured = dict(list(times.items())[:2])
    machine = fit_machine(ABCI, rows, measured)
    predicted = [rescale_row(machine, row, ABCI)["seconds_per_step"] for row in rows]
    expected = list(times.values())
    assert predicted[:2] == pytest.approx(expected[:2])
    assert 0 < machine.jitter < 0.05
    errors = [a / predicted[0] / (b / expected[0]) - 1 for a, b in zip(predicted, expected, strict=True)]
    assert max(map(abs, errors)) < tolerance, errors
    # messages alone, in rings as in paraDL's own model, predict no growth
    linear = [rescale_row(fit_machine(ABCI, rows[:1], measured), row, ABCI)["seconds_per_step"] for row in rows]
    assert linear[-1] / linear[0] < 1.01
    assert all(a < b for a, b in pairwise(predicted))
