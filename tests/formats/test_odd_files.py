"""Pipes, sockets, devices, folders, links and missing files, which readers reject with a single short error."""

import contextlib
import os
import signal
import socket
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest

import neondist as nd
from neondist.config import load_experiment
from neondist.config.keys import settable_keys
from neondist.data.convert import open_split_sources
from neondist.data.csv_table import read_csv_rows
from neondist.data.datasets.cifar10_files import CIFAR10Files
from neondist.data.datasets.hdf5 import HDF5Dataset
from neondist.data.datasets.idx import LABELS_MAGIC, read_idx_header
from neondist.errors import MAX_MESSAGE_LENGTH, UserError
from neondist.formats.image_loader import ImageLoader
from neondist.io.checkpoint.checksum import verify_checksum
from neondist.io.hdf5 import array_names, open_hdf5
from neondist.io.journal import ProgressJournal
from neondist.io.regular_file import open_regular, read_bytes
from neondist.system.machine import read_machine
from neondist.train.html_report import read_epoch_records

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")

SUFFIXES = [".h5", ".nc", ".nii", ".nii.gz", ".npy", ".tif", ".svs", ".png", ".jpg", ".zarr"]
READERS = {f"open_source {suffix}": (suffix, nd.open_source) for suffix in SUFFIXES} | {
    "experiment": (".yaml", load_experiment),
    "machine": (".yaml", read_machine),
    "table": (".csv", lambda path: read_csv_rows(path, "FILE,CLASS")),
    "IDX": ("", lambda path: read_idx_header(path, LABELS_MAGIC)),
    "CIFAR-10": (".tar.gz", lambda path: CIFAR10Files(path).file_sizes()),
    "checkpoint": (".h5", verify_checksum),
    "HDF5Dataset": (".h5", lambda path: HDF5Dataset(str(path)).check()),
    "picture": (".png", lambda path: ImageLoader().load(path)),
    "convert .npy": (".npy", lambda path: open_split_sources([path, path], ImageLoader())),
    "convert .npz": (".npz", lambda path: open_split_sources([path], ImageLoader())),
    "records": (".jsonl", read_epoch_records),
    "journal": (".journal", ProgressJournal),
}
EXCEPTIONS = {"journal": {"missing", "empty", "loop", "folder"}, "table": {"empty"}}
"""cases that are valid, or that are reported later"""


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # socket names have a length limit
        server.bind(path.name)


FILE_KINDS = {
    "pipe": (os.mkfifo, "is a named pipe, which is not supported; give a regular file"),
    "socket": (make_socket, "is a socket, which is not supported"),
    "device": (lambda path: path.symlink_to("/dev/null"), "is a device, which is not supported"),
    "folder": (Path.mkdir, ""),
    "missing": (lambda path: None, ""),
    "empty": (Path.touch, ""),
    "loop": (lambda path: path.symlink_to(path), ""),
}


