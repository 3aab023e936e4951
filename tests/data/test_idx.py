import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from small_datasets import encode_idx, write_bytes

from neondist.data.datasets.idx import IMAGES_MAGIC, LABELS_MAGIC, open_idx, read_idx_header
from neondist.errors import DataError

PIXELS = np.random.RandomState(0).randint(0, 256, (25, 4, 5)).astype(np.uint8)
RAW = encode_idx(PIXELS)


def read(path, magic=IMAGES_MAGIC, chunk=1000):
    with open_idx(path, magic) as reader:
        return np.concatenate(list(reader.read_chunks(chunk)))


@pytest.mark.parametrize("name", ["a.gz", "a"])
@pytest.mark.parametrize("chunk", [1, 7, 25, 1000])
def test_round_trip(tmp_path, name, chunk):
    path = write_bytes(tmp_path / name, RAW)
    np.testing.assert_array_equal(read(path, chunk=chunk), PIXELS)
    header = read_idx_header(path, IMAGES_MAGIC)
    assert (header.count, header.sample_shape) == (25, (4, 5))


def test_chunks_are_bounded(tmp_path):
    with open_idx(write_bytes(tmp_path / "a.gz", RAW), IMAGES_MAGIC) as reader:
        assert [len(chunk) for chunk in reader.read_chunks(10)] == [10, 10, 5]


def test_compression_is_detected_from_content(tmp_path):
    compressed, uncompressed = tmp_path / "a", tmp_path / "b.gz"
    compressed.write_bytes(gzip.compress(RAW))
    uncompressed.write_bytes(RAW)
    np.testing.assert_array_equal(read(compressed), PIXELS)
    np.testing.assert_array_equal(read(uncompressed), PIXELS)


def test_multi_member_gzip(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(RAW[:99]) + gzip.compress(RAW[99:]))
    np.testing.assert_array_equal(read(tmp_path / "a.gz"), PIXELS)


@pytest.mark.parametrize("name", ["a.gz", "a"])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (RAW[:-1], "truncated"),
        (RAW[:200], "truncated"),
        (RAW[:7], "truncated: 7 bytes, but the header alone has 16"),
        (b"", "truncated: 0 bytes"),
        (RAW + b"x", "too long"),
        (encode_idx(PIXELS[:, 0, 0]), "magic number 2049, expected 2051"),
        (b"<html>no such page</html>", "magic number 1013478509, expected 2051"),
        (encode_idx(PIXELS[:0]), "no images"),
        (encode_idx(PIXELS, extents=(2**32 - 1,) * 3), "truncated"),
    ],
)
def test_invalid_content(tmp_path, name, raw, message):
    path = write_bytes(tmp_path / name, raw)
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "replace the file with a good copy" in str(caught.value)


def test_file_size_must_match_the_header(tmp_path):
    for raw, message in ((RAW[:-1], "truncated"), (RAW + b"x", "too long")):
        with pytest.raises(DataError, match=f"{message}: .* need 516 bytes, but the file has {len(raw)}"):
            read_idx_header(write_bytes(tmp_path / "a", raw), IMAGES_MAGIC)


def flip_bits(packed):
    damaged = bytearray(packed)
    damaged[len(damaged) // 2] ^= 0x55
    return bytes(damaged)


PACKED = gzip.compress(RAW)


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(PACKED[:-1], id="truncated size"),
        pytest.param(PACKED[:-9], id="truncated data"),
        pytest.param(PACKED[: len(PACKED) // 2], id="half"),
        pytest.param(PACKED[:5], id="truncated header"),
        pytest.param(flip_bits(PACKED), id="flipped bits"),
        pytest.param(PACKED[:10] + b"\xff" * 500, id="no deflate stream"),
        pytest.param(PACKED[:-8] + bytes(8), id="wrong crc"),
        pytest.param(PACKED + b"x", id="trailing garbage"),
    ],
)
def test_damaged_gzip(tmp_path, packed):
    (tmp_path / "a.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.gz: damaged gzip file"):
        read(tmp_path / "a.gz")


def test_errors_name_the_damaged_file(tmp_path):
    good, bad = write_bytes(tmp_path / "good.gz", RAW), tmp_path / "bad.gz"
    bad.write_bytes(PACKED[:-9])
    for first, second in ((good, bad), (bad, good)):
        with pytest.raises(DataError, match=r"bad\.gz: damaged"):
            read_both(first, second)


def read_both(first, second):
    with open_idx(first, IMAGES_MAGIC) as first_reader, open_idx(second, IMAGES_MAGIC) as second_reader:
        return list(first_reader.read_chunks()), list(second_reader.read_chunks())


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such file.*neondist data mnist"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.gz", "a"])
@pytest.mark.parametrize("extents", [(10**9, 28, 28), (1, 2**31, 2**31), (30_000, 1, 1)])
def test_false_header_allocates_no_memory(tmp_path, name, extents):
    raw = struct.pack(">4I", IMAGES_MAGIC, *extents) + bytes(100)
    path = write_bytes(tmp_path / name, raw)
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_plausible_false_header_allocates_no_memory(tmp_path):
    noise = np.random.RandomState(0).bytes(40_000)
    path = write_bytes(tmp_path / "a.gz", struct.pack(">4I", IMAGES_MAGIC, 1, 4000, 10_000) + noise)
    assert read_idx_header(path, IMAGES_MAGIC).sample_shape == (4000, 10_000)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="truncated"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_labels_and_md5(tmp_path):
    import hashlib

    raw = encode_idx(np.arange(9))
    with open_idx(write_bytes(tmp_path / "a.gz", raw), LABELS_MAGIC) as reader:
        assert np.concatenate(list(reader.read_chunks(4))).tolist() == list(range(9))
        assert reader.md5 == hashlib.md5(raw).hexdigest()
