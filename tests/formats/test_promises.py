"""Files whose headers specify more than fits in memory, missing libraries, and formats of plugins."""

import importlib.metadata
import os
import struct
import time
import zlib

import h5py
import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.formats import DraftSink, Format, table
from neondist.formats.npy import NPYSource


def test_oversized_tiff_strip(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((64, 64), "uint8"), compression="zlib", rowsperstrip=64)
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as file:
        for name in ("ImageWidth", "ImageLength", "RowsPerStrip"):
            file.pages[0].tags[name].overwrite(60000)
    with pytest.raises(nd.DataError, match=r"a\.tif: 3\.6 GB must be decoded at once"):
        nd.open_source(tmp_path / "a.tif")


def test_tile_larger_than_its_shape(tmp_path):
    """Truncate or refuse a tile that decompresses to a thousand times its size."""
    tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((16, 16), "uint8"), compression="zlib", tile=(16, 16))
    compressed = zlib.compress(bytes(1 << 26), 9)
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as file:
        offset = file.filehandle.size
        file.pages[0].tags["TileOffsets"].overwrite(offset)
        file.pages[0].tags["TileByteCounts"].overwrite(len(compressed))
    with open(tmp_path / "a.tif", "ab") as file:
        file.write(compressed)
    with nd.open_source(tmp_path / "a.tif") as source:
        try:
            assert source.read(nd.Box.of(source.shape)).shape == (16, 16, 1)
        except nd.DataError as error:
            assert "a.tif" in str(error)  # noqa: PT017 - both are valid


@pytest.mark.parametrize(
    ("size", "data"),
    [
        (10**9, "<TiffData/>"),
        (1, "<TiffData PlaneCount='1000000000'/>"),
        (1, "<TiffData IFD='0' NumPlanes='1e12'/>"),
        (1, "<TiffData/><A Start='0' End='1' Step='1e-12'/>"),
    ],
)
def test_too_many_planes_in_ome_xml(tmp_path, size, data):
    """Refuse files with so many planes that tifffile would list them for minutes."""
    tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")
    text = (
        "<?xml version='1.0'?><OME xmlns='http://www.openmicroscopy.org/Schemas/OME/2016-06'><Image ID='Image:0'>"
        "<Pixels ID='Pixels:0' DimensionOrder='XYZCT' Type='uint8' SizeX='4' SizeY='4' SizeC='1' SizeT='1'"
        f" SizeZ='{size}'>{data}</Pixels></Image></OME>"
    )
    tifffile.imwrite(tmp_path / "a.ome.tif", np.zeros((4, 4), "u1"), description=text, metadata=None)
    with pytest.raises(
        nd.DataError, match=r"a\.ome\.tif: its OME-XML specifies \d+ planes, but at most 1,000,000 are supported"
    ):
        nd.open_source(tmp_path / "a.ome.tif")


