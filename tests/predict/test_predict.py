"""Outputs for images of any size: on any number of ranks, in any blocks, ended at any moment and gone on with."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import neondist as nd
from neondist.comm import ProcessGrid, loopback
from neondist.errors import ConfigError, DataError, OutputError
from neondist.io.journal import Journal
from neondist.runtime.blocks import Blockwise
from neondist.train import evaluate_files, predict
from neondist.train.inference.images import Images
from neondist.train.inference.predict import Writer

SHAPE = (12, 8, 2)


def unet(norm=nd.BatchNormLayerDist):
    """Down by pooling, up by a deconvolution, beside a skip."""

    def conv(channels):
        return [nd.ConvLayerDist(channels, 3, padding=1), norm(), nd.ActivationLayerDist(nd.ReLU())]

    inner = [nd.MaxPoolingLayerDist(2), *conv(4), nd.DeconvLayerDist(3, 4, 2, 1)]
    return [*conv(3), nd.Concat([inner, []]), nd.ConvLayerDist(3, 3, padding=1)]


class Cells(nd.Synthetic):
    """Every cell is labelled; raw values are 2 x + 1 of what is trained on."""

    def load(self, grid):
        tile = grid.tile_box(self.sample_shape[:-1]).shape
        return tuple(
            nd.Split(
                2 * split.images(range(len(split)), "float64") + 1,
                np.broadcast_to(split.labels[:, None, None], (len(split), *tile)),
                mean=0.5,
                std=1,
                scale=2,
            )
            for split in super().load(grid)
        )


def made(layers=unet, **more):
    return nd.FitExperiment(
        dataset=Cells(SHAPE, classes=3, train=4, test=2),
        model=nd.ConvnetDist(layers(), dtype="float64", backend="numpy", seed=3, **more),
        batch_size=4,
        epochs=1,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained network, larger images, and what it says of them by a plain pass."""
    folder = tmp_path_factory.mktemp("trained")
    trained = made()
    trained.run(ProcessGrid.serial(), output=folder / "run", hooks=[])
    (folder / "run" / "checkpoint.h5").rename(folder / "net.h5")
    x = np.random.default_rng(0).normal(size=(3, 40, 52, 2))
    np.save(folder / "x.npy", x)
    trained.model.build(x.shape[1:], 3, ProcessGrid.serial(), None)
    state = {}

    import h5py

    with h5py.File(folder / "net.h5") as file:
        file["model"].visititems(
            lambda name, item: state.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
    trained.model.load_state(state)
    np.save(folder / "y.npy", trained.model.fprop(x / 2 - 0.5, training=False))
    return folder


def on(ranks, folder, target, source="x.npy", fresh=made, **how):
    def body(world):
        return predict(fresh(), folder / "net.h5", folder / source, target, ProcessGrid(world), **how)

    (shape,) = set(loopback.run(ranks, body))
    return shape


@pytest.mark.parametrize(("ranks", "block"), [(1, None), (2, 8), (3, 1000), (6, 30)])
@pytest.mark.long
def test_any_blocks_on_any_ranks(folder, tmp_path, ranks, block):
    expected = np.load(folder / "y.npy")
    assert on(ranks, folder, tmp_path / "y.npy", block=block) == expected.shape
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-12, atol=1e-12)
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.long
def test_chunks_that_blocks_share_are_decoded_once(folder, tmp_path, monkeypatch, ranks):
    """Blocks of 40 cells, of which each sees 4 further, lie across tiles of 32."""
    tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")
    array = np.random.default_rng(1).integers(0, 200, (480, 360, 2), "uint8")
    tifffile.imwrite(tmp_path / "x.tif", array, tile=(32, 32), compression="zlib", planarconfig="contig")
    decoded, close = [], Images.close
    monkeypatch.setattr(Images, "close", lambda self: (decoded.append(self.source.bytes_read), close(self)))
    on(ranks, folder, tmp_path / "y.npy", tmp_path / "x.tif", block=40)
    assert len(decoded) == ranks
    assert max(decoded) <= 1.2 * array.nbytes / ranks
    np.save(tmp_path / "x.npy", array)
    on(1, folder, tmp_path / "z.npy", tmp_path / "x.npy", block=40)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.load(tmp_path / "z.npy"))


