"""Streaming of images that do not fit in memory: the first layers run in strips, with unchanged results."""

import re

import numpy as np
import pytest
from common_checks import max_relative_difference
from every_layer import build_every_layer, run_steps
from small_hdf5 import write_hdf5

import neondist as nd
from neondist.backends import backend_name
from neondist.comm import loopback
from neondist.data import HDF5Dataset
from neondist.errors import PassOrderError
from neondist.system.lazy import LazyTile
from neondist.system.memory import parse_bytes, process_overhead_bytes
from neondist.train import Hook

AMPLE_MEMORY = "1TiB"
OVERHEAD_BYTES = process_overhead_bytes(backend_name("auto"))
"""with `strips`, all streamable layers are streamed although everything fits"""


class ScaledCenterLayerDist(nd.Dist, nd.Layer):
    """Subtraction of each channel's mean, and a trained factor, whose gradient is computed in `backward`."""

    def parameters_for(self, input_shape):
        return {"factor": nd.Parameter(input_shape[-1:], nd.Constant(2.0))}

    def reductions_for(self, input_shape):
        return [
            nd.Reduction(way, "tiles", result_elements_per_sample=input_shape[-1]) for way in ("forward", "backward")
        ]

    def reduce(self, ctx, view):
        return ctx.kernels.sample_sum(ctx.owned(view))

    def forward(self, ctx, view):
        ctx.save(centered=view - self.means(ctx.reduced))
        return ctx.centered * ctx.params["factor"]

    def reduce_backward(self, ctx, dy):
        return ctx.kernels.sample_sum(dy * ctx.params["factor"])

    def backward(self, ctx, dy):
        ctx.grads["factor"] = ctx.kernels.channel_sum(dy * ctx.centered)
        dx = dy * ctx.params["factor"]
        owned = ctx.owned(dx)
        owned -= self.means(ctx.reduced)
        return dx

    def means(self, sums):
        return (sums / np.prod(self.input_shape[:-1])).reshape(len(sums), 1, 1, -1)


def make_residual_model(**options):
    """Return a network of convolutions, reduction_steps norms, dropout, residual blocks and fully connected layers."""
    relu = nd.ReLU()
    layers = [
        nd.ConvLayerDist(4, 5, padding=2, padding_mode="reflect", bias=False),
        nd.BatchNormLayerDist(),
        nd.ActivationLayerDist(relu),
        nd.Sum(
            [
                [nd.ConvLayerDist(4, 3, padding=1, bias=False), nd.GroupNormLayerDist(2), nd.ActivationLayerDist(relu)],
                [],
            ]
        ),
        nd.MaxPoolingLayerDist(3, 2, 1),
        nd.DropoutLayerDist(0.3),
        nd.Sum(
            [
                [nd.ConvLayerDist(6, 3, padding=1, stride=2, bias=False), nd.BatchNormLayerDist()],
                [nd.ConvLayerDist(6, 1, 2)],
            ]
        ),
        nd.Concat([[], [nd.ConvLayerDist(3, 3, padding="same", bias=False), nd.InstanceNormLayerDist(affine=True)]]),
        nd.FCLayerDist(7, activation=nd.Tanh()),
        nd.FCLayerDist(4),
    ]
    return nd.ConvnetDist(layers, seed=2, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **options)


def train(model, grid, batch=4):
    """Return the results of three steps, and of passes before and after them."""
    model.build((23, 17, 2), batch, grid)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(batch, 23, 17, 2)), rng.normal(size=(batch, *model.output_shape))
    runs = [model.forward(model.scatter(x * factor)) for factor in (1, 2)]  # their strips alternate
    arrays = {f"dx {index}": model.gather_input(runs[index].backward(model.scatter_output(dy))) for index in (1, 0)}
    arrays |= {f"y {index}": model.gather(run.output) for index, run in enumerate(runs)}
    arrays["dx again"] = model.gather_input(runs[1].backward(model.scatter_output(dy)))
    arrays |= model.gradients()
    del runs
    losses = [model.train_batch(model.scatter(x), np.arange(batch) % 4) for _ in range(3)]
    arrays["evaluated"] = model.gather(model.fprop(model.scatter(x), training=False))
    return arrays | model.state() | {"losses": np.array(losses)}


@pytest.fixture(scope="module")
def expected():
    return train(make_residual_model(), nd.ProcessGrid.serial())


