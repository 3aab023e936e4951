"""Predictions for images of any size: on any ranks, in any blocks, and resumed after any interruption."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from interruptions import Killed, interrupt_after_part
from predict_runs import make_experiment, make_unet, predict_on_ranks

import neondist as nd
from neondist.comm import ProcessGrid
from neondist.errors import ConfigError, DataError, OutputError
from neondist.runtime.blocks import BlockwiseExecutor
from neondist.train import evaluate_files, predict
from neondist.train.inference.images import SourceSamples
from neondist.train.inference.predict import OutputWriter


@pytest.mark.parametrize(("ranks", "block"), [(1, None), (2, 8), (3, 1000), (6, 30)])
@pytest.mark.long
def test_any_blocks_on_any_ranks_agree(network_folder, tmp_path, ranks, block):
    expected = np.load(network_folder / "y.npy")
    assert predict_on_ranks(ranks, network_folder, tmp_path / "y.npy", block=block) == expected.shape
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-12, atol=1e-12)
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.long
def test_chunks_shared_by_blocks_are_decoded_once(network_folder, tmp_path, monkeypatch, ranks):
    """Blocks of 40 cells, each with a halo of 4 cells, cross tiles of 32."""
    tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")
    array = np.random.default_rng(1).integers(0, 200, (480, 360, 2), "uint8")
    tifffile.imwrite(tmp_path / "x.tif", array, tile=(32, 32), compression="zlib", planarconfig="contig")
    decoded, close = [], SourceSamples.close
    monkeypatch.setattr(SourceSamples, "close", lambda self: (decoded.append(self.source.bytes_read), close(self)))
    predict_on_ranks(ranks, network_folder, tmp_path / "y.npy", tmp_path / "x.tif", block=40)
    assert len(decoded) == ranks
    assert max(decoded) <= 1.2 * array.nbytes / ranks
    np.save(tmp_path / "x.npy", array)
    predict_on_ranks(1, network_folder, tmp_path / "z.npy", tmp_path / "x.npy", block=40)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.load(tmp_path / "z.npy"))


def test_several_kinds_of_outputs_are_written(network_folder, tmp_path):
    expected = np.load(network_folder / "y.npy")
    predict_on_ranks(2, network_folder, tmp_path / "out.h5", block=16, classes=True, probabilities=True)
    p = np.exp(expected) / np.exp(expected).sum(axis=-1, keepdims=True)
    with nd.open_source(tmp_path / "out-probabilities.h5") as source:
        np.testing.assert_allclose(source.read([(0, n) for n in source.shape]), p, rtol=1e-12)
    with nd.open_source(tmp_path / "out-classes.h5") as source:
        assert (source.dtype, source.axes) == (np.uint8, "NYXC")
        np.testing.assert_array_equal(source.read([(0, n) for n in source.shape])[..., 0], expected.argmax(axis=-1))
    assert len(list(tmp_path.iterdir())) == 2


def test_class_map_in_png_holds_labels(network_folder, tmp_path):
    """An RGB image would be a target with three channels."""
    np.save(tmp_path / "one.npy", np.load(network_folder / "x.npy")[1])
    predict_on_ranks(1, network_folder, tmp_path / "y.png", tmp_path / "one.npy", classes=True)
    with nd.open_source(tmp_path / "y.png") as source:
        assert source.shape == (40, 52, 3)
    files = tmp_path / "one.npy", tmp_path / "y.png"
    assert evaluate_files(make_experiment(), network_folder / "net.h5", *files, ProcessGrid.serial())["error"] == 0


def test_single_images_and_stacks(network_folder, tmp_path):
    import h5py

    x, expected = np.load(network_folder / "x.npy"), np.load(network_folder / "y.npy")
    np.save(tmp_path / "one.npy", x[1])
    shape = predict_on_ranks(2, network_folder, tmp_path / "y1.npy", tmp_path / "one.npy", block=16)
    assert shape == expected.shape[1:]
    np.testing.assert_allclose(np.load(tmp_path / "y1.npy"), expected[1], rtol=1e-12, atol=1e-12)
    with h5py.File(tmp_path / "film.h5", "w") as file:
        file["images"] = np.moveaxis(np.stack([x, x[::-1]]), -1, 2)
        file["images"].attrs["axes"] = np.bytes_("TZCYX")
    for block in (None, 32):
        target = tmp_path / f"film-{block}.npy"
        predict_on_ranks(2, network_folder, target, tmp_path / "film.h5", block=block)
        np.testing.assert_allclose(np.load(target), np.stack([expected, expected[::-1]]), rtol=1e-12, atol=1e-12)


def test_group_norm_needs_the_full_image(network_folder, tmp_path):
    def make():
        return make_experiment(lambda: make_unet(lambda: nd.GroupNormLayerDist(1)))

    make().run(ProcessGrid.serial(), output=tmp_path / "run", hooks=[])
    (tmp_path / "run" / "checkpoint.h5").rename(tmp_path / "net.h5")
    shutil.copy(network_folder / "x.npy", tmp_path / "x.npy")
    for ranks in (1, 4):
        predict_on_ranks(ranks, tmp_path, tmp_path / f"y{ranks}.npy", make=make)
    np.testing.assert_allclose(np.load(tmp_path / "y4.npy"), np.load(tmp_path / "y1.npy"), rtol=1e-9, atol=1e-12)
    with pytest.raises(
        ConfigError,
        match=r"'group_norm1' cannot be computed block by block \(sums over the whole"
        r" image\)",
    ):
        predict_on_ranks(1, tmp_path, tmp_path / "z.npy", make=make, block=8)


@pytest.mark.long
def test_blocks_if_the_full_image_exceeds_memory(network_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("neondist.system.memory.process_overhead_bytes", lambda backend: 0)
    monkeypatch.setattr("neondist.train.inference.prediction_methods.process_overhead_bytes", lambda backend: 0)
    sizes = []
    run = BlockwiseExecutor.run
    monkeypatch.setattr(
        BlockwiseExecutor, "run", lambda self, number, x: (sizes.append(x.shape), run(self, number, x))[1]
    )
    predict_on_ranks(1, network_folder, tmp_path / "y.npy", make=lambda: make_experiment(memory="200kB"))
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.load(network_folder / "y.npy"), rtol=1e-12, atol=1e-12)
    assert len(sizes) > 3
    with pytest.raises(ConfigError, match=r"memory: even a block of 2 x 2 takes .* layer '\w+'"):
        predict_on_ranks(1, network_folder, tmp_path / "z.npy", make=lambda: make_experiment(memory="5kB"))


@pytest.mark.parametrize(("block", "parts"), [(24, 18), (None, 3)])
@pytest.mark.long
def test_interruption_after_every_part(network_folder, tmp_path, monkeypatch, block, parts):
    """Each process computes one more part; only the first one chooses blocks, which the others adopt."""
    run, computed = BlockwiseExecutor.run, []
    monkeypatch.setattr(
        BlockwiseExecutor, "run", lambda self, number, x: (computed.append(number), run(self, number, x))[1]
    )

    def make():
        experiment = make_experiment()
        experiment.batch_size = 1
        return experiment

    with interrupt_after_part():
        for part in range(parts):
            with pytest.raises(Killed):
                predict_on_ranks(1, network_folder, tmp_path / "y.npy", make=make, block=None if part else block)
            assert not (tmp_path / "y.npy").exists()
        predict_on_ranks(1, network_folder, tmp_path / "y.npy", make=make)  # no part is left
    assert len(computed) <= 2 * parts  # the next part may have been computed already
    predict_on_ranks(1, network_folder, tmp_path / "z.npy", make=make, block=block)
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "z.npy").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


KILLED_PREDICTION_SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from neondist.io.journal import ProgressJournal
from predict_runs import predict_on_ranks
add, left = ProgressJournal.record_part, [5]
def add_and_kill(self, number):
    add(self, number)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
ProgressJournal.record_part = add_and_kill
predict_on_ranks(2, Path({folder!r}), Path({target!r}), block=16, classes=True, raw=True)
"""


