"""One chunk that does not unpack to its cells: refused with the file and the chunk named, never other numbers."""

import struct
import zlib

import numpy as np
import pytest

import neondist as nd
from neondist.io.hdf5 import ChecksumTable, chunks

h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
CELLS = np.random.default_rng(0).integers(0, 50, (40, 50)).astype("i4")
AT = (slice(16, 32), slice(16, 32))
RAW = CELLS[AT].tobytes()


def look(path, rows=(0, 40)):
    """Return 'right', 'wrong', or the message of a refusal."""
    try:
        with nd.open_source(path) as source:
            found = source.read([rows, (0, 50), (0, 1)])[..., 0]
    except nd.DataError as error:
        return str(error)
    return "right" if np.array_equal(found, CELLS[slice(*rows)]) else "wrong"


def cuts(raw):
    """Yield packed bytes of which some are missing, or that are none."""
    yield from ((f"first {n}", raw[:n]) for n in (1, 3, 4, 12, len(raw) // 2, len(raw) - 8, len(raw) - 1) if n > 0)
    yield "random", np.random.default_rng(1).bytes(len(raw))


FILTERS = {
    "deflate": {"compression": "gzip"}, "shuffled deflate": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"}, "szip": {"compression": "szip"}, "Fletcher-32": {"fletcher32": True},
    "deflate with a sum": {"compression": "gzip", "fletcher32": True}, "shuffle": {"shuffle": True},
    "scaled": {"scaleoffset": 0}, "scaled deflate": {"scaleoffset": 0, "compression": "gzip"},
    "lzf with a sum": {"compression": "lzf", "fletcher32": True},
}  # fmt: skip
NOT_TOLD = {("shuffle", "random"), ("scaled", "random")}  # any bytes are cells


def packed_hdf5(path, options, chunk=None, more=0):
    """Write the array, one chunk of it as it is given, or what more cells pack to."""
    with h5py.File(path, "w") as file:
        array = file.create_dataset("t", data=CELLS, chunks=(16, 16), **options)
        for axis, name in enumerate(("lat", "lon") if path.suffix == ".nc" else ()):
            file[name] = np.arange(CELLS.shape[axis], dtype="f4")
            file[name].make_scale(name)
            array.dims[axis].attach_scale(file[name])
        if more:
            file.create_dataset("other", data=np.ones(more, "i4"), chunks=(more,), **options)
            chunk = file["other"].id.read_direct_chunk((0,))[1]
            del file["other"]
        if chunk is not None:
            array.id.write_direct_chunk((16, 16), chunk)
        return array.id.read_direct_chunk((16, 16))[1]


@pytest.mark.parametrize("suffix", [".h5", ".nc"])
@pytest.mark.parametrize("kind", FILTERS)
def test_chunks_of_hdf5(tmp_path, kind, suffix):
    path, options = tmp_path / f"a{suffix}", FILTERS[kind]
    if options.get("compression") == "szip" and not h5py.h5z.filter_avail(4):
        pytest.skip("this HDF5 has no szip")
    sound = packed_hdf5(path, options)
    assert look(path) == "right"
    for name, raw in cuts(sound):
        packed_hdf5(path, options, raw)
        found = look(path)
        told = found.startswith(f"{path}: damaged") and "(t: " in found
        assert found == "right" or told or (kind, name.split()[0]) in NOT_TOLD, (name, found)
    if kind != "shuffle" and "scaled" not in kind:
        for more, told in ((128, "to 512 instead of 1024"), (255, "to 1020"), (257, "to more"), (1 << 18, "to more")):
            packed_hdf5(path, options, more=more)
            assert f"(t: its chunk at [16, 16] unpacks {told}" in look(path)
            assert look(path, (0, 16)) == "right"


def test_only_what_is_read_is_looked_at_and_once(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    packed_hdf5(path, FILTERS["deflate"])
    sizes, real = [], chunks.unpacked_size
    monkeypatch.setattr(chunks, "unpacked_size", lambda *given: sizes.append(real(*given)) or sizes[-1])
    with nd.open_source(path) as source:
        for _ in range(2):
            source.read([(3, 20), (0, 16), (0, 1)])
        assert sizes == [1024] * 2
        source.read([(0, 40), (0, 50), (0, 1)])
    assert sizes == [1024] * 12


def test_coordinates_of_damaged_chunks(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["t"] = CELLS
        for axis, name in enumerate(("lat", "lon")):
            file.create_dataset(name, data=np.arange(CELLS.shape[axis], dtype="f4"), chunks=(64,)[:1],
                                maxshape=(None,), compression="gzip")  # fmt: skip
            file[name].make_scale(name)
            file["t"].dims[axis].attach_scale(file[name])
        file["lat"].id.write_direct_chunk((0,), zlib.compress(bytes(40)))
    told = r"a\.nc: .*lat: its chunk at \[0\] unpacks to 40 instead of 256"
    with nd.open_source(tmp_path / "a.nc") as source, pytest.raises(nd.DataError, match=told):
        source.auxiliary_variables()


@pytest.mark.parametrize("size", [1, 4])
def test_a_chunk_shorter_than_its_checksum(tmp_path, size):
    """libhdf5 dies of it, also where checksums of ours would tell afterwards what is wrong."""
    packed_hdf5(tmp_path / "a.h5", FILTERS["Fletcher-32"], bytes(size))
    table = ChecksumTable(CELLS.shape, (16, 16))
    for first in (0, 16, 32):
        table.add(CELLS[first : first + 16], first)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        table.write(file, "t")
    assert "(t: its chunk at [16, 16] is shorter than its checksum)" in look(f"{tmp_path}/a.h5:t")


@pytest.mark.parametrize("chunks", [None, (16, 16)])
@pytest.mark.parametrize("fill", [False, True])
def test_cells_that_were_never_written(tmp_path, fill, chunks):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if not fill:
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if chunks:
        properties.set_chunk(chunks)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple(CELLS.shape)
        array = h5py.Dataset(h5py.h5d.create(file.id, b"t", h5py.h5t.NATIVE_INT32, space, properties))
        if chunks:
            array[:16] = CELLS[:16]
    zeros = [(16, 32), (0, 50), (0, 1)]
    with nd.open_source(tmp_path / "a.h5") as source:
        if chunks:
            np.testing.assert_array_equal(source.read([(0, 16), (0, 50), (0, 1)])[..., 0], CELLS[:16])
        if fill:
            assert not source.read(zeros).any()
        else:
            told = r"a\.h5: .*\(t: .*was never written, and it has no fill value"
            with pytest.raises(nd.DataError, match=told):
                source.read(zeros)


def test_a_filter_that_is_not_installed(tmp_path):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((16, 16))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        properties.set_filter(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FLAG_OPTIONAL, (4,))
        space = h5py.h5s.create_simple((32, 32))
        h5py.h5d.create(file.id, b"t", h5py.h5t.NATIVE_INT32, space, properties)
    raw = (tmp_path / "a.h5").read_bytes()
    told = struct.pack("<HHHH", 1, 8, 1, 1) + b"deflate\0"
    assert raw.count(told) == 1
    (tmp_path / "a.h5").write_bytes(raw.replace(told, struct.pack("<HHHH", 34567, 8, 1, 1) + b"mine\0\0\0\0"))
    told = r"'t' is packed with the HDF5 filter 34567 \(mine\), which is not installed"
    with nd.open_source(tmp_path / "a.h5") as source, pytest.raises(nd.DataError, match=told):
        source.read([(0, 32), (0, 32), (0, 1)])


def numcodec(name, **more):
    return pytest.importorskip("numcodecs").get_codec({"id": name, **more})


def zarr_array(path, version, codec):
    zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
    codecs = {"gzip": zarr.codecs.GzipCodec, "blosc": zarr.codecs.BloscCodec, "zstd": zarr.codecs.ZstdCodec}
    how = None if codec is None else numcodec(codec) if version == 2 else codecs[codec]()
    array = zarr.create_array(
        path, shape=CELLS.shape, chunks=(16, 16), dtype="i4", zarr_format=version, compressors=how, fill_value=0,
        overwrite=True,
    )  # fmt: skip
    array[:] = CELLS
    return path / ("1.1" if version == 2 else "c/1/1")


@pytest.mark.parametrize(
    ("codec", "version"),
    [*((one, 2) for one in (None, "gzip", "zlib", "blosc", "zstd", "lz4", "bz2", "lzma")),
     *((one, 3) for one in (None, "gzip", "blosc", "zstd"))],
)  # fmt: skip
def test_chunks_of_zarr(tmp_path, codec, version):
    path = tmp_path / "a.zarr"
    chunk = zarr_array(path, version, codec)
    sound = chunk.read_bytes()
    encode = bytes if codec is None else numcodec(codec).encode
    cases = [*cuts(sound), ("nothing", b""), *((f"{n} bytes", encode(bytes(n))) for n in (512, 1020, 1023, 4096))]
    for name, raw in cases:
        chunk.write_bytes(raw)
        found = look(path)
        if codec is not None or name != "random":
            assert found.startswith(str(path)) or (codec, name) == ("blosc", f"first {len(sound) - 1}"), (name, found)
    chunk.write_bytes(sound)
    assert look(path) == "right"


def frame(*blocks):
    """Return a frame of Zstandard that does not tell its size: (kind, content, size) of blocks."""
    parts = [((n << 3) | (kind << 1) | (at == len(blocks) - 1)).to_bytes(3, "little") + raw
             for at, (kind, raw, n) in enumerate(blocks)]  # fmt: skip
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(parts)


@pytest.mark.parametrize("version", [2, 3])
def test_frames_of_zstandard(tmp_path, version):
    """Frames may tell no size, follow each other, or be skipped."""
    path = tmp_path / "a.zarr"
    chunk, encode = zarr_array(path, version, "zstd"), numcodec("zstd").encode
    untold = frame((0, RAW[:500], 500), (0, RAW[500:], 524))
    for raw in (untold, encode(RAW[:512]) + encode(RAW[512:]), b"\x50\x2a\x4d\x18\x03\0\0\0abc" + encode(RAW)):
        chunk.write_bytes(raw)
        assert look(path) == "right"
    for raw, told in (
        (frame((0, RAW[:500], 500)), "cannot be read"),
        (untold[:-5], "cannot be read"),
        (frame(*[(1, b"\0", 1 << 17)] * 20_000), "unpacks to more"),  # 2.6 GB
        (encode(RAW) + frame(*[(1, b"\0", 1 << 17)] * 20_000), "unpacks to more"),
    ):
        chunk.write_bytes(raw)
        assert told in look(path)


@pytest.mark.parametrize("codec", ["gzip", "bz2", "lzma"])
def test_streams_that_follow_each_other(tmp_path, monkeypatch, codec):
    monkeypatch.setattr("neondist.io.packed_size._UNHARMFUL", 0)
    path = tmp_path / "a.zarr"
    chunk, encode = zarr_array(path, 2, codec), numcodec(codec).encode
    chunk.write_bytes(encode(RAW[:512]) + encode(RAW[512:]))
    assert look(path) == "right"
    chunk.write_bytes(encode(RAW[:512]) + encode(bytes(1 << 22)))
    assert "unpacks to more than 1.06 MB, the limit for its shape" in look(path)


ALL = 2**64 - 1
INDICES = {
    "outside": (10**6, 20), "too long": (0, 10**6), "huge": (2**63, 2**62), "wrapped": (ALL - 1, 100),
    "of no bytes": (0, 0), "half missing": (ALL, 5), "cut": (0, -3), "as another": "another",
}  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "place", "summed"),
    [("gzip", "start", True), ("gzip", "end", False), (None, "start", False), (None, "end", True)],
)
def test_shards(tmp_path, codec, place, summed):
    """Boxes of whole shards and of parts of them, which zarr reads in two ways."""
    zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
    crc = pytest.importorskip("google_crc32c", reason="zarr needs it too")
    of, path = zarr.codecs, tmp_path / "a.zarr"
    shard = of.ShardingCodec(
        chunk_shape=(8, 8), codecs=[of.BytesCodec(), *([of.GzipCodec()] if codec else [])], index_location=place,
        index_codecs=[of.BytesCodec(), *([of.Crc32cCodec()] if summed else [])],
    )  # fmt: skip
    array = zarr.create(store=path, shape=(40, 50), chunks=(16, 16), dtype="i4", zarr_format=3, codecs=[shard],
                        fill_value=0)  # fmt: skip
    array[:] = CELLS
    boxes, chunk = [(0, 40), (16, 24), (17, 18)], path / "c/1/1"
    sound = chunk.read_bytes()
    assert [look(path, box) for box in boxes] == ["right"] * 3
    at = 0 if place == "start" else len(sound) - 64 - 4 * summed

    def written(change):
        raw, index = bytearray(sound), list(struct.unpack("<8Q", sound[at : at + 64]))
        raw[at : at + 64] = struct.pack("<8Q", *change(index))
        if summed:
            raw[at + 64 : at + 68] = struct.pack("<I", crc.value(bytes(raw[at : at + 64])))
        return bytes(raw)

    for name, entry in INDICES.items():

        def change(index, entry=entry):
            start, length = index[2:4] if entry == "another" else (entry[0] or index[0], entry[1])
            return [start, length if length >= 0 else index[1] + length, *index[2:]]

        chunk.write_bytes(written(change))
        for box in boxes:
            assert look(path, box).startswith(str(path)), (name, box)
    for raw in (b"", sound[: len(sound) // 2]):
        chunk.write_bytes(raw)
        assert look(path).startswith(str(path))
    bomb = numcodec("gzip").encode(bytes(1 << 27))
    if codec and place == "start":
        chunk.write_bytes(written(lambda index: [len(sound), len(bomb), *index[2:]]) + bomb)
        found = [look(path, box) for box in boxes]
        assert all(one.startswith(str(path)) for one in found), found