@pytest.fixture(autouse=True)
def time_limit():
    """End the test if a reader blocks."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("kind", FILE_KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_special_files(tmp_path, reader, kind):
    suffix, read = READERS[reader]
    make, message = FILE_KINDS[kind]
    path = tmp_path / f"odd{suffix}"
    if suffix == ".zarr" and kind in ("pipe", "socket", "device"):
        path.mkdir()
        make(path / "zarr.json")
    else:
        make(path)
    if kind in EXCEPTIONS.get(reader, ()):
        return
    with pytest.raises(UserError) as caught:
        read(path)
    assert message in str(caught.value) or (kind == "device" and "points outside" in str(caught.value))
    assert "odd" in str(caught.value)
    assert len(str(caught.value)) <= MAX_MESSAGE_LENGTH
    assert settable_keys(str(path)) == []


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "out", "folder out", "inside"])
def test_chunks_must_be_regular_files_of_the_store(tmp_path, version, kind):
    zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
    array = zarr.create_array(tmp_path / "a.zarr", shape=(8, 8), chunks=(4, 4), dtype="u1", zarr_format=version)
    array[:] = 7
    chunk = tmp_path / "a.zarr" / ("c/1/1" if version == 3 else "1.1")
    secret = tmp_path / "secret"
    chunk.rename(secret if kind != "inside" else chunk.with_name("kept"))
    if kind in FILE_KINDS:
        FILE_KINDS[kind][0](chunk)
    elif kind == "folder out" and version == 3:
        chunk.parent.rename(tmp_path / "elsewhere")
        secret.rename(tmp_path / "elsewhere" / "1")
        chunk.parent.symlink_to(tmp_path / "elsewhere")
    else:
        chunk.symlink_to(secret if kind != "inside" else chunk.with_name("kept"))
    with nd.open_source(tmp_path / "a.zarr") as source:
        if kind == "inside":
            assert (source.read([(0, 8), (0, 8), (0, 1)]) == 7).all()
            return
        with pytest.raises(nd.DataError, match=r"points outside|which is not supported"):
            source.read([(0, 8), (0, 8), (0, 1)])


def test_pages_in_other_files_are_refused(tmp_path):
    """Refuse OME-XML that names other files, which can be outside the folder."""
    tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")
    names = "<TiffData IFD='0'><UUID FileName='{}'>urn:uuid:{}</UUID></TiffData>"
    ome = (
        "<?xml version='1.0'?><OME xmlns='http://www.openmicroscopy.org/Schemas/OME/2016-06' UUID='urn:uuid:0'>"
        "<Image ID='Image:0'><Pixels ID='Pixels:0' DimensionOrder='XYZCT' Type='uint8' SizeX='4' SizeY='4' SizeZ='2'"
        " SizeC='1' SizeT='1'>" + names.format("a.ome.tif", 0) + names.format("../secret.tif", 1)
    ) + "</Pixels></Image></OME>"
    tifffile.imwrite(tmp_path / "a.ome.tif", np.zeros((4, 4), "u1"), description=ome, metadata=None)
    with pytest.raises(nd.DataError, match="part of an OME-TIFF of several files"):
        nd.open_source(tmp_path / "a.ome.tif")


def test_messages_list_few_hdf5_names(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("/".join("a" * 1500))["x"] = np.zeros(3)
        file["loop/again"] = file["/"]
        for number in range(300):
            file[f"{number:03d}{'n' * 1000}"] = np.zeros((2, 2))
    with open_hdf5(tmp_path / "a.h5") as file:
        assert len(array_names(file)) == 10
    for read in (nd.open_source, lambda path: nd.open_source(f"{path}:none"), lambda p: HDF5Dataset(str(p)).check()):
        with pytest.raises(nd.DataError) as caught:
            read(tmp_path / "a.h5")
        assert len(str(caught.value)) <= MAX_MESSAGE_LENGTH
    with pytest.raises(nd.DataError, match="no such file"):
        nd.open_source("a/" * 5000 + "b.h5")


def test_opened_files_are_checked(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(b"12345")
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "in" / "link").symlink_to("file")
    (tmp_path / "in" / "out").symlink_to("../secret")
    with open_regular(tmp_path / "in" / "link", tmp_path / "in") as file:
        assert file.read() == b"12345"
    with pytest.raises(nd.DataError, match="points outside"):
        open_regular(tmp_path / "in" / "out", tmp_path / "in")
    with pytest.raises(nd.DataError, match="points outside"):
        open_regular(tmp_path / "in" / ".." / "secret", tmp_path / "in")
    assert read_bytes(tmp_path / "in" / "file", 5) == b"12345"
    with pytest.raises(nd.DataError, match="larger than 4 bytes"):
        read_bytes(tmp_path / "in" / "file", 4)


def test_archive_with_a_linked_batch(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    with pytest.raises(nd.DataError, match="has no data_batch_1"):
        CIFAR10Files(tmp_path / "a.tar.gz").file_sizes()


def test_oversized_archive(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        bomb = tarfile.TarInfo("zeros")
        bomb.size = 1 << 40
        archive.addfile(bomb)
    with pytest.raises(nd.DataError, match="decompresses to more than"):
        CIFAR10Files(tmp_path / "a.tar").file_sizes()


def test_links_out_of_image_folders_are_refused(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    for name in "ab":
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "in" / name / "x.png")
    (tmp_path / "in" / "a" / "y.png").symlink_to("../b/x.png")
    assert open_split_sources([tmp_path / "in"], ImageLoader())["train"].count == 3
    Image.new("L", (4, 4)).save(tmp_path / "secret.png")
    (tmp_path / "in" / "a" / "z.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(nd.DataError, match=r"z\.png: is a link to a file, possibly outside .*, and is not followed"):
        open_split_sources([tmp_path / "in"], ImageLoader())


def test_long_messages_are_shortened():
    error = nd.DataError("file: " + "x" * 10**6 + "; rename it")
    assert str(error).startswith("file: x")
    assert str(error).endswith("x; rename it")
    assert len(str(error)) <= MAX_MESSAGE_LENGTH
