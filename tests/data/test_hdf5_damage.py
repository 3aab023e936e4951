"""Damage that HDF5 does not detect: zeroed chunks, truncated files and external links."""

import os
import zlib

import h5py
import numpy as np
import pytest
from fuzz import classify_command, run_isolated
from small_hdf5 import write_hdf5

import neondist as nd
from neondist.data.datasets.hdf5_tiles import HDF5Array
from neondist.errors import DataError
from neondist.io.hdf5 import CheckedArray, ChecksumTable, NewHDF5File, read_verified_array, size_and_mtime

SERIAL = nd.ProcessGrid.serial()
COUNT = 9


@pytest.fixture
def converted_file(tmp_path):
    """HDF5 file written by `convert`, with images of several chunks and label maps."""
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "x.npz",
        x_train=rng.integers(1, 256, (COUNT, 150, 140, 3), dtype=np.uint8),
        y_train=rng.integers(0, 3, (COUNT, 150, 140)),
        x_test=rng.integers(1, 256, (3, 150, 140, 3), dtype=np.uint8),
        y_test=rng.integers(0, 3, (3, 150, 140)),
    )
    assert classify_command("data", "convert", tmp_path / "x.npz", "--to", tmp_path / "x.h5") == "fine"
    return tmp_path / "x.h5"


def zero_chunk(path, name, number):
    """Overwrite one chunk of an array with zeros, as a power failure does; return its offset."""
    with h5py.File(path, "r") as file:
        chunk = file[name].id.get_chunk_info(number)
    with open(path, "rb+") as file:
        file.seek(chunk.byte_offset)
        file.write(bytes(chunk.size))
    return chunk.chunk_offset


def open_dataset(path):
    data = nd.HDF5Dataset(path)
    data.open(SERIAL)
    return data


@pytest.mark.parametrize("name", ["images", "labels"])
def test_zeroed_chunk_is_detected(converted_file, name):
    with h5py.File(converted_file) as file:
        assert file[f"train/{name}"].id.get_num_chunks() > COUNT
    sample = zero_chunk(converted_file, f"train/{name}", 5)[0]
    data = open_dataset(converted_file)
    others = [n for n in range(COUNT) if n != sample]
    data.train.images(others), data.train.targets(others)
    with pytest.raises(DataError, match=f"train/{name}: wrong checksum in sample {sample}"):
        data.train.images([sample]), data.train.targets([sample])


def test_zeroed_labels_are_detected(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((8_200, 2, 2), np.uint8))
    np.save(tmp_path / "y.npy", np.arange(8_200) % 5)
    assert (
        classify_command("data", "convert", tmp_path / "x.npy", tmp_path / "y.npy", "--to", tmp_path / "x.h5") == "fine"
    )
    open_dataset(tmp_path / "x.h5")
    zero_chunk(tmp_path / "x.h5", "train/labels", 1)
    with pytest.raises(DataError, match="train/labels: wrong checksum in sample 8192"):
        nd.HDF5Dataset(tmp_path / "x.h5").check()


def test_zeroed_checksums_are_detected(converted_file):
    zero_chunk(converted_file, "checksums/train/images", 0)
    with pytest.raises(DataError, match="wrong checksum"):
        open_dataset(converted_file).train.images([0])


def test_prediction_inputs_are_verified(converted_file):
    from neondist.train.inference.images import open_images

    sample = zero_chunk(converted_file, "test/images", 3)[0]
    source = open_images(f"{converted_file}:test/images", (150, 140, 3))
    with pytest.raises(DataError, match=f"wrong checksum in sample {sample}"):
        source.read_raw(range(3), (slice(0, 150), slice(0, 140)))


@pytest.mark.parametrize("kind", ["npy", "h5"])
def test_changed_prediction_inputs_are_reported(tmp_path, kind):
    from neondist.train.inference.images import open_images

    cells = np.ones((200, 30, 20, 1), np.float32)
    np.save(tmp_path / "x.npy", cells)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = cells
    path = tmp_path / f"x.{kind}"
    source = open_images(path, (30, 20, 1))
    assert source.read_raw(range(2), (slice(1, 3), slice(0, 4))).shape == (2, 2, 4, 1)
    os.truncate(path, 4000)
    with pytest.raises(DataError, match="has changed since it was opened"):
        source.read_raw(range(198, 200), (slice(0, 30), slice(0, 20)))
    source.close()