@pytest.mark.long
def test_killed_prediction_resumes_on_other_ranks(network_folder, tmp_path):
    code = KILLED_PREDICTION_SCRIPT.format(paths=sys.path, folder=str(network_folder), target=str(tmp_path / "y.npy"))
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("*.npy"))
    journal = tmp_path / "y.npy.partial.journal"
    assert journal.with_name(journal.name + ".lock").exists()
    with journal.open("a") as file:
        file.write("7 00000000\n3")  # as of incomplete writes
    options = {"classes": True, "raw": True}
    predict_on_ranks(3, network_folder, tmp_path / "y.npy", **options)
    predict_on_ranks(1, network_folder, tmp_path / "z.npy", block=16, **options)
    for kind in ("raw", "classes"):
        assert (tmp_path / f"y-{kind}.npy").read_bytes() == (tmp_path / f"z-{kind}.npy").read_bytes()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.long
def test_partial_output_of_another_job(network_folder, tmp_path):
    shutil.copy(network_folder / "x.npy", tmp_path / "x.npy")
    with interrupt_after_part(), pytest.raises(Killed):
        predict_on_ranks(1, network_folder, tmp_path / "y.npy", tmp_path / "x.npy", block=16)
    np.save(tmp_path / "x.npy", np.load(tmp_path / "x.npy") + 1)
    with pytest.raises(OutputError, match=r"partial\.journal: belongs to a job with different input; .*--overwrite"):
        predict_on_ranks(1, network_folder, tmp_path / "y.npy", tmp_path / "x.npy")
    with pytest.raises(OutputError, match=r"different outputs and route and input"):
        predict_on_ranks(2, network_folder, tmp_path / "y.npy", tmp_path / "x.npy", block=8, classes=True)
    predict_on_ranks(2, network_folder, tmp_path / "y.npy", tmp_path / "x.npy", overwrite=True)
    predict_on_ranks(1, network_folder, tmp_path / "z.npy", tmp_path / "x.npy", block=16)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.load(tmp_path / "z.npy"))
    with pytest.raises(OutputError, match=r"y\.npy: already exists"):
        predict_on_ranks(2, network_folder, tmp_path / "y.npy", tmp_path / "x.npy")
    predict_on_ranks(2, network_folder, tmp_path / "y.npy", overwrite=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.load(network_folder / "y.npy"), rtol=1e-12, atol=1e-12)