def test_several_outputs(folder, tmp_path):
    expected = np.load(folder / "y.npy")
    on(2, folder, tmp_path / "out.h5", block=16, classes=True, probabilities=True)
    p = np.exp(expected) / np.exp(expected).sum(axis=-1, keepdims=True)
    with nd.open_source(tmp_path / "out-probabilities.h5") as found:
        np.testing.assert_allclose(found.read([(0, n) for n in found.shape]), p, rtol=1e-12)
    with nd.open_source(tmp_path / "out-classes.h5") as found:
        assert (found.dtype, found.axes) == (np.uint8, "NYXC")
        np.testing.assert_array_equal(found.read([(0, n) for n in found.shape])[..., 0], expected.argmax(axis=-1))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_map_of_classes_in_a_png_is_one_of_labels(folder, tmp_path):
    """Three classes as three channels of colours would be targets, too."""
    np.save(tmp_path / "one.npy", np.load(folder / "x.npy")[1])
    on(1, folder, tmp_path / "y.png", tmp_path / "one.npy", classes=True)
    with nd.open_source(tmp_path / "y.png") as seen:
        assert seen.shape == (40, 52, 3)
    files = tmp_path / "one.npy", tmp_path / "y.png"
    assert evaluate_files(made(), folder / "net.h5", *files, ProcessGrid.serial())["error"] == 0


def test_one_image_and_stacks_of_them(folder, tmp_path):
    import h5py

    x, expected = np.load(folder / "x.npy"), np.load(folder / "y.npy")
    np.save(tmp_path / "one.npy", x[1])
    assert on(2, folder, tmp_path / "y1.npy", tmp_path / "one.npy", block=16) == expected.shape[1:]
    np.testing.assert_allclose(np.load(tmp_path / "y1.npy"), expected[1], rtol=1e-12, atol=1e-12)
    with h5py.File(tmp_path / "film.h5", "w") as file:
        file["images"] = np.moveaxis(np.stack([x, x[::-1]]), -1, 2)
        file["images"].attrs["axes"] = np.bytes_("TZCYX")
    for block in (None, 32):
        target = tmp_path / f"film-{block}.npy"
        on(2, folder, target, tmp_path / "film.h5", block=block)
        np.testing.assert_allclose(np.load(target), np.stack([expected, expected[::-1]]), rtol=1e-12, atol=1e-12)


def test_what_normalises_over_the_image_goes_whole(folder, tmp_path):
    def fresh():
        return made(lambda: unet(lambda: nd.GroupNormLayerDist(1)))

    fresh().run(ProcessGrid.serial(), output=tmp_path / "run", hooks=[])
    (tmp_path / "run" / "checkpoint.h5").rename(tmp_path / "net.h5")
    shutil.copy(folder / "x.npy", tmp_path / "x.npy")
    for ranks in (1, 4):
        on(ranks, tmp_path, tmp_path / f"y{ranks}.npy", fresh=fresh)
    np.testing.assert_allclose(np.load(tmp_path / "y4.npy"), np.load(tmp_path / "y1.npy"), rtol=1e-9, atol=1e-12)
    with pytest.raises(
        ConfigError,
        match=r"'group_norm1' cannot be computed block by block \(sums over the whole"
        r" image\)",
    ):
        on(1, tmp_path, tmp_path / "z.npy", fresh=fresh, block=8)


@pytest.mark.long
def test_blocks_where_the_whole_does_not_fit(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("neondist.system.memory.PROCESS", 0)
    monkeypatch.setattr("neondist.train.inference.routes.PROCESS", 0)
    sizes = []
    run = Blockwise.run
    monkeypatch.setattr(Blockwise, "run", lambda self, number, x: (sizes.append(x.shape), run(self, number, x))[1])
    on(1, folder, tmp_path / "y.npy", fresh=lambda: made(memory="200kB"))
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.load(folder / "y.npy"), rtol=1e-12, atol=1e-12)
    assert len(sizes) > 3
    with pytest.raises(ConfigError, match=r"memory: even a block of 2 x 2 takes .* layer '\w+'"):
        on(1, folder, tmp_path / "z.npy", fresh=lambda: made(memory="5kB"))


class Killed(Exception):
    pass