@pytest.mark.parametrize(
    ("ranks", "replicas", "options"),
    [
        (1, 1, {"strips": 1, "accumulate": 3}),
        (2, 1, {"strips": 100}),
        (3, 1, {"strips": 3, "recompute": True}),
        (4, 2, {"strips": 2, "recompute": True, "accumulate": 2}),
    ],
    ids=str,
)
@pytest.mark.long
def test_residual_network(expected, ranks, replicas, options):
    def job(comm):
        model = make_residual_model(memory=AMPLE_MEMORY, **options)
        actual = train(model, nd.ProcessGrid(comm, replicas=replicas))
        assert model.compiled.stream.num_nodes == 9  # the first fully connected layer ends the stream
        assert model.bytes_sent == 0
        return actual

    for actual in loopback.run(ranks, job):
        assert max_relative_difference(actual, expected) < 1e-10


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.long
def test_every_layer(every_layer_steps, ranks):
    """Layers that cannot run in strips, here a convolution with gathered gradients, end the stream."""

    def job(comm):
        model = build_every_layer("Dist", nd.ProcessGrid(comm), batch=8, strips=2, memory=AMPLE_MEMORY)
        assert model.compiled.stream.num_nodes == 10
        return run_steps(model)

    for actual in loopback.run(ranks, job):
        assert max_relative_difference(actual, every_layer_steps) < 1e-10


def make_chain_model(**options):
    relu = nd.ReLU()
    layers = [
        nd.ConvLayerDist(16, 3, padding=1, activation=relu),
        nd.ConvLayerDist(32, 3, stride=2, padding=1, activation=relu),
        nd.ConvLayerDist(64, 3, padding=1, activation=relu),
        nd.MaxPoolingLayerDist(2),
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(10),
    ]
    return nd.ConvnetDist(layers, **options)