def test_job_killed_before_its_first_block_replaces_the_journal_of_another(network_folder, tmp_path, monkeypatch):
    def create_and_die(*arguments, resume, **options):
        sink = nd.create_sink(*arguments, resume=resume, **options)
        if resume:
            sink.close()
            raise Killed
        return sink

    with interrupt_after_part(), pytest.raises(Killed):
        predict_on_ranks(1, network_folder, tmp_path / "y.npy", block=16)
    monkeypatch.setattr(sys.modules[OutputWriter.__module__], "create_sink", create_and_die)
    with pytest.raises(Killed):
        predict_on_ranks(1, network_folder, tmp_path / "y.npy", block=8, overwrite=True)
    monkeypatch.undo()
    predict_on_ranks(1, network_folder, tmp_path / "y.npy")
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.load(network_folder / "y.npy"), rtol=1e-12, atol=1e-12)


def test_second_job_for_the_same_output_is_rejected(network_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("neondist.io.lock.LOCK_TIMEOUT_SECONDS", 0)
    write, refused = OutputWriter.write, []

    def start_second_job(self, part, y):
        if not refused:
            with pytest.raises(OutputError) as error:
                predict_on_ranks(2, network_folder, tmp_path / "y.npy", block=16, overwrite=True)
            refused.append(str(error.value))
        write(self, part, y)

    monkeypatch.setattr(OutputWriter, "write", start_second_job)
    predict_on_ranks(1, network_folder, tmp_path / "y.npy")
    assert f"y.npy: in use by another run (process {os.getpid()} on" in refused[0]
    assert "choose another file with --output" in refused[0]
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


@pytest.mark.long
def test_interruption_between_the_renames_of_two_files(network_folder, tmp_path, monkeypatch):
    from neondist.formats.npy import NPYSink

    commit, options = NPYSink.commit, {"block": 16, "classes": True, "raw": True}

    def commit_first_file(self):
        if self.path.name.endswith("classes.npy"):
            raise Killed
        commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(NPYSink, "commit", commit_first_file)
        with pytest.raises(Killed):
            predict_on_ranks(1, network_folder, tmp_path / "y.npy", **options)
    assert [path.name for path in tmp_path.glob("*.npy")] == ["y-raw.npy"]
    predict_on_ranks(2, network_folder, tmp_path / "y.npy", **options)
    expected = np.load(network_folder / "y.npy").argmax(axis=-1)
    np.testing.assert_array_equal(np.load(tmp_path / "y-classes.npy"), expected)
    assert len(list(tmp_path.iterdir())) == 2


def test_invalid_input_is_rejected(network_folder, tmp_path, monkeypatch):
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
            predict_on_ranks(2, network_folder, tmp_path / "y.npy", tmp_path / name, block=4)
    with pytest.raises(DataError, match=r"nan\.npy: has missing values \(NaN\); replace"):
        predict_on_ranks(2, network_folder, tmp_path / "out.npy", tmp_path / "nan.npy", block=4)
    with pytest.raises(ConfigError, match=r"y\.jpg: JPEG is lossy"):
        predict_on_ranks(2, network_folder, tmp_path / "y.jpg", classes=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(OutputError, match=r"y\.npy: needs .*, but only 100 B are free"):
        predict_on_ranks(2, network_folder, tmp_path / "y.npy", block=16)
    assert not list(tmp_path.glob("y*"))


@pytest.mark.parametrize("trained_on", ["ab", "cd"])
def test_missing_values_are_filled(tmp_path, trained_on):
    """Fill as in training, or, if the training images had no missing values, as the experiment specifies."""
    cells = np.random.default_rng(0).normal(size=(2, 24, 20))
    cells[:, 3:9] = np.nan
    (tmp_path / "m").mkdir()
    for name, array in zip("abcd", (*cells, *np.nan_to_num(cells, nan=1.5)), strict=True):
        np.save(tmp_path / f"{name}.npy", array)
        np.save(tmp_path / "m" / f"{name}.npy", np.zeros((24, 20), "u1"))

    def make(fill):
        images, masks = (f"{folder}/[{trained_on}].npy" for folder in (tmp_path, tmp_path / "m"))
        data = nd.ImageFiles(images, masks, crop=[16, 16], validation=1, classes=2, fill=fill)
        return nd.FitExperiment(data, nd.ConvnetDist([nd.ConvLayerDist(2, 3, padding=1)]), batch_size=1, epochs=1)

    make(1.5 if trained_on == "ab" else None).run(ProcessGrid.serial(), output=tmp_path / "run", hooks=[])
    for name in "ac":
        paths = tmp_path / "run" / "checkpoint.h5", tmp_path / f"{name}.npy", tmp_path / f"y{name}.npy"
        predict(make(1.5), *paths, ProcessGrid.serial(), block=8)
    np.testing.assert_array_equal(np.load(tmp_path / "ya.npy"), np.load(tmp_path / "yc.npy"))