@pytest.mark.parametrize(("block", "parts"), [(24, 18), (None, 3)])
@pytest.mark.long
def test_ended_at_every_part(folder, tmp_path, monkeypatch, block, parts):
    """Each process does one part more; the second one says nothing of blocks, and takes those that are there."""
    add, run = Journal.add, Blockwise.run
    computed = []

    def once(self, number):
        add(self, number)
        raise Killed

    monkeypatch.setattr(Journal, "add", once)
    monkeypatch.setattr(Blockwise, "run", lambda self, number, x: (computed.append(number), run(self, number, x))[1])

    def fresh():
        found = made()
        found.batch_size = 1
        return found

    for part in range(parts):
        with pytest.raises(Killed):
            on(1, folder, tmp_path / "y.npy", fresh=fresh, block=None if part else block)
        assert not (tmp_path / "y.npy").exists()
    on(1, folder, tmp_path / "y.npy", fresh=fresh)
    assert len(computed) <= 2 * parts  # the next one may have been computed already
    monkeypatch.undo()
    on(1, folder, tmp_path / "z.npy", fresh=fresh, block=block)
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "z.npy").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from neondist.io.journal import Journal
from test_predict import made, on
from pathlib import Path
add, left = Journal.add, [5]
def last(self, number):
    add(self, number)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.add = last
