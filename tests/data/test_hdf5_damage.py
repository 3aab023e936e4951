"""Damage that HDF5 itself does not find: zeros where there were cells, files that are shorter by now, and links."""

import os
import zlib

import h5py
import numpy as np
import pytest
from fuzz import survive, typed
from hdf5_toys import small_hdf5

import neondist as nd
from neondist.data.datasets.hdf5_tiles import HDF5Tiles
from neondist.errors import DataError
from neondist.io.hdf5 import CheckedArray, ChecksumTable, NewFile, file_state, read_whole

SERIAL = nd.ProcessGrid.serial()
COUNT = 9


@pytest.fixture
def made(tmp_path):
    """A file that convert has written, of images of several chunks, and of maps."""
    draw = np.random.default_rng(0)
    np.savez(
        tmp_path / "x.npz",
        x_train=draw.integers(1, 256, (COUNT, 150, 140, 3), dtype=np.uint8),
        y_train=draw.integers(0, 3, (COUNT, 150, 140)),
        x_test=draw.integers(1, 256, (3, 150, 140, 3), dtype=np.uint8),
        y_test=draw.integers(0, 3, (3, 150, 140)),
    )
    assert typed("data", "convert", tmp_path / "x.npz", "--to", tmp_path / "x.h5") == "fine"
    return tmp_path / "x.h5"


def zero(path, name, number):
    """Make one chunk of an array zeros, as a power cut does."""
    with h5py.File(path, "r") as file:
        chunk = file[name].id.get_chunk_info(number)
    with open(path, "rb+") as file:
        file.seek(chunk.byte_offset)
        file.write(bytes(chunk.size))
    return chunk.chunk_offset


def opened(path):
    data = nd.HDF5Dataset(path)
    data.open(SERIAL)
    return data


@pytest.mark.parametrize("name", ["images", "labels"])
def test_a_chunk_of_zeros_is_found(made, name):
    with h5py.File(made) as file:
        assert file[f"train/{name}"].id.get_num_chunks() > COUNT
    sample = zero(made, f"train/{name}", 5)[0]
    data = opened(made)
    others = [n for n in range(COUNT) if n != sample]
    data.train.images(others), data.train.targets(others)
    with pytest.raises(DataError, match=f"train/{name}: wrong checksum in sample {sample}"):
        data.train.images([sample]), data.train.targets([sample])


def test_labels_of_zeros_are_found(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((8_200, 2, 2), np.uint8))
    np.save(tmp_path / "y.npy", np.arange(8_200) % 5)
    assert typed("data", "convert", tmp_path / "x.npy", tmp_path / "y.npy", "--to", tmp_path / "x.h5") == "fine"
    opened(tmp_path / "x.h5")
    zero(tmp_path / "x.h5", "train/labels", 1)
    with pytest.raises(DataError, match="train/labels: wrong checksum in sample 8192"):
        nd.HDF5Dataset(tmp_path / "x.h5").check()


def test_zeroed_checksums_are_found(made):
    zero(made, "checksums/train/images", 0)
    with pytest.raises(DataError, match="wrong checksum"):
        opened(made).train.images([0])


def test_images_to_predict_are_compared_too(made):
    from neondist.train.inference.images import open_images

    sample = zero(made, "test/images", 3)[0]
    source = open_images(f"{made}:test/images", (150, 140, 3))
    with pytest.raises(DataError, match=f"wrong checksum in sample {sample}"):
        source.raw(range(3), (slice(0, 150), slice(0, 140)))


@pytest.mark.parametrize("kind", ["npy", "h5"])
def test_images_to_predict_that_change_are_told(tmp_path, kind):
    from neondist.train.inference.images import open_images

    cells = np.ones((200, 30, 20, 1), np.float32)
    np.save(tmp_path / "x.npy", cells)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = cells
    path = tmp_path / f"x.{kind}"
    source = open_images(path, (30, 20, 1))
    assert source.raw(range(2), (slice(1, 3), slice(0, 4))).shape == (2, 2, 4, 1)
    os.truncate(path, 4000)
    with pytest.raises(DataError, match="has changed since it was opened"):
        source.raw(range(198, 200), (slice(0, 30), slice(0, 20)))
    source.close()


@pytest.mark.parametrize("seed", range(12))
def test_checked_arrays_give_what_was_written(tmp_path, seed, monkeypatch):
    """Whatever the shape, the blocks, the tile, and how much is read at once; and every wrong block is found."""
    draw = np.random.default_rng(seed)
    shape = tuple(int(n) for n in draw.integers(1, 9, draw.integers(2, 5)))
    block = tuple(int(draw.integers(1, n + 1)) for n in shape)
    cells = draw.integers(0, 99, shape).astype(draw.choice(["u1", "i4", "f8"]))
    table = ChecksumTable(shape, block)
    half = shape[0] // 2 // block[0] * block[0]
    for first, last in ((0, half), (half, shape[0])):
        table.add(cells[first:last], first)
    with NewFile(tmp_path / "x.h5") as new:
        new.file.create_dataset("g/x", data=cells)
        table.write(new.file, "g/x")
    monkeypatch.setattr("neondist.io.hdf5.checksums._ROOM", int(draw.integers(1, 300)))
    low, high = np.sort([draw.integers(0, n + 1, 2) for n in shape]).T
    low, high = np.minimum(low, np.array(shape) - 1), np.maximum(high, low + 1)
    place = tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        np.testing.assert_array_equal(read_whole(file, "g/x"), cells)
        out = np.empty_like(cells[place])
        CheckedArray(file, "g/x", place[1:]).read(place[0].start, out)
        np.testing.assert_array_equal(out, cells[place])
        file["g/x"][tuple(int(n) for n in low)] += 1
        with pytest.raises(ValueError, match="wrong checksum"):
            CheckedArray(file, "g/x", place[1:]).read(place[0].start, out)
        with pytest.raises(ValueError, match="wrong checksum"):
            read_whole(file, "g/x")


