"""Files with one damaged chunk, which are refused with the names of the file and the chunk, or read correctly."""

import struct
import zlib

import numpy as np
import pytest

import neondist as nd
from neondist.io.hdf5 import ChecksumTable, chunks

h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
CELLS = np.random.default_rng(0).integers(0, 50, (40, 50)).astype("i4")
CHUNK = (slice(16, 32), slice(16, 32))
RAW = CELLS[CHUNK].tobytes()


def read_outcome(path, rows=(0, 40)):
    """Return 'correct', 'wrong', or the message of the error."""
    try:
        with nd.open_source(path) as source:
            values = source.read([rows, (0, 50), (0, 1)])[..., 0]
    except nd.DataError as error:
        return str(error)
    return "correct" if np.array_equal(values, CELLS[slice(*rows)]) else "wrong"


def damage_variants(raw):
    """Yield names and bytes of truncated and random chunks."""
    yield from ((f"first {n}", raw[:n]) for n in (1, 3, 4, 12, len(raw) // 2, len(raw) - 8, len(raw) - 1) if n > 0)
    yield "random", np.random.default_rng(1).bytes(len(raw))


FILTERS = {
    "deflate": {"compression": "gzip"}, "shuffled deflate": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"}, "szip": {"compression": "szip"}, "Fletcher-32": {"fletcher32": True},
    "deflate with a sum": {"compression": "gzip", "fletcher32": True}, "shuffle": {"shuffle": True},
    "scaled": {"scaleoffset": 0}, "scaled deflate": {"scaleoffset": 0, "compression": "gzip"},
    "lzf with a sum": {"compression": "lzf", "fletcher32": True},
}  # fmt: skip
UNDETECTABLE = {("shuffle", "random"), ("scaled", "random")}  # any bytes are valid


def write_hdf5(path, options, chunk=None, count=0):
    """Write the array with one chunk replaced by `chunk`, or by a compressed chunk of `count` values."""
    with h5py.File(path, "w") as file:
        array = file.create_dataset("t", data=CELLS, chunks=(16, 16), **options)
        for axis, name in enumerate(("lat", "lon") if path.suffix == ".nc" else ()):
            file[name] = np.arange(CELLS.shape[axis], dtype="f4")
            file[name].make_scale(name)
            array.dims[axis].attach_scale(file[name])
        if count:
            file.create_dataset("other", data=np.ones(count, "i4"), chunks=(count,), **options)
            chunk = file["other"].id.read_direct_chunk((0,))[1]
            del file["other"]
        if chunk is not None:
            array.id.write_direct_chunk((16, 16), chunk)
        return array.id.read_direct_chunk((16, 16))[1]


@pytest.mark.parametrize("suffix", [".h5", ".nc"])
@pytest.mark.parametrize("kind", FILTERS)
def test_damaged_hdf5_chunks(tmp_path, kind, suffix):
    path, options = tmp_path / f"a{suffix}", FILTERS[kind]
    if options.get("compression") == "szip" and not h5py.h5z.filter_avail(4):
        pytest.skip("this HDF5 has no szip")
    intact = write_hdf5(path, options)
    assert read_outcome(path) == "correct"
    for name, raw in damage_variants(intact):
        write_hdf5(path, options, raw)
        outcome = read_outcome(path)
        reported = outcome.startswith(f"{path}: damaged") and "(t: " in outcome
        assert outcome == "correct" or reported or (kind, name.split()[0]) in UNDETECTABLE, (name, outcome)
    if kind != "shuffle" and "scaled" not in kind:
        sizes = {128: "to 512 instead of 1024", 255: "to 1020", 257: "to more", 1 << 18: "to more"}
        for count, message in sizes.items():
            write_hdf5(path, options, count=count)
            assert f"(t: its chunk at [16, 16] unpacks {message}" in read_outcome(path)
            assert read_outcome(path, (0, 16)) == "correct"


def test_only_requested_chunks_are_checked(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    write_hdf5(path, FILTERS["deflate"])
    sizes, original = [], chunks.decompressed_size
    monkeypatch.setattr(chunks, "decompressed_size", lambda *arguments: sizes.append(original(*arguments)) or sizes[-1])
    with nd.open_source(path) as source:
        for _ in range(2):
            source.read([(3, 20), (0, 16), (0, 1)])
        assert sizes == [1024] * 2
        source.read([(0, 40), (0, 50), (0, 1)])
    assert sizes == [1024] * 12


def test_damaged_coordinate_chunk(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["t"] = CELLS
        for axis, name in enumerate(("lat", "lon")):
            file.create_dataset(name, data=np.arange(CELLS.shape[axis], dtype="f4"), chunks=(64,)[:1],
                                maxshape=(None,), compression="gzip")  # fmt: skip
            file[name].make_scale(name)
            file["t"].dims[axis].attach_scale(file[name])
        file["lat"].id.write_direct_chunk((0,), zlib.compress(bytes(40)))
    message = r"a\.nc: .*lat: its chunk at \[0\] unpacks to 40 instead of 256"
    with nd.open_source(tmp_path / "a.nc") as source, pytest.raises(nd.DataError, match=message):
        source.auxiliary_variables()


@pytest.mark.parametrize("size", [1, 4])
def test_chunk_shorter_than_its_checksum(tmp_path, size):
    """Refuse the chunk before libhdf5 reads it and crashes, even if a checksum would detect the damage afterwards."""
    write_hdf5(tmp_path / "a.h5", FILTERS["Fletcher-32"], bytes(size))
    table = ChecksumTable(CELLS.shape, (16, 16))
    for first in (0, 16, 32):
        table.add(CELLS[first : first + 16], first)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        table.write(file, "t")
    assert "(t: its chunk at [16, 16] is shorter than its checksum)" in read_outcome(f"{tmp_path}/a.h5:t")


@pytest.mark.parametrize("chunks", [None, (16, 16)])
@pytest.mark.parametrize("fill", [False, True])
def test_unwritten_cells(tmp_path, fill, chunks):
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
            message = r"a\.h5: .*\(t: .*was never written, and it has no fill value"
            with pytest.raises(nd.DataError, match=message):
                source.read(zeros)


def test_missing_filter(tmp_path):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((16, 16))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        properties.set_filter(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FLAG_OPTIONAL, (4,))
        space = h5py.h5s.create_simple((32, 32))
        h5py.h5d.create(file.id, b"t", h5py.h5t.NATIVE_INT32, space, properties)
    raw = (tmp_path / "a.h5").read_bytes()
    deflate = struct.pack("<HHHH", 1, 8, 1, 1) + b"deflate\0"
    assert raw.count(deflate) == 1
    (tmp_path / "a.h5").write_bytes(raw.replace(deflate, struct.pack("<HHHH", 34567, 8, 1, 1) + b"mine\0\0\0\0"))
    message = r"'t' is packed with the HDF5 filter 34567 \(mine\), which is not installed"
    with nd.open_source(tmp_path / "a.h5") as source, pytest.raises(nd.DataError, match=message):
        source.read([(0, 32), (0, 32), (0, 1)])


def get_codec(name, **options):
    return pytest.importorskip("numcodecs").get_codec({"id": name, **options})


def write_zarr(path, version, codec):
    zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
    zarr_codecs = {"gzip": zarr.codecs.GzipCodec, "blosc": zarr.codecs.BloscCodec, "zstd": zarr.codecs.ZstdCodec}
    compressors = None if codec is None else get_codec(codec) if version == 2 else zarr_codecs[codec]()
    array = zarr.create_array(
        path, shape=CELLS.shape, chunks=(16, 16), dtype="i4", zarr_format=version, compressors=compressors,
        fill_value=0, overwrite=True,
    )  # fmt: skip
    array[:] = CELLS
    return path / ("1.1" if version == 2 else "c/1/1")


@pytest.mark.parametrize(
    ("codec", "version"),
    [*((codec, 2) for codec in (None, "gzip", "zlib", "blosc", "zstd", "lz4", "bz2", "lzma")),
     *((codec, 3) for codec in (None, "gzip", "blosc", "zstd"))],
)  # fmt: skip
def test_damaged_zarr_chunks(tmp_path, codec, version):
    path = tmp_path / "a.zarr"
    chunk = write_zarr(path, version, codec)
    intact = chunk.read_bytes()
    encode = bytes if codec is None else get_codec(codec).encode
    cases = [
        *damage_variants(intact),
        ("nothing", b""),
        *((f"{n} bytes", encode(bytes(n))) for n in (512, 1020, 1023, 4096)),
    ]
    for name, raw in cases:
        chunk.write_bytes(raw)
        outcome = read_outcome(path)
        if codec is not None or name != "random":
            undetectable = (codec, name) == ("blosc", f"first {len(intact) - 1}")
            assert outcome.startswith(str(path)) or undetectable, (name, outcome)
    chunk.write_bytes(intact)
    assert read_outcome(path) == "correct"


def zstandard_frame(*blocks):
    """Return a Zstandard frame without its content size, of blocks (kind, content, size)."""
    parts = [((size << 3) | (kind << 1) | (number == len(blocks) - 1)).to_bytes(3, "little") + raw
             for number, (kind, raw, size) in enumerate(blocks)]  # fmt: skip
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(parts)


@pytest.mark.parametrize("version", [2, 3])
def test_zstandard_frames(tmp_path, version):
    """Read frames without a size, concatenated frames and skippable frames."""
    path = tmp_path / "a.zarr"
    chunk, encode = write_zarr(path, version, "zstd"), get_codec("zstd").encode
    unsized = zstandard_frame((0, RAW[:500], 500), (0, RAW[500:], 524))
    for raw in (unsized, encode(RAW[:512]) + encode(RAW[512:]), b"\x50\x2a\x4d\x18\x03\0\0\0abc" + encode(RAW)):
        chunk.write_bytes(raw)
        assert read_outcome(path) == "correct"
    for raw, message in (
        (zstandard_frame((0, RAW[:500], 500)), "cannot be read"),
        (unsized[:-5], "cannot be read"),
        (zstandard_frame(*[(1, b"\0", 1 << 17)] * 20_000), "unpacks to more"),  # 2.6 GB
        (encode(RAW) + zstandard_frame(*[(1, b"\0", 1 << 17)] * 20_000), "unpacks to more"),
    ):
        chunk.write_bytes(raw)
        assert message in read_outcome(path)


@pytest.mark.parametrize("codec", ["gzip", "bz2", "lzma"])
def test_concatenated_streams(tmp_path, monkeypatch, codec):
    monkeypatch.setattr("neondist.io.decompressed_size._ALWAYS_ACCEPTED_BYTES", 0)
    path = tmp_path / "a.zarr"
    chunk, encode = write_zarr(path, 2, codec), get_codec(codec).encode
    chunk.write_bytes(encode(RAW[:512]) + encode(RAW[512:]))
    assert read_outcome(path) == "correct"
    chunk.write_bytes(encode(RAW[:512]) + encode(bytes(1 << 22)))
    assert "unpacks to more than 1.06 MB, the limit for its shape" in read_outcome(path)


ALL = 2**64 - 1
SHARD_INDICES = {
    "out of range": (10**6, 20), "too long": (0, 10**6), "huge": (2**63, 2**62), "wrapped": (ALL - 1, 100),
    "empty": (0, 0), "half missing": (ALL, 5), "truncated": (0, -3), "duplicate": "duplicate",
}  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "location", "checksum"),
    [("gzip", "start", True), ("gzip", "end", False), (None, "start", False), (None, "end", True)],
)
def test_damaged_shards(tmp_path, codec, location, checksum):
    """Read complete shards and parts of shards, which zarr reads differently."""
    zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
    crc = pytest.importorskip("google_crc32c", reason="zarr needs it too")
    codecs, path = zarr.codecs, tmp_path / "a.zarr"
    shard = codecs.ShardingCodec(
        chunk_shape=(8, 8), codecs=[codecs.BytesCodec(), *([codecs.GzipCodec()] if codec else [])],
        index_location=location,
        index_codecs=[codecs.BytesCodec(), *([codecs.Crc32cCodec()] if checksum else [])],
    )  # fmt: skip
    array = zarr.create(store=path, shape=(40, 50), chunks=(16, 16), dtype="i4", zarr_format=3, codecs=[shard],
                        fill_value=0)  # fmt: skip
    array[:] = CELLS
    boxes, chunk = [(0, 40), (16, 24), (17, 18)], path / "c/1/1"
    intact = chunk.read_bytes()
    assert [read_outcome(path, box) for box in boxes] == ["correct"] * 3
    offset = 0 if location == "start" else len(intact) - 64 - 4 * checksum

    def edit_index(change):
        raw, index = bytearray(intact), list(struct.unpack("<8Q", intact[offset : offset + 64]))
        raw[offset : offset + 64] = struct.pack("<8Q", *change(index))
        if checksum:
            raw[offset + 64 : offset + 68] = struct.pack("<I", crc.value(bytes(raw[offset : offset + 64])))
        return bytes(raw)

    for name, entry in SHARD_INDICES.items():

        def change(index, entry=entry):
            start, length = index[2:4] if entry == "duplicate" else (entry[0] or index[0], entry[1])
            return [start, length if length >= 0 else index[1] + length, *index[2:]]

        chunk.write_bytes(edit_index(change))
        for box in boxes:
            assert read_outcome(path, box).startswith(str(path)), (name, box)
    for raw in (b"", intact[: len(intact) // 2]):
        chunk.write_bytes(raw)
        assert read_outcome(path).startswith(str(path))
    bomb = get_codec("gzip").encode(bytes(1 << 27))
    if codec and location == "start":
        chunk.write_bytes(edit_index(lambda index: [len(intact), len(bomb), *index[2:]]) + bomb)
        outcomes = [read_outcome(path, box) for box in boxes]
        assert all(outcome.startswith(str(path)) for outcome in outcomes), outcomes