on(2, Path({folder!r}), Path({target!r}), block=16, classes=True, raw=True)
"""


@pytest.mark.long
def test_killed_and_gone_on_with_on_other_ranks(folder, tmp_path):
    paths = [str(Path(__file__).parent), *sys.path]
    code = KILLED.format(paths=paths, folder=str(folder), target=str(tmp_path / "y.npy"))
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("*.npy"))
    journal = tmp_path / "y.npy.partial.journal"
    assert journal.with_name(journal.name + ".lock").exists()
    with journal.open("a") as file:
        file.write("7 00000000\n3")  # what a disk may have left of lines
    how = {"classes": True, "raw": True}
    on(3, folder, tmp_path / "y.npy", **how)
    on(1, folder, tmp_path / "z.npy", block=16, **how)
    for kind in ("raw", "classes"):
        assert (tmp_path / f"y-{kind}.npy").read_bytes() == (tmp_path / f"z-{kind}.npy").read_bytes()
    assert len(list(tmp_path.iterdir())) == 4


def begun(folder, tmp_path, monkeypatch):
    """Leave a job behind that has done a part."""
    add = Journal.add

    def once(self, number):
        add(self, number)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", once)
        with pytest.raises(Killed):
            on(1, folder, tmp_path / "y.npy", tmp_path / "x.npy", block=16)


@pytest.mark.long
def test_another_job_is_told(folder, tmp_path, monkeypatch):
    shutil.copy(folder / "x.npy", tmp_path / "x.npy")
    begun(folder, tmp_path, monkeypatch)
    np.save(tmp_path / "x.npy", np.load(tmp_path / "x.npy") + 1)
    with pytest.raises(OutputError, match=r"partial\.journal: belongs to a job with another input; .*--overwrite"):
        on(1, folder, tmp_path / "y.npy", tmp_path / "x.npy")
    with pytest.raises(OutputError, match=r"another outputs and another route and another input"):
        on(2, folder, tmp_path / "y.npy", tmp_path / "x.npy", block=8, classes=True)
    on(2, folder, tmp_path / "y.npy", tmp_path / "x.npy", overwrite=True)
    on(1, folder, tmp_path / "z.npy", tmp_path / "x.npy", block=16)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.load(tmp_path / "z.npy"))
    with pytest.raises(OutputError, match=r"y\.npy: exists already"):
        on(2, folder, tmp_path / "y.npy", tmp_path / "x.npy")
    on(2, folder, tmp_path / "y.npy", overwrite=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.load(folder / "y.npy"), rtol=1e-12, atol=1e-12)


def test_one_job_at_a_time(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("neondist.io.lock.PATIENCE", 0)
    write, refused = Writer.write, []

    def meanwhile(self, part, y):
        if not refused:
            with pytest.raises(OutputError) as said:
                on(2, folder, tmp_path / "y.npy", block=16, overwrite=True)
            refused.append(str(said.value))
        write(self, part, y)

    monkeypatch.setattr(Writer, "write", meanwhile)
    on(1, folder, tmp_path / "y.npy")
    assert f"y.npy: in use by another run (process {os.getpid()} on" in refused[0]
    assert "choose another file with --output" in refused[0]
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


@pytest.mark.long
def test_ended_between_the_names_of_two_files(folder, tmp_path, monkeypatch):
    from neondist.formats.npy import NPYSink

    commit, how = NPYSink.commit, {"block": 16, "classes": True, "raw": True}

    def first_alone(self):
        if self.path.name.endswith("classes.npy"):
            raise Killed
        commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(NPYSink, "commit", first_alone)
        with pytest.raises(Killed):
            on(1, folder, tmp_path / "y.npy", **how)
    assert [path.name for path in tmp_path.glob("*.npy")] == ["y-raw.npy"]
    on(2, folder, tmp_path / "y.npy", **how)
    np.testing.assert_array_equal(np.load(tmp_path / "y-classes.npy"), np.load(folder / "y.npy").argmax(axis=-1))
    assert len(list(tmp_path.iterdir())) == 2


def test_bad_input(folder, tmp_path, monkeypatch):
    np.save(tmp_path / "three.npy", np.zeros((8, 8, 3)))
    np.save(tmp_path / "odd.npy", np.zeros((9, 11, 2)))
    np.save(tmp_path / "vectors.npy", np.zeros((8, 2)))
    np.save(tmp_path / "nan.npy", np.full((8, 8, 2), np.nan))
    for name, error, message in (
        ("three.npy", DataError, r"three\.npy: holds an array of shape \[8, 8, 3\]; the model takes \(N, H, W, 2\)"),
        ("vectors.npy", DataError, r"vectors\.npy: holds an array of shape \[8, 2\]"),
        (
            "odd.npy",
            DataError,
            r"odd\.npy: 9 x 11 .* valid input size .*, but 8 x 10 are: .*of 2 \(layer 3 'conc",
        ),
        ("none.npy", DataError, "no such file"),
    ):
        with pytest.raises(error, match=message):
            on(2, folder, tmp_path / "y.npy", tmp_path / name, block=4)
    with pytest.raises(DataError, match=r"nan\.npy: has missing values \(NaN\); replace"):
        on(2, folder, tmp_path / "out.npy", tmp_path / "nan.npy", block=4)
    with pytest.raises(ConfigError, match=r"y\.jpg: JPEG is lossy"):
        on(2, folder, tmp_path / "y.jpg", classes=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(OutputError, match=r"y\.npy: needs .*, but only 100 B are free"):
        on(2, folder, tmp_path / "y.npy", block=16)
    assert not list(tmp_path.glob("y*"))


def test_what_is_missing_is_filled_as_in_training(tmp_path):
    cells = np.random.default_rng(0).normal(size=(2, 24, 20))
    cells[:, 3:9] = np.nan
    (tmp_path / "m").mkdir()
    for name, array in (("a", cells[0]), ("b", cells[1]), ("c", np.nan_to_num(cells[0], nan=1.5))):
        np.save(tmp_path / f"{name}.npy", array)
        np.save(tmp_path / "m" / f"{name}.npy", np.zeros((24, 20), "u1"))
    data = nd.ImageFiles(
        f"{tmp_path}/[ab].npy", f"{tmp_path}/m/[ab].npy", crop=[16, 16], validation=1, classes=2, fill=1.5
    )
    made = nd.FitExperiment(data, nd.ConvnetDist([nd.ConvLayerDist(2, 3, padding=1)]), batch_size=1, epochs=1)
    made.run(ProcessGrid.serial(), output=tmp_path / "run", hooks=[])
    for name in "ac":
        paths = tmp_path / "run" / "checkpoint.h5", tmp_path / f"{name}.npy", tmp_path / f"y{name}.npy"
        predict(made, *paths, ProcessGrid.serial(), block=8)
    np.testing.assert_array_equal(np.load(tmp_path / "ya.npy"), np.load(tmp_path / "yc.npy"))


def measured(folder, labels, ranks, block, fresh=made):
    def body(world):
        paths = folder / "net.h5", folder / "x.npy", labels
        return evaluate_files(fresh(), *paths, ProcessGrid(world), block)

    found = loopback.run(ranks, body)
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.long
def test_cost_and_metrics_over_files(folder, tmp_path):
    y = np.load(folder / "y.npy")
    labels = np.random.default_rng(5).integers(0, 3, y.shape[:-1]).astype(np.uint8)
    np.save(tmp_path / "labels.npy", labels)
    p = np.exp(y) / np.exp(y).sum(axis=-1, keepdims=True)
    loss = -np.log(np.take_along_axis(p, labels[..., None].astype(int), -1)).mean()
    for ranks, block in ((1, None), (4, None), (1, 16), (3, 24)):
        found = measured(folder, tmp_path / "labels.npy", ranks, block)
        assert found["samples"] == 3
        assert found["loss"] == pytest.approx(loss, rel=1e-10)
        assert found["error"] == np.mean(y.argmax(axis=-1) != labels)
    np.save(tmp_path / "short.npy", labels[:, 1:])
    with pytest.raises(DataError, match=r"short\.npy: has labels for \[3, 39, 52\]; the outputs are \[3, 40, 52\]"):
        measured(folder, tmp_path / "short.npy", 2, None)


@pytest.mark.long
def test_costs_and_metrics_of_whole_samples(folder, tmp_path):
    """Blocks and tiles give the numbers of one rank that has whole images."""
    y = np.load(folder / "y.npy")
    rng = np.random.default_rng(6)
    np.save(tmp_path / "labels.npy", rng.integers(0, 3, y.shape[:-1]).astype(np.uint8))
    np.save(tmp_path / "numbers.npy", y + rng.normal(size=y.shape))

    def of(cost, *metrics):
        def fresh():
            found = made()
            found.model.cost, found.metrics = cost, list(metrics)
            return found

        return fresh

    segmenting = of(nd.DiceCE(class_weights=[1, 2, 3]), nd.ROCAUC(), nd.IoU())
    restoring = of(nd.MSE(), nd.PSNR(20.0))
    for labels, fresh in (("labels.npy", segmenting), ("numbers.npy", restoring)):
        whole = measured(folder, tmp_path / labels, 1, None, fresh)
        assert len(whole) > 3
        assert whole.pop("error") is None
        assert None not in whole.values()
        for ranks, block in ((2, None), (1, 16), (3, 24)):
            found = measured(folder, tmp_path / labels, ranks, block, fresh)
            assert found.keys() - whole.keys() == {"error"}
            for name, value in whole.items():
                assert found[name] == pytest.approx(value, rel=1e-10), name
    means = np.mean((np.load(tmp_path / "numbers.npy") - y) ** 2, axis=(1, 2, 3))
    assert whole["psnr"] == pytest.approx(np.mean(10 * np.log10(400 / means)))


@pytest.mark.long
def test_windows_of_ssim_lie_across_blocks(folder, tmp_path):
    sk = pytest.importorskip("skimage.metrics")
    shutil.copy(folder / "net.h5", tmp_path)
    np.save(tmp_path / "x.npy", np.load(folder / "x.npy")[:2, :22, :20])
    on(1, tmp_path, tmp_path / "y.npy")
    y = np.load(tmp_path / "y.npy")
    targets = y + np.random.default_rng(6).normal(size=y.shape)
    np.save(tmp_path / "numbers.npy", targets)

    def fresh():
        found = made()
        found.model.cost, found.metrics = nd.MSE(), [nd.SSIM(20.0), nd.PSNR(20.0)]
        return found

    both = list(zip(targets, y, strict=True))
    ssim = np.mean([sk.structural_similarity(a, b, data_range=20.0, channel_axis=-1) for a, b in both])
    psnr = np.mean([sk.peak_signal_noise_ratio(a, b, data_range=20.0) for a, b in both])
    for ranks, block in ((1, None), (4, None), (2, 8), (3, 12), (1, 5)):
        found = measured(tmp_path, tmp_path / "numbers.npy", ranks, block, fresh)
        assert found["ssim"] == pytest.approx(ssim, rel=1e-9)
        assert found["psnr"] == pytest.approx(psnr, rel=1e-9)
        assert found["loss"] == pytest.approx(np.mean((targets - y) ** 2), rel=1e-9)
    np.save(tmp_path / "x.npy", np.load(tmp_path / "x.npy")[0])
    np.save(tmp_path / "numbers.npy", targets[0])  # might be (N, Y, X), too
    found = evaluate_files(
        fresh(), tmp_path / "net.h5", tmp_path / "x.npy", tmp_path / "numbers.npy", ProcessGrid.serial()
    )
    assert found["loss"] == pytest.approx(np.mean((targets[0] - y[0]) ** 2), rel=1e-9)