@pytest.mark.parametrize(("extent", "limit", "ranks"), [(32768, "8GiB", 2), (8192, "4GB", 4)])
def test_strips_are_chosen_by_the_memory_limit(extent, limit, ranks):
    plan = make_chain_model(memory=limit).plan((extent, extent, 3), nd.GridShape(1, ranks))
    assert plan.stream.num_nodes == 5
    assert all(plan.memory(rank) + OVERHEAD_BYTES <= parse_bytes("memory", limit) / ranks for rank in range(ranks))
    strips = plan.stream.grid.strips
    assert f"streamed: conv1 to global_avg_pooling1 in {strips} strips per tile" in plan.describe()
    fewer = make_chain_model(memory=AMPLE_MEMORY, strips=2 * -(-plan.stream.rows // strips)).plan(
        (extent, extent, 3), plan.grid
    )
    assert fewer.stream.grid.strips < strips
    assert fewer.memory(0) > plan.memory(0)


def make_pooled_model(**options):
    """Return a network that needs only the positions and signs of maxima of its last convolution in backward."""
    relu = nd.ReLU()
    layers = [
        nd.ConvLayerDist(3, 3, padding=1, activation=relu),
        nd.ConvLayerDist(4, 3, stride=2, padding=1, bias=False),
        nd.BatchNormLayerDist(),
        nd.ActivationLayerDist(relu),
        nd.ConvLayerDist(5, 3, padding="same", activation=relu),
        nd.MaxPoolingLayerDist(2),
        nd.DropoutLayerDist(0.3),
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(4),
    ]
    return nd.ConvnetDist(layers, seed=2, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **options)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.long
def test_kept_arrays_reduce_recomputation(ranks):
    expected, shape, grid = train(make_pooled_model(), nd.ProcessGrid.serial()), (23, 17, 2), nd.GridShape(1, ranks)
    plans = {OVERHEAD_BYTES * ranks + (1 << 40): None}
    for recomputed, cut_fraction in ((1, 0.5), (0.5, 0), (0, 0)):
        plan = make_pooled_model(memory=AMPLE_MEMORY, strips=1).plan(shape, grid, 4)
        kept = [
            round((1 - recomputed) * plan.stream.saved_bytes(tile, 8))
            + round((1 - cut_fraction) * 8 * plan.stream.kept_gradient_elements(tile))
            for tile in range(ranks)
        ]
        peak = max(plan.memory(tile) - 4 * kept[tile] for tile in range(ranks))
        plans[(OVERHEAD_BYTES + peak) * ranks] = None
    for memory in plans:
        plan = make_pooled_model(memory=memory, strips=1).plan(shape, grid, 4)
        assert plan.stream.recomputed_steps == {0, 1, 2, 3, 7}  # not the last convolution, pooling and dropout

        def job(comm, memory=memory):
            return train(make_pooled_model(memory=memory, strips=1), nd.ProcessGrid(comm, rows=ranks, cols=1))

        for actual in loopback.run(ranks, job):
            assert max_relative_difference(actual, expected) < 1e-10
        strips = plan.stream.grid.strips
        plans[memory] = (
            plan.stream.checkpointed_strips / strips,
            len(plan.stream.strips_with_kept_gradients(0)) / strips,
        )
    assert [*plans.values()][::3] == [(1, 1), (0, 0)] or ranks > 3
    assert sorted(plans.values(), reverse=True) == [*plans.values()]
    assert any(0 < cut_fraction < 1 for _, cut_fraction in plans.values()) or ranks > 3


def make_unet_model(**options):
    relu = nd.ReLU()

    def make_conv(channels):
        return nd.ConvLayerDist(channels, 3, padding="same", activation=relu)

    up = nd.DeconvLayerDist(3, 2, stride=2)
    lower = [nd.MaxPoolingLayerDist(2), make_conv(4), nd.InstanceNormLayerDist(), up, nd.ActivationLayerDist(relu)]
    layers = [
        nd.PadLayerDist(((0, 1), (0, 1))),
        nd.Concat([[make_conv(3)], lower]),
        make_conv(3),
        nd.DeconvLayerDist(4, (5, 3), stride=(2, 1), padding=(2, 1), output_padding=(1, 0), activation=relu),
        nd.MaxPoolingLayerDist((3, 2)),
        nd.DeconvLayerDist(3, 3, dilation=2, padding=1, bias=False),
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(4),
    ]
    return nd.ConvnetDist(layers, seed=2, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **options)


def make_contrast_model(**options):
    """Return a network of contrast normalisation, and filters shared by blocks of cells."""
    layers = [
        nd.LCNLayerDist(5, min_deviation="mean"),
        nd.ConvLayerDist(4, 3, padding=1, activation=nd.ReLU()),
        nd.LCNLayerDist(3, min_deviation=0.5, padding_mode="reflect"),
        nd.MaxPoolingLayerDist(2),
        nd.LocalFilteringLayerDist(3, 3, padding=1, shared=(2, 3)),
        nd.LCNLayerDist((3, 5), min_deviation="mean", halo="wide", window="uniform"),
        nd.LCNLayerDist(3, min_deviation=0.2),  # does not need its input in backward, so it is not recomputed
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(4),
    ]
    return nd.ConvnetDist(layers, seed=2, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **options)


@pytest.mark.parametrize(
    ("network", "nodes", "ranks", "rows"),
    [(make_unet_model, 7, 4, 2), (make_contrast_model, 8, 1, 2), (make_contrast_model, 8, 3, 1)],
)
@pytest.mark.long
def test_streamed_networks(network, nodes, ranks, rows):
    expected = train(network(), nd.ProcessGrid.serial())

    def job(comm):
        model = network(memory=AMPLE_MEMORY, strips=rows)
        actual = train(model, nd.ProcessGrid(comm))
        assert model.compiled.stream.num_nodes == nodes
        assert model.bytes_sent == 0
        return actual

    for actual in loopback.run(ranks, job):
        assert max_relative_difference(actual, expected) < 1e-10


@pytest.mark.parametrize("rows", [1, 3, "auto"])
def test_weight_gradients_of_layers_with_reductions(rows):
    """A layer may compute them in `backward`, after the strips have computed its reduction."""

    def run(comm, **options):
        layers = [
            ScaledCenterLayerDist(),
            nd.ConvLayerDist(2, 3, padding=1, bias=False),
            ScaledCenterLayerDist(),
            nd.FCLayerDist(2),
        ]
        model = nd.ConvnetDist(layers, dtype="float64", **options)
        model.build((7, 5, 2), 2, nd.ProcessGrid(comm))
        model.fprop(model.scatter(np.random.default_rng(0).normal(size=(2, 7, 5, 2))))
        model.bprop(np.array([[1.0, -2.0], [0.5, 1.0]]))
        assert (model.compiled.stream is None) == (not options)
        return model.gradients()

    (expected,) = loopback.run(1, run)
    for actual in loopback.run(2, lambda comm: run(comm, memory=AMPLE_MEMORY, strips=rows)):
        assert max_relative_difference(actual, expected) < 1e-10


def test_images_that_fit_are_not_streamed():
    assert make_chain_model(memory="8GiB").plan((512, 512, 3), nd.GridShape(1, 2)).stream is None


@pytest.mark.parametrize("strips", [2, "auto"])
def test_strips_and_memory_for_a_network_that_cannot_be_streamed(strips):
    model = nd.Convnet([nd.ConvLayer(2, 3, padding=1, padding_mode="wrap")], memory=AMPLE_MEMORY, strips=strips)
    assert model.plan((6, 5, 2)).stream is None


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize(
    "layers",
    [
        [nd.ConvLayer(64, 3, padding=1), nd.ConvLayer(64, 3, padding=1, padding_mode="wrap"), nd.FCLayer(4)],
        [nd.ConvLayer(4, 3), nd.BatchNormLayer(), nd.ConvLayer(8, 3), nd.GlobalAvgPoolingLayer(), nd.FCLayer(1000)],
        [nd.FCLayer(512), nd.FCLayer(512)],
        [
            nd.ConvLayer(16, 3, padding=1),
            nd.ConvLayer(24, 5, padding=2),
            nd.MaxPoolingLayer(2),
            nd.ConvLayer(32, 3),
            nd.GlobalAvgPoolingLayer(),
        ],
    ],
    ids=["wrap", "streamable", "fc", "many_strips"],
)
def test_smallest_limit_named_by_the_message_suffices(layers, ranks):
    grid, limit, named, shape = nd.GridShape(1, ranks), "1MiB", [], (256 if len(layers) < 5 else 1024, 256, 3)
    for _ in range(3):
        try:
            plan = nd.Convnet(layers, memory=limit).plan(shape, grid)
            break
        except nd.ConfigError as error:
            named.append(str(error))
            reserved, sufficient = re.search(r"set memory to (\d+)MiB plus|give memory: (\d+)MiB", str(error)).groups()
            limit = f"{int(reserved) + 1}MiB" if reserved else f"{sufficient}MiB"
    assert plan.needed_bytes + OVERHEAD_BYTES <= parse_bytes("memory", limit) / ranks
    assert "too little for" in named[0]
    less = f"{int(limit.removesuffix('MiB')) - ranks}MiB"
    with pytest.raises(nd.ConfigError, match=r"give memory|set memory"):
        nd.Convnet(layers, memory=less).plan(shape, grid)


def test_insufficient_memory_is_rejected():
    convolutions = [nd.ConvLayer(64, 3, padding=1), nd.ConvLayer(64, 3, padding=1, padding_mode="wrap")]
    layers = [*convolutions, nd.GlobalAvgPoolingLayer(), nd.FCLayer(4)]
    with pytest.raises(nd.ConfigError, match=r"a rank may use .*, but needs at least .*; layer 'conv2' needs the most"):
        nd.Convnet(layers, memory="2GiB").plan((8192, 8192, 3))
    with pytest.raises(nd.ConfigError, match="layer 'fc1' needs the most"):
        nd.Convnet([nd.ConvLayer(4, 3), nd.FCLayer(10**9)], memory="8GiB").plan((12, 12, 3))
    for backend, reserved in (("numpy", 315), ("torch", 472)):
        message = f"too little for 4 ranks on a machine; of the limit, {reserved} MB per rank are reserved"
        with pytest.raises(nd.ConfigError, match=message):
            make_chain_model(memory="1GiB", backend=backend).plan((64, 64, 3), nd.GridShape(1, 4))
    for invalid in ("8 parsecs", "", "-3GB", "GiB", 0, "1e99999GB"):
        with pytest.raises(nd.ConfigError, match=r"memory: .* is not an amount of memory; expected one such as 8GiB"):
            make_chain_model(memory=invalid)
    filters = nd.GB([nd.LocalFilteringLayer(4, 3), nd.L2PoolingLayer(3), nd.LCNLayer(3), nd.FCLayer(4)])
    with pytest.raises(
        nd.ConfigError, match="memory: not supported by GB, which trains its stages one by one; leave out memory"
    ):
        filters.configure_execution(memory="8GiB")
    assert [parse_bytes("memory", text) for text in ("8GiB", "500 MB", "1.5k", 77)] == [8 << 30, 5 * 10**8, 1536, 77]


def test_freed_memory_is_returned_after_each_strip(monkeypatch):
    thresholds = []
    monkeypatch.setattr(nd.Kernels, "release_cached_memory", lambda kernels, threshold: thresholds.append(threshold))
    for limit in (None, "1GB"):
        assert not thresholds
        model = make_chain_model(memory=limit, strips=1, backend="numpy")
        model.build((33, 32, 3), 1)
        model.train_batch(np.ones((1, 33, 32, 3), np.float32), np.array([1]))
    assert len(thresholds) >= 2 * 8  # 8 strips, forward and backward
    assert process_overhead_bytes("numpy") / 2 < min(thresholds) <= max(thresholds) < parse_bytes("memory", "1GB")


def test_passes_cannot_end_in_a_stream():
    model = nd.Convnet([nd.ConvLayer(2, 3), nd.ConvLayer(2, 3)], memory=AMPLE_MEMORY, strips=2)
    model.build((9, 8, 1), 1)
    with pytest.raises(PassOrderError, match="leave out strips, and give enough memory for whole images"):
        nd.models.optimal_stimulus(model, 0, [(3, 3, 0)])


class ReadRecorder(HDF5Dataset):
    """HDF5 data set that records the largest array read."""

    largest = 0

    def open_splits(self, grid):
        splits = super().open_splits(grid)
        for split in filter(None, splits):
            self._watch(split)
        return splits

    def _watch(self, split):
        lazy_images, images = split.lazy_images, split.images

        def record_reads(*args):
            tile: LazyTile = lazy_images(*args)
            read = tile.read

            def read_part(cells):
                part = read(cells)
                self.largest = max(self.largest, part[0].size)
                return part

            tile.read = read_part
            tile.samples = lambda numbers: tile
            return tile

        def reject(*args):
            raise AssertionError("a whole tile was read")

        split.lazy_images, split.images = record_reads, reject if self.strict else images

    strict = True


@pytest.mark.parametrize("ranks", [1, 3])
def test_images_are_read_in_strips(tmp_path, ranks):
    file = tmp_path / "images.h5"
    write_hdf5(file, shape=(40, 10, 2), counts=(3, 2))

    def train(comm, **options):
        data = ReadRecorder(file)
        data.strict = bool(options)
        layers = [nd.ConvLayerDist(3, 3, padding=1), nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(4)]
        model = nd.ConvnetDist(layers, dtype="float64", seed=1, **options)
        fit = nd.FitExperiment(data, model, batch_size=1, epochs=2)
        return fit.run(nd.ProcessGrid(comm), hooks=[]).history, data.largest

    for (streamed, largest), (expected, _) in loopback.run(
        ranks, lambda comm: (train(comm, memory=AMPLE_MEMORY, strips=4), train(comm))
    ):
        for streamed_record, expected_record in zip(streamed, expected, strict=True):
            assert streamed_record["train_loss"] == pytest.approx(expected_record["train_loss"], rel=1e-12)
            assert streamed_record["test_loss"] == pytest.approx(expected_record["test_loss"], rel=1e-12)
        assert 0 < largest <= (4 + 2) * 10 * 2


class NotesRecorder(Hook):
    def before_run(self, run):
        self.notes = run.start_messages


@pytest.mark.long
def test_large_images_are_streamed_automatically(tmp_path, monkeypatch):
    file = tmp_path / "images.h5"
    write_hdf5(file, shape=(60, 50, 2), counts=(3, 2))

    def train(comm):
        fit = nd.FitExperiment(HDF5Dataset(file), make_pooled_model(), batch_size=2, epochs=1)
        grid = nd.ProcessGrid(comm)
        plan = fit.model.plan((60, 50, 2), grid.shape, 2)
        return (
            fit.run(grid, hooks=[recorder := NotesRecorder()]).history,
            plan.needed_bytes,
            fit.model.is_streamed,
            recorder.notes,
        )

    for ranks in (1, 2):
        (expected, needed, streams, notes), *_ = loopback.run(ranks, train)
        assert (streams, notes) == (False, [])
        with monkeypatch.context() as patch:
            patch.setattr("neondist.models.model.process_overhead_bytes", lambda _, needed=needed: needed // 3)
            patch.setattr("neondist.system.memory.free_bytes", lambda available=ranks * (needed - 1): available)
            for history, _, streams, notes in loopback.run(ranks, train):
                assert streams
                assert "a step does not fit into the available memory; streamed: conv1 to " in notes[0]
                assert history[0]["train_loss"] == pytest.approx(expected[0]["train_loss"], rel=1e-12)
            patch.setattr("neondist.models.model.process_overhead_bytes", lambda _, needed=needed: needed - 2)
            with pytest.raises(nd.ConfigError, match=r"memory: a rank may use 1 B, but needs at least .*; layer '"):
                loopback.run(ranks, train)


def test_random_numbers_of_strips_match_the_image():
    """The image of a strip may extend beyond the rows that its first layer reads."""

    def run_model(**options):
        layers = [nd.DropoutLayerDist(0.5), nd.UpsampleLayerDist(2), nd.ConvLayerDist(2, 2, 3)]
        model = nd.ConvnetDist(layers, seed=1, dtype="float64", **options)
        model.build((4, 3, 1), 2)
        return {"y": model.fprop(np.ones((2, 4, 3, 1))), "dx": model.bprop(np.ones((2, *model.output_shape)))}

    for strips in (1, 2, 3):
        assert max_relative_difference(run_model(strips=strips, memory=AMPLE_MEMORY), run_model()) < 1e-12
