"""Images that do not fit into memory go through the first layers strip by strip, and give the numbers of whole ones."""

import numpy as np
import pytest
from hdf5_toys import small_hdf5
from support import worst
from test_accumulate import steps
from test_interleaving import built as every_layer

import neondist as nd
from neondist.comm import loopback
from neondist.data import HDF5Dataset
from neondist.errors import PassError
from neondist.system.lazy import LazyTile
from neondist.system.memory import PROCESS, as_bytes
from neondist.train import Hook

ENOUGH = "1TiB"
"""With `strips`, whatever can goes in strips, although all would fit."""


def residual(**more):
    """Convolutions, norms that reduce, dropout, residual blocks, and a map summed by both FC and pooling."""
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
    return nd.ConvnetDist(layers, seed=2, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **more)


def trained(model, grid, batch=4):
    """What three steps, and passes before and after, give."""
    model.build((23, 17, 2), batch, grid)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(batch, 23, 17, 2)), rng.normal(size=(batch, *model.output_shape))
    runs = [model.forward(model.scatter(x * factor)) for factor in (1, 2)]  # their strips take turns
    found = {f"dx {at}": model.gather_input(runs[at].backward(model.scatter_output(dy))) for at in (1, 0)}
    found |= {f"y {at}": model.gather(run.output) for at, run in enumerate(runs)}
    found["dx again"] = model.gather_input(runs[1].backward(model.scatter_output(dy)))
    found |= model.gradients()
    del runs
    losses = [model.train_batch(model.scatter(x), np.arange(batch) % 4) for _ in range(3)]
    found["evaluated"] = model.gather(model.fprop(model.scatter(x), training=False))
    return found | model.state() | {"losses": np.array(losses)}


@pytest.fixture(scope="module")
def whole():
    return trained(residual(), nd.ProcessGrid.serial())


@pytest.mark.parametrize(
    ("ranks", "replicas", "more"),
    [
        (1, 1, {"strips": 1, "accumulate": 3}),
        (2, 1, {"strips": 100}),
        (3, 1, {"strips": 3, "recompute": True}),
        (4, 2, {"strips": 2, "recompute": True, "accumulate": 2}),
    ],
    ids=str,
)
@pytest.mark.long
def test_a_residual_network(whole, ranks, replicas, more):
    def job(comm):
        model = residual(memory=ENOUGH, **more)
        found = trained(model, nd.ProcessGrid(comm, replicas=replicas))
        assert model.compiled.stream.nodes == 9  # the first fully connected layer ends it
        assert model.bytes_sent == 0
        return found

    for found in loopback.run(ranks, job):
        assert worst(found, whole) < 1e-10


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.long
def test_every_layer(ranks):
    """What cannot go in strips, here a convolution whose gradients are gathered, ends the stream."""
    expected = steps(every_layer(batch=8))

    def job(comm):
        model = every_layer("Dist", nd.ProcessGrid(comm), batch=8, strips=2, memory=ENOUGH)
        assert model.compiled.stream.nodes == 10
        return steps(model)

    for found in loopback.run(ranks, job):
        assert worst(found, expected) < 1e-10


def plain(**more):
    relu = nd.ReLU()
    layers = [
        nd.ConvLayerDist(16, 3, padding=1, activation=relu),
        nd.ConvLayerDist(32, 3, stride=2, padding=1, activation=relu),
        nd.ConvLayerDist(64, 3, padding=1, activation=relu),
        nd.MaxPoolingLayerDist(2),
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(10),
    ]
    return nd.ConvnetDist(layers, **more)