def test_deeply_nested_variable(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file.create_group("g/" * 300)["v"] = np.zeros((4, 4))
    with pytest.raises(nd.DataError, match=r"a\.nc: the variable is nested in more than 100 groups; move it up"):
        nd.open_source(f"{tmp_path}/a.nc:{'g/' * 300}v")


@pytest.mark.parametrize("name", ["c/0/0", "zarr.json"])
def test_oversized_zarr_file(tmp_path, name):
    zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
    zarr.create_array(tmp_path / "a.zarr", data=np.ones((4, 4)))
    os.truncate(tmp_path / "a.zarr" / name, 1 << 43)  # a sparse file
    match = rf"a\.zarr/{name}.* needs .* of memory"
    with pytest.raises(nd.DataError, match=match), nd.open_source(tmp_path / "a.zarr") as source:
        source.read(nd.Box.of(source.shape))


def test_oversized_picture(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    Image.fromarray(np.zeros((4, 4, 3), "uint8")).save(tmp_path / "a.png")
    raw = bytearray((tmp_path / "a.png").read_bytes())
    raw[16:24] = struct.pack(">II", 900000, 900000)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    (tmp_path / "a.png").write_bytes(raw)
    with pytest.raises(nd.DataError, match=r"a\.png: an image of 900000 x 900000 needs .* of memory"):
        nd.open_source(tmp_path / "a.png")


def test_oversized_hdf5(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", (60000, 60000), "u1", chunks=(60000, 30000), compression="gzip")
        file.create_dataset("many", (10**7, 10**7), "u1", chunks=(64, 64), compression="gzip")
    with pytest.raises(nd.DataError, match=r"a\.h5: 1\.8 GB must be decoded at once"):
        nd.open_source(tmp_path / "a.h5")
    with nd.open_source(f"{tmp_path}/a.h5:many") as source:
        assert not source.read([(10**6, 10**6 + 9), (5, 8), (0, 1)]).any()
        with pytest.raises(nd.DataError, match="needs 100 TB of memory"):
            source.read(nd.Box.of(source.shape))


def test_truncated_npy(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((30, 40)))
    os.truncate(tmp_path / "a.npy", 5000)
    with pytest.raises(nd.DataError, match=r"a\.npy: is truncated: its header specifies an array of \[30, 40\]"):
        nd.open_source(tmp_path / "a.npy")


def test_unreadable_files(tmp_path):
    (tmp_path / "a.npy").mkdir()
    with pytest.raises(nd.DataError, match=r"a\.npy: cannot be read"):
        nd.open_source(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.zeros((3, 4)))
    (tmp_path / "b.npy").chmod(0)
    if os.geteuid():
        with pytest.raises(nd.DataError, match=r"b\.npy: .*check its permissions"):
            nd.open_source(tmp_path / "b.npy")
    np.save(tmp_path / "c.npy", np.zeros((3, 4), complex))
    with pytest.raises(nd.DataError, match=r"c\.npy: holds complex128, not numbers"):
        nd.open_source(tmp_path / "c.npy")


def test_missing_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "find_module_spec", lambda name: None)
    (tmp_path / "a.zarr").touch()
    (tmp_path / "a.xyz").touch()
    with pytest.raises(nd.UserError, match=r"Zarr needs zarr: pip install 'neondist\[files\]'"):
        nd.open_source(tmp_path / "a.zarr")
    with pytest.raises(nd.UserError, match=r"TIFF needs tifffile: pip install"):
        nd.create_sink(tmp_path / "a.svs", (2, 2, 1), "uint8", "YXC")
    with pytest.raises(nd.DataError, match=r"unknown file type; .*nibabel, tifffile, zarr not installed: pip install"):
        nd.open_source(tmp_path / "a.xyz")


def register_plugin(monkeypatch, plugin):
    class EntryPoint:
        value = "theirs:FORMAT"

        @staticmethod
        def load():
            return plugin

    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [EntryPoint] if group == table.PLUGIN_GROUP else []
    )
    return EntryPoint


class MemoryMapSink(DraftSink):
    """Sink of a plugin, which overrides the documented methods only."""

    def _create_empty_file(self, like):
        time.sleep(0.1)  # for ranks that do not wait
        np.lib.format.open_memmap(self._temp_path, "w+", self.dtype, self.shape)
        return {}

    def _open_created_file(self, open_arguments):
        self.array = np.lib.format.open_memmap(self._temp_path, "r+")

    def _write(self, cells, array):
        self.array[cells] = array

    def flush(self):
        self.array.flush()

    def _close_file(self):
        del self.array


def test_sinks_of_plugins_on_several_ranks(tmp_path, monkeypatch):
    register_plugin(monkeypatch, Format("XYZ", (".xyz",), NPYSource, MemoryMapSink))
    values = np.random.default_rng(0).random((7, 5, 2))

    def job(comm, resume, commit):
        grid = nd.ProcessGrid(comm, cols=1)
        with nd.create_sink(tmp_path / "a.xyz", values.shape, "float64", "YXC", grid=grid, resume=resume) as sink:
            box = [(7 * grid.rank // 3, 7 * (grid.rank + 1) // 3), (0, 5), (0, 2)]
            if not sink.resumed:
                sink.write(box, values[slice(*box[0])])
            sink.flush()
            if commit:
                sink.commit()
            return sink.resumed

    assert loopback.run(3, lambda comm: job(comm, resume=True, commit=False)) == [False] * 3
    assert loopback.run(3, lambda comm: job(comm, resume=True, commit=True)) == [True] * 3
    with nd.open_source(tmp_path / "a.xyz") as source:
        np.testing.assert_array_equal(source.read(nd.Box.of(source.shape)), values)
    assert [path.name for path in tmp_path.iterdir()] == ["a.xyz"]


def test_format_plugins(tmp_path, monkeypatch):
    entry_point = register_plugin(monkeypatch, Format("XYZ", (".xyz",), NPYSource))
    np.save(tmp_path / "a.npy", np.ones((3, 4)))
    (tmp_path / "a.npy").rename(tmp_path / "a.xyz")
    with nd.open_source(tmp_path / "a.xyz") as source:
        assert source.read(nd.Box.of(source.shape)).sum() == 12
    with pytest.raises(nd.ConfigError, match=r"XYZ cannot be written; choose HDF5"):
        nd.create_sink(tmp_path / "b.xyz", (2, 2, 1), "uint8", "YXC")
    monkeypatch.setattr(entry_point, "load", staticmethod(lambda: 7))
    with pytest.raises(nd.ConfigError, match=r"entry point theirs:FORMAT of neondist\.formats is no"):
        nd.open_source(tmp_path / "a.xyz")
