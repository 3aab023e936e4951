"""Segments of layers that recompute cells of other tiles: results of one process with at most one exchange."""

from itertools import product

import numpy as np
import pytest
from case_selection import select_cases
from common_checks import max_relative_difference
from scheme_runs import build_model, draw_inputs, run_on_ranks, run_step

import neondist as nd
from neondist.errors import ConfigError
from neondist.geometry import Box, grid_shape


def conv(channels, kernel, **options):
    return nd.ConvLayerDist(channels, kernel, activation=nd.Tanh(), **options)


NETWORKS = {
    "plain": ((13, 12, 2), lambda: [conv(3, 3, padding=1), conv(2, 5, padding=2), conv(3, 3), nd.FCLayerDist(5)]),
    "strides": (
        (19, 17, 2),
        lambda: [
            conv(3, 5, stride=2, padding=2),
            nd.MaxPoolingLayerDist(3, 2, 1),
            conv(2, 3, dilation=2, padding=2),
            nd.UpsampleLayerDist(2, "bilinear"),
            nd.AvgPoolingLayerDist(3, 1, 1, count_include_pad=False),
            nd.L2PoolingLayerDist(2, 1),
        ],
    ),
    "padding": (
        (11, 10, 2),
        lambda: [
            conv(3, 3, padding=1, padding_mode="reflect"),
            conv(2, 5, padding=2, padding_mode="replicate"),
            nd.PadLayerDist(((1, 2), (0, 1)), fill=2.0),
            nd.CropLayerDist(((0, 1), (2, 0))),
            conv(2, 4, padding=((1, 2), (2, 1))),
            nd.GlobalAvgPoolingLayerDist(),
        ],
    ),
    "normalised": (
        (12, 11, 2),
        lambda: [
            nd.BatchNormLayerDist(),
            conv(4, 3, padding=1),
            nd.BatchNormLayerDist(),
            nd.DropoutLayerDist(0.3),
            conv(4, 3, padding=1),
            nd.GroupNormLayerDist(2),
            nd.ActivationLayerDist(nd.ReLU()),
            nd.LRNLayerDist(3),
            conv(2, 3, padding=1),
            nd.InstanceNormLayerDist(affine=True),
            nd.FCLayerDist(5),
        ],
    ),
    "enlarged": (  # odd extent: upsampled cells may belong to another tile
        (7, 5, 2),
        lambda: [nd.UpsampleLayerDist(2), conv(3, 1), nd.UpsampleLayerDist((1, 3)), nd.FCLayerDist(4)],
    ),
    "narrowing": (  # statistics include cells that no later layer of the segment reads
        (14, 13, 2),
        lambda: [
            conv(4, 3, padding=1),
            nd.BatchNormLayerDist(),
            nd.CropLayerDist(((4, 0), (1, 3))),
            conv(2, 2, stride=3),
            nd.GroupNormLayerDist(2),
            nd.PadLayerDist(1),
        ],
    ),
    "cropped": ((9, 8, 2), lambda: [conv(3, 1), nd.CropLayerDist(((3, 0), (1, 2))), nd.FCLayerDist(4)]),
    "branches": (
        (10, 9, 2),
        lambda: [
            conv(3, 3, padding=1),
            nd.Sum([[conv(3, 3, padding=1), nd.BatchNormLayerDist(), conv(3, 3, padding=1)], []]),
            conv(2, 3),
            conv(2, 3),
        ],
    ),
    "series": ((17, 2), lambda: [conv(3, 5, padding=2), conv(2, 3, stride=2), conv(2, 3, padding=1)]),
    "volume": ((5, 6, 7, 1), lambda: [conv(2, 3, padding=1), nd.MaxPoolingLayerDist(2, 1), conv(2, 3, padding=1)]),
}
SCHEMES = ["deep_halo(layers=2)", "deep_halo(layers=9)", "overlap_tile(statistics=global)"]


def run_passes(comm, layers, shape, scheme, rows=None):
    """Run all passes of a model twice; return its results and state."""
    model = build_model(comm, layers(), shape, rows, scheme=scheme)
    x, dy = draw_inputs(model)
    for step_number, sign in enumerate((-1, 1)):  # the second round detects stale data in reused buffers
        y, dx = run_step(model, step_number, sign * x, sign * dy)
    arrays = {"y": y, "dx": dx} | {f"grad {name}": array for name, array in model.gradients().items()}
    model.train_batch(model.scatter(x), np.zeros((3, *model.output_shape[:-1]), int))
    return arrays | {f"state {name}": array for name, array in model.state().items()}


@pytest.mark.parametrize(("name", "scheme"), select_cases(product(NETWORKS, SCHEMES)))
@pytest.mark.long
def test_results_match_one_process(name, scheme):
    shape, layers = NETWORKS[name]
    if name == "branches" and "overlap" in scheme:
        pytest.skip("overlap_tile is for chains")
    expected = run_on_ranks(1, lambda comm: run_passes(comm, layers, shape, "halo"))[0]
    index = list(NETWORKS).index(name) + SCHEMES.index(scheme)
    for ranks, rows in [(4, 2), [(2, 1), (9, 9)][index % 2]]:
        for actual in run_on_ranks(ranks, lambda comm, rows=rows: run_passes(comm, layers, shape, scheme, rows)):
            assert max_relative_difference(actual, expected) < 1e-10, (ranks, rows)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["plain", "strides", "padding"])