@pytest.mark.parametrize("seed", range(12))
def test_checked_arrays_round_trip(tmp_path, seed, monkeypatch):
    """Vary shapes, blocks, tiles and the size of reads; check that a wrong block is detected."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(2, 5)))
    block = tuple(int(rng.integers(1, n + 1)) for n in shape)
    cells = rng.integers(0, 99, shape).astype(rng.choice(["u1", "i4", "f8"]))
    table = ChecksumTable(shape, block)
    half = shape[0] // 2 // block[0] * block[0]
    for first, last in ((0, half), (half, shape[0])):
        table.add(cells[first:last], first)
    with NewHDF5File(tmp_path / "x.h5") as new:
        new.file.create_dataset("g/x", data=cells)
        table.write(new.file, "g/x")
    monkeypatch.setattr("neondist.io.hdf5.checksums._BATCH_BYTES", int(rng.integers(1, 300)))
    low, high = np.sort([rng.integers(0, n + 1, 2) for n in shape]).T
    low, high = np.minimum(low, np.array(shape) - 1), np.maximum(high, low + 1)
    index = tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        np.testing.assert_array_equal(read_verified_array(file, "g/x"), cells)
        out = np.empty_like(cells[index])
        CheckedArray(file, "g/x", index[1:]).read(index[0].start, out)
        np.testing.assert_array_equal(out, cells[index])
        file["g/x"][tuple(int(n) for n in low)] += 1
        with pytest.raises(ValueError, match="wrong checksum"):
            CheckedArray(file, "g/x", index[1:]).read(index[0].start, out)
        with pytest.raises(ValueError, match="wrong checksum"):
            read_verified_array(file, "g/x")


def test_checksums_cover_chunks(converted_file):
    with h5py.File(converted_file) as file:
        array, sums = file["train/images"], file["checksums/train/images"]
        block = sums.attrs["block"]
        assert tuple(block) == array.chunks
        assert sums[2, 0, 1, 0] == zlib.crc32(array[2, : block[1], block[2] : 2 * block[2]].tobytes())


class FileChange(nd.Hook):
    """Apply an action to the data file in the middle of a run."""

    def __init__(self, action):
        self.action = action

    def after_step(self, run):
        if run.step == 1:
            self.action()


@pytest.mark.parametrize("action", ["cut", "touch", "replace", "remove"])
def test_file_changes_end_the_run(tmp_path, action):
    path = tmp_path / "x.h5"
    write_hdf5(path, chunks=False)  # no checksums, as in files of other programs

    def change():
        if action == "cut":
            os.truncate(path, path.stat().st_size // 2)
        elif action == "touch":
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        elif action == "replace":
            write_hdf5(tmp_path / "y.h5", (13, 10, 2), counts=(21, 7))
            os.replace(tmp_path / "y.h5", path)
        else:
            path.unlink()

    layers = [nd.ConvLayer(3, 3, padding=1), nd.FCLayer(3)]
    experiment = nd.FitExperiment(nd.HDF5Dataset(path), nd.Convnet(layers, backend="numpy"), batch_size=2)
    with pytest.raises(DataError, match=r"x\.h5: train/images has changed since the run began"):
        experiment.run(SERIAL, hooks=[FileChange(change)])


def test_file_state_is_checked_once_per_batch(tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    write_hdf5(path)
    data, paths = open_dataset(path), []
    monkeypatch.setattr(
        "neondist.data.datasets.hdf5_tiles.size_and_mtime", lambda p: paths.append(p) or size_and_mtime(p)
    )
    assert isinstance(data.train.tiles, HDF5Array)
    data.train.images(np.arange(20)[::-1])
    assert len(paths) == 1


def make_virtual(path):
    with h5py.File(path, "r+") as file:
        del file["train/images"]
        layout = h5py.VirtualLayout((20, 13, 10, 2), "u1")
        layout[...] = h5py.VirtualSource(".", "train/images", (20, 13, 10, 2))
        file.create_virtual_dataset("train/images", layout)


def replace_by_link(name, make_link):
    def change(path):
        os.mkfifo(path.parent / "pipe")
        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = make_link(path)

    return change


def store_externally(path):
    os.mkfifo(path.parent / "pipe")
    with h5py.File(path, "r+") as file:
        del file["train/labels"]
        file.create_dataset("train/labels", (20,), "i4", external=[(str(path.parent / "pipe"), 0, 80)])


LINKS = {
    "virtual": (make_virtual, "'train/images' stores its data in external files"),
    "external data": (store_externally, "'train/labels' stores its data in external files"),
    "pipe": (
        replace_by_link("train/images", lambda p: h5py.ExternalLink(str(p.parent / "pipe"), "x")),
        "link into another file",
    ),
    "group": (
        replace_by_link("train", lambda p: h5py.ExternalLink(str(p.parent / "pipe"), "x")),
        "'train' is a link into another",
    ),
    "cycle": (replace_by_link("train", lambda p: h5py.SoftLink("/train")), "'train' is a link to itself"),
    "dangling": (replace_by_link("train/images", lambda p: h5py.SoftLink("/x")), "has no array 'train/images'"),
}


def test_external_links_are_rejected(tmp_path):
    def check(name):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "x.h5"
        write_hdf5(path)
        LINKS[name][0](path)
        try:
            nd.HDF5Dataset(path).check()
        except DataError as error:
            return str(error)
        return "fine"

    for name, message in zip(LINKS, run_isolated(LINKS, check), strict=True):
        assert LINKS[name][1] in message, name


def test_internal_links_are_followed(tmp_path):
    path = tmp_path / "x.h5"
    arrays = write_hdf5(path)
    with h5py.File(path, "r+") as file:
        file.move("train/images", "cells")
        file["train/images"] = h5py.SoftLink("/cells")
        file.move("test", "validation")
        file["test"] = h5py.SoftLink("validation")
    data = open_dataset(path)
    np.testing.assert_array_equal(data.train.tiles[np.arange(20)], arrays["train", "images"])
    np.testing.assert_array_equal(data.test.tiles[np.arange(7)], arrays["test", "images"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -3.0, 0, 2.5, 1e300, [3, 4]])
def test_invalid_classes_attribute(tmp_path, value):
    path = tmp_path / "x.h5"
    write_hdf5(path)
    with h5py.File(path, "r+") as file:
        file["train/labels"].attrs["classes"] = value
    with pytest.raises(DataError, match=r"attribute 'classes' of train/labels is .* not a number of classes"):
        nd.HDF5Dataset(path).check()