def test_checksums_are_of_the_cells(made):
    with h5py.File(made) as file:
        array, sums = file["train/images"], file["checksums/train/images"]
        block = sums.attrs["block"]
        assert tuple(block) == array.chunks
        assert sums[2, 0, 1, 0] == zlib.crc32(array[2, : block[1], block[2] : 2 * block[2]].tobytes())


class Cuts(nd.Hook):
    """Does something to the data file in the middle of a run."""

    def __init__(self, act):
        self.act = act

    def after_step(self, run):
        if run.step == 1:
            self.act()


@pytest.mark.parametrize("act", ["cut", "touch", "replace", "remove"])
def test_a_file_that_changes_during_a_run_ends_it(tmp_path, act):
    path = tmp_path / "x.h5"
    small_hdf5(path, chunks=False)  # of other programs: no checksums

    def change():
        if act == "cut":
            os.truncate(path, path.stat().st_size // 2)
        elif act == "touch":
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        elif act == "replace":
            small_hdf5(tmp_path / "y.h5", (13, 10, 2), counts=(21, 7))
            os.replace(tmp_path / "y.h5", path)
        else:
            path.unlink()

    layers = [nd.ConvLayer(3, 3, padding=1), nd.FCLayer(3)]
    experiment = nd.FitExperiment(nd.HDF5Dataset(path), nd.Convnet(layers, backend="numpy"), batch_size=2)
    with pytest.raises(DataError, match=r"x\.h5: train/images has changed since the run began"):
        experiment.run(SERIAL, hooks=[Cuts(change)])


def test_the_state_of_a_file_is_looked_at_once_a_batch(tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    small_hdf5(path)
    data, asked = opened(path), []
    monkeypatch.setattr("neondist.data.datasets.hdf5_tiles.file_state", lambda p: asked.append(p) or file_state(p))
    assert isinstance(data.train.tiles, HDF5Tiles)
    data.train.images(np.arange(20)[::-1])
    assert len(asked) == 1


def virtual(path):
    with h5py.File(path, "r+") as file:
        del file["train/images"]
        layout = h5py.VirtualLayout((20, 13, 10, 2), "u1")
        layout[...] = h5py.VirtualSource(".", "train/images", (20, 13, 10, 2))
        file.create_virtual_dataset("train/images", layout)


def link(name, made):
    def change(path):
        os.mkfifo(path.parent / "pipe")
        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = made(path)

    return change


def outside(path):
    os.mkfifo(path.parent / "pipe")
    with h5py.File(path, "r+") as file:
        del file["train/labels"]
        file.create_dataset("train/labels", (20,), "i4", external=[(str(path.parent / "pipe"), 0, 80)])


LINKS = {
    "virtual": (virtual, "'train/images' stores its data in external files"),
    "cells outside": (outside, "'train/labels' stores its data in external files"),
    "pipe": (link("train/images", lambda p: h5py.ExternalLink(str(p.parent / "pipe"), "x")), "link into another file"),
    "group": (
        link("train", lambda p: h5py.ExternalLink(str(p.parent / "pipe"), "x")),
        "'train' is a link into another",
    ),
    "circle": (link("train", lambda p: h5py.SoftLink("/train")), "'train' is a link to itself"),
    "nowhere": (link("train/images", lambda p: h5py.SoftLink("/x")), "has no array 'train/images'"),
}


def test_links_out_of_a_file_are_not_followed(tmp_path):
    def attempt(name):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "x.h5"
        small_hdf5(path)
        LINKS[name][0](path)
        try:
            nd.HDF5Dataset(path).check()
        except DataError as error:
            return str(error)
        return "fine"

    for name, said in zip(LINKS, survive(LINKS, attempt), strict=True):
        assert LINKS[name][1] in said, name


def test_links_inside_a_file_are_followed(tmp_path):
    path = tmp_path / "x.h5"
    made = small_hdf5(path)
    with h5py.File(path, "r+") as file:
        file.move("train/images", "cells")
        file["train/images"] = h5py.SoftLink("/cells")
        file.move("test", "validation")
        file["test"] = h5py.SoftLink("validation")
    data = opened(path)
    np.testing.assert_array_equal(data.train.tiles[np.arange(20)], made["train", "images"])
    np.testing.assert_array_equal(data.test.tiles[np.arange(7)], made["test", "images"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -3.0, 0, 2.5, 1e300, [3, 4]])
def test_the_attribute_classes(tmp_path, value):
    path = tmp_path / "x.h5"
    small_hdf5(path)
    with h5py.File(path, "r+") as file:
        file["train/labels"].attrs["classes"] = value
    with pytest.raises(DataError, match=r"attribute 'classes' of train/labels is .* not a number of classes"):
        nd.HDF5Dataset(path).check()