@pytest.mark.long
def test_bytes_match_the_plan(name, scheme):
    shape, layers = NETWORKS[name]

    def job(comm):
        model = build_model(comm, layers(), shape, rows=3, scheme=scheme)
        run_step(model, 0, *draw_inputs(model))
        return [layer.bytes_sent for layer in model.leaves]

    plans = nd.ConvnetDist(layers(), scheme=scheme).plan(shape, grid_shape(6, rows=3))
    expected = [plan.halo_bytes_by_tile(samples=3, itemsize=8) for plan in plans]
    sent = run_on_ranks(6, job)
    assert [[rank_sent[i] for rank_sent in sent] for i in range(len(plans))] == expected
    if "overlap" in scheme:
        assert not any(map(any, sent))
    elif "9" in scheme:
        assert [any(rank_sent[i] for rank_sent in sent) for i in range(3)] == [True, False, False]


def test_training_on_overlapping_tiles(tmp_path):
    def job(comm, scheme):
        layers = [conv(3, 3, padding=1), nd.MaxPoolingLayerDist(2), conv(2, 3), nd.FCLayerDist(4)]
        model = nd.ConvnetDist(layers, scheme=scheme, dtype="float64", backend="numpy")
        experiment = nd.FitExperiment(nd.Synthetic((12, 13, 1), train=12, test=5), model, batch_size=4, epochs=2)
        history = experiment.run(nd.ProcessGrid(comm), hooks=[]).history
        return [(record["train_loss"], record["test_loss"]) for record in history], history[0]["bytes_sent"]

    expected, sent = run_on_ranks(4, lambda comm: job(comm, "halo"))[0]
    actual, no_bytes = run_on_ranks(4, lambda comm: job(comm, "overlap_tile"))[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-10)
    assert sent > no_bytes == 0


def test_overlapping_targets_are_cropped_to_owned_cells():
    """Full maps and maps of a rank's own cells give the same targets."""
    shape, labels = (12, 13, 1), np.arange(2 * 12 * 13).reshape(2, 12, 13)

    def job(comm):
        grid, layers = nd.ProcessGrid(comm, rows=3), [conv(3, 3, padding=1), conv(2, 3, padding=1)]
        model = nd.ConvnetDist(layers, scheme="overlap_tile", backend="numpy")
        model.build(shape, 2, grid)
        wide, own = grid.with_tiles(model.compiled.overlapping_tiles).tile_box(shape[:-1]), model.output.own
        assert own.size < wide.size < labels[0].size
        for box in own, wide, Box.of(shape[:-1]):
            targets = model.local_targets(labels[(slice(None), *box.slices)], 2)
            np.testing.assert_array_equal(targets, labels[(slice(None), *own.slices)])

    run_on_ranks(6, job)


UNSUPPORTED = {
    "wrap": (
        lambda: [conv(1, 3), conv(1, 3, padding=1, padding_mode="wrap")],
        "deep_halo",
        r"layer 1 'conv2'.*computes cells of other tiles, but this layer cannot do so: its image wraps around",
    ),
    "lcn": (
        lambda: [conv(1, 3), nd.LCNLayerDist(3)],
        "deep_halo",
        "layer 1 'lcn1'.*exchange means; set 'scheme: halo' for this layer",
    ),
    "unshared": (
        lambda: [conv(1, 3), nd.LocalFilteringLayerDist(1, 3)],
        "overlap_tile",
        "stores only the weights of",
    ),
    "deconv": (lambda: [nd.DeconvLayerDist(1, 3), conv(1, 3)], "deep_halo", "layer 0 'deconv1'.*slide over the output"),
    "batch normalisation": (
        lambda: [conv(1, 3), nd.BatchNormLayerDist(), conv(1, 3)],
        "overlap_tile",
        r"layer 1 'batch_norm1'.*normalises over the whole image; set 'statistics: global'",
    ),
    "not first": (
        lambda: [conv(1, 3, scheme="halo"), conv(1, 3, scheme="overlap_tile")],
        "halo",
        "layer 1 'conv2'.*only to the first layers of a model",
    ),
    "in a branch": (
        lambda: [nd.Concat([conv(1, 3, padding=1), conv(1, 3, padding=1, scheme="overlap_tile")])],
        "halo",
        "layer 0 'concat1.conv2'.*not inside or after Sum or Concat",
    ),
    "after a branch": (
        lambda: [conv(1, 3), nd.Sum([[conv(1, 3, padding=1, scheme="halo")], []]), conv(1, 3)],
        "overlap_tile",
        "layer 2 'conv2'.*not inside or after",
    ),
    "statistics": (
        lambda: [conv(1, 3)],
        "overlap_tile(statistics=mine)",
        "statistics: expected 'global' or null, got the text 'mine'",
    ),
    "layers": (
        lambda: [conv(1, 3)],
        "deep_halo(layers=0)",
        "layers: expected an integer of at least 1, got 0",
    ),
}


@pytest.mark.parametrize(("layers", "scheme", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_layers_are_rejected(layers, scheme, message):
    with pytest.raises(ConfigError, match=message):
        nd.ConvnetDist(layers(), scheme=scheme).plan((16, 16, 1), nd.GridShape(1, 2, 2))


def test_another_scheme_ends_a_segment():
    layers = [conv(1, 3), conv(1, 3), nd.LCNLayerDist(3, scheme="halo"), conv(1, 3), conv(1, 3)]
    plans = nd.ConvnetDist(layers, scheme="deep_halo(layers=5)").plan((20, 20, 1), nd.GridShape(1, 2, 2))
    assert [plan.halo_cells_by_tile[0] > 0 for plan in plans] == [True, False, True, True, False]


def test_segments_have_the_requested_length():
    for layers, expected in (2, [True, False, True, False, True]), (3, [True, False, False, True, False]):
        model = nd.ConvnetDist([conv(1, 3) for _ in range(5)], scheme=f"deep_halo(layers={layers})")
        plans = model.plan((20, 20, 1), nd.GridShape(1, 2, 2))
        assert [plan.halo_cells_by_tile[0] > 0 for plan in plans] == expected