@pytest.mark.parametrize(("extent", "limit", "ranks"), [(32768, "8GiB", 2), (8192, "4GB", 4)])
def test_what_does_not_fit_goes_in_as_many_strips_as_it_takes(extent, limit, ranks):
    plan = plain(memory=limit).plan((extent, extent, 3), nd.GridShape(1, ranks))
    assert plan.stream.nodes == 5
    assert all(plan.memory(rank) + PROCESS <= as_bytes("memory", limit) / ranks for rank in range(ranks))
    strips = plan.stream.grid.strips
    assert f"streamed: conv1 to global_avg_pooling1 in {strips} strips of each tile" in plan.describe()
    fewer = plain(memory=ENOUGH, strips=2 * -(-plan.stream.rows // strips)).plan((extent, extent, 3), plan.grid)
    assert fewer.stream.grid.strips < strips
    assert fewer.memory(0) > plan.memory(0)


def pooled(**more):
    """Of the last convolution, places and signs of maxima are all that the way back needs."""
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
    return nd.ConvnetDist(layers, seed=2, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **more)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.long
def test_what_is_kept_spares_work(ranks):
    whole, shape, grid = trained(pooled(), nd.ProcessGrid.serial()), (23, 17, 2), nd.GridShape(1, ranks)
    plans = {PROCESS * ranks + (1 << 40): None}
    for spared, cut in ((1, 0.5), (0.5, 0), (0, 0)):
        plan = pooled(memory=ENOUGH, strips=1).plan(shape, grid, 4)
        kept = [
            round((1 - spared) * plan.stream.saved(tile, 8)) + round((1 - cut) * 8 * plan.stream.kept(tile))
            for tile in range(ranks)
        ]
        most = max(plan.memory(tile) - 4 * kept[tile] for tile in range(ranks))
        plans[(PROCESS + most) * ranks] = None
    for memory in plans:
        plan = pooled(memory=memory, strips=1).plan(shape, grid, 4)
        assert plan.stream.recomputed == {0, 1, 2, 3, 7}  # not the last convolution, pooling and dropout

        def job(comm, memory=memory):
            return trained(pooled(memory=memory, strips=1), nd.ProcessGrid(comm, rows=ranks, cols=1))

        for found in loopback.run(ranks, job):
            assert worst(found, whole) < 1e-10
        strips = plan.stream.grid.strips
        plans[memory] = plan.stream.checkpointed_strips / strips, len(plan.stream.cut_strips(0)) / strips
    assert [*plans.values()][::3] == [(1, 1), (0, 0)] or ranks > 3
    assert sorted(plans.values(), reverse=True) == [*plans.values()]
    assert any(0 < cut < 1 for _, cut in plans.values()) or ranks > 3


def unet(**more):
    relu = nd.ReLU()

    def conv(channels):
        return nd.ConvLayerDist(channels, 3, padding="same", activation=relu)

    up = nd.DeconvLayerDist(3, 2, stride=2)
    below = [nd.MaxPoolingLayerDist(2), conv(4), nd.InstanceNormLayerDist(), up, nd.ActivationLayerDist(relu)]
    layers = [
        nd.PadLayerDist(((0, 1), (0, 1))),
        nd.Concat([[conv(3)], below]),
        conv(3),
        nd.DeconvLayerDist(4, (5, 3), stride=(2, 1), padding=(2, 1), output_padding=(1, 0), activation=relu),
        nd.MaxPoolingLayerDist((3, 2)),
        nd.DeconvLayerDist(3, 3, dilation=2, padding=1, bias=False),
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(4),
    ]
    return nd.ConvnetDist(layers, seed=2, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **more)


def contrast(**more):
    """Contrast normalisation, twice by the mean deviation, and filters that blocks of cells share."""
    layers = [
        nd.LCNLayerDist(5, min_deviation="mean"),
        nd.ConvLayerDist(4, 3, padding=1, activation=nd.ReLU()),
        nd.LCNLayerDist(3, min_deviation=0.5, padding_mode="reflect"),
        nd.MaxPoolingLayerDist(2),
        nd.LocalFilteringLayerDist(3, 3, padding=1, shared=(2, 3)),
        nd.LCNLayerDist((3, 5), min_deviation="mean", halo="wide", window="uniform"),
        nd.LCNLayerDist(3, min_deviation=0.2),  # does not look at its input again, which so is not taken again
        nd.GlobalAvgPoolingLayerDist(),
        nd.FCLayerDist(4),
    ]
    return nd.ConvnetDist(layers, seed=2, dtype="float64", optimizer=nd.SGD(learning_rate=0.1, momentum=0.9), **more)


@pytest.mark.parametrize(
    ("network", "nodes", "ranks", "rows"), [(unet, 7, 4, 2), (contrast, 8, 1, 2), (contrast, 8, 3, 1)]
)
@pytest.mark.long
def test_a_network(network, nodes, ranks, rows):
    whole = trained(network(), nd.ProcessGrid.serial())

    def job(comm):
        model = network(memory=ENOUGH, strips=rows)
        found = trained(model, nd.ProcessGrid(comm))
        assert model.compiled.stream.nodes == nodes
        assert model.bytes_sent == 0
        return found

    for found in loopback.run(ranks, job):
        assert worst(found, whole) < 1e-10


def test_what_fits_is_not_streamed():
    assert plain(memory="8GiB").plan((512, 512, 3), nd.GridShape(1, 2)).stream is None


def test_memory_that_is_not_enough():
    layers = [nd.ConvLayer(64, 3, padding=1), nd.ConvLayer(64, 3, padding=1, padding_mode="wrap"), nd.FCLayer(4)]
    with pytest.raises(nd.ConfigError, match=r"memory: a rank may use .*, but needs at least .*, .* layer 'conv2'"):
        nd.Convnet(layers, memory="2GiB").plan((8192, 8192, 3))
    with pytest.raises(nd.ConfigError, match="4 ranks on a machine; each needs 629 MB before it loads"):
        plain(memory="1GiB").plan((64, 64, 3), nd.GridShape(1, 4))
    for wrong in ("8 parsecs", "", "-3GB", "GiB", 0, "1e99999GB"):
        with pytest.raises(nd.ConfigError, match=r"memory: .* is not an amount of memory; expected one such as 8GiB"):
            plain(memory=wrong)
    filters = nd.GB([nd.LocalFilteringLayer(4, 3), nd.L2PoolingLayer(3), nd.LCNLayer(3), nd.FCLayer(4)])
    with pytest.raises(nd.ConfigError, match="memory: GB trains its stages one by one; leave out memory"):
        filters.execute(memory="8GiB")
    assert [as_bytes("memory", text) for text in ("8GiB", "500 MB", "1.5k", 77)] == [8 << 30, 5 * 10**8, 1536, 77]


def test_what_is_freed_is_given_back_after_each_strip_where_memory_is_limited(monkeypatch):
    asked = []
    monkeypatch.setattr(nd.Kernels, "give_back_freed", lambda kernels, above: asked.append(above))
    for limit in (None, "1GB"):
        assert not asked
        model = plain(memory=limit, strips=1, backend="numpy")
        model.build((33, 32, 3), 1)
        model.train_batch(np.ones((1, 33, 32, 3), np.float32), np.array([1]))
    assert len(asked) >= 2 * 8  # 8 strips, forward and back
    assert PROCESS / 2 < min(asked) <= max(asked) < as_bytes("memory", "1GB")


def test_a_pass_cannot_end_in_a_stream():
    model = nd.Convnet([nd.ConvLayer(2, 3), nd.ConvLayer(2, 3)], memory=ENOUGH, strips=2)
    model.build((9, 8, 1), 1)
    with pytest.raises(PassError, match="leave out strips, and give enough memory for whole images"):
        nd.models.optimal_stimulus(model, 0, [(3, 3, 0)])


class Watched(HDF5Dataset):
    """Notes the largest array that is read."""

    largest = 0

    def load(self, grid):
        splits = super().load(grid)
        for split in filter(None, splits):
            self._watch(split)
        return splits

    def _watch(self, split):
        lazily, images = split.lazily, split.images

        def noted(*args):
            found: LazyTile = lazily(*args)
            read = found.read

            def part(cells):
                cut = read(cells)
                self.largest = max(self.largest, cut[0].size)
                return cut

            found.read = part
            found.samples = lambda numbers: found
            return found

        def refused(*args):
            raise AssertionError("a whole tile was read")

        split.lazily, split.images = noted, refused if self.strict else images

    strict = True


@pytest.mark.parametrize("ranks", [1, 3])
def test_images_are_read_strip_by_strip(tmp_path, ranks):
    file = tmp_path / "images.h5"
    small_hdf5(file, shape=(40, 10, 2), counts=(3, 2))

    def train(comm, **more):
        data = Watched(file)
        data.strict = bool(more)
        layers = [nd.ConvLayerDist(3, 3, padding=1), nd.GlobalAvgPoolingLayerDist(), nd.FCLayerDist(4)]
        model = nd.ConvnetDist(layers, dtype="float64", seed=1, **more)
        fit = nd.FitExperiment(data, model, batch_size=1, epochs=2)
        return fit.run(nd.ProcessGrid(comm), hooks=[]).history, data.largest

    for (streamed, largest), (expected, _) in loopback.run(
        ranks, lambda comm: (train(comm, memory=ENOUGH, strips=4), train(comm))
    ):
        for one, other in zip(streamed, expected, strict=True):
            assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-12)
            assert one["test_loss"] == pytest.approx(other["test_loss"], rel=1e-12)
        assert 0 < largest <= (4 + 2) * 10 * 2


class Told(Hook):
    def before_run(self, run):
        self.notes = run.notes


@pytest.mark.long
def test_what_does_not_fit_is_streamed_without_being_asked(tmp_path, monkeypatch):
    file = tmp_path / "images.h5"
    small_hdf5(file, shape=(60, 50, 2), counts=(3, 2))

    def train(comm):
        fit = nd.FitExperiment(HDF5Dataset(file), pooled(), batch_size=2, epochs=1)
        grid = nd.ProcessGrid(comm)
        plan = fit.model.plan((60, 50, 2), grid.shape, 2)
        return fit.run(grid, hooks=[told := Told()]).history, plan.needed, fit.model.streams, told.notes

    for ranks in (1, 2):
        (whole, needed, streams, notes), *_ = loopback.run(ranks, train)
        assert (streams, notes) == (False, [])
        with monkeypatch.context() as patch:
            patch.setattr("neondist.models.model.PROCESS", needed // 3)
            patch.setattr("neondist.system.memory.free_memory", lambda room=ranks * (needed - 1): room)
            for found, _, streams, notes in loopback.run(ranks, train):
                assert streams
                assert "a step does not fit into the available memory; streamed: conv1 to " in notes[0]
                assert found[0]["train_loss"] == pytest.approx(whole[0]["train_loss"], rel=1e-12)
            patch.setattr("neondist.models.model.PROCESS", needed - 2)
            with pytest.raises(nd.ConfigError, match=r"memory: a rank may use 1 B, but needs at least .*, .* layer '"):
                loopback.run(ranks, train)


def test_random_numbers_are_those_of_the_rows_that_a_strip_sees():
    """The image of a strip may reach further than its first layer looks."""

    def found(**more):
        layers = [nd.DropoutLayerDist(0.5), nd.UpsampleLayerDist(2), nd.ConvLayerDist(2, 2, 3)]
        model = nd.ConvnetDist(layers, seed=1, dtype="float64", **more)
        model.build((4, 3, 1), 2)
        return {"y": model.fprop(np.ones((2, 4, 3, 1))), "dx": model.bprop(np.ones((2, *model.output_shape)))}

    for strips in (1, 2, 3):
        assert worst(found(strips=strips, memory=ENOUGH), found()) < 1e-12
