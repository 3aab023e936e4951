import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from dataset_toys import idx, put

from neondist.data.datasets.idx import IMAGES, LABELS, open_idx, read_header
from neondist.errors import DataError

PIXELS = np.random.RandomState(0).randint(0, 256, (25, 4, 5)).astype(np.uint8)
RAW = idx(PIXELS)


def read(path, magic=IMAGES, chunk=1000):
    with open_idx(path, magic) as reader:
        return np.concatenate(list(reader.chunks(chunk)))


@pytest.mark.parametrize("name", ["a.gz", "a"])
@pytest.mark.parametrize("chunk", [1, 7, 25, 1000])
def test_reads_what_was_written(tmp_path, name, chunk):
    path = put(tmp_path / name, RAW)
    np.testing.assert_array_equal(read(path, chunk=chunk), PIXELS)
    header = read_header(path, IMAGES)
    assert (header.count, header.sample) == (25, (4, 5))


def test_chunks_are_bounded(tmp_path):
    with open_idx(put(tmp_path / "a.gz", RAW), IMAGES) as reader:
        assert [len(chunk) for chunk in reader.chunks(10)] == [10, 10, 5]


def test_content_counts_not_the_name(tmp_path):
    packed_without_suffix, plain_with_suffix = tmp_path / "a", tmp_path / "b.gz"
    packed_without_suffix.write_bytes(gzip.compress(RAW))
    plain_with_suffix.write_bytes(RAW)
    np.testing.assert_array_equal(read(packed_without_suffix), PIXELS)
    np.testing.assert_array_equal(read(plain_with_suffix), PIXELS)


def test_gzip_of_several_members(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(RAW[:99]) + gzip.compress(RAW[99:]))
    np.testing.assert_array_equal(read(tmp_path / "a.gz"), PIXELS)


@pytest.mark.parametrize("name", ["a.gz", "a"])
@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (RAW[:-1], "truncated"),
        (RAW[:200], "truncated"),
        (RAW[:7], "truncated: 7 bytes, but the header alone has 16"),
        (b"", "truncated: 0 bytes"),
        (RAW + b"x", "too long"),
        (idx(PIXELS[:, 0, 0]), "magic number 2049, expected 2051"),
        (b"<html>not found</html>", "magic number 1013478509, expected 2051"),
        (idx(PIXELS[:0]), "no images"),
        (idx(PIXELS, extents=(2**32 - 1,) * 3), "truncated"),
    ],
)
def test_wrong_content_is_one_clear_error(tmp_path, name, raw, says):
    path = put(tmp_path / name, raw)
    with pytest.raises(DataError, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "replace it with a good copy" in str(caught.value)


def test_size_of_a_plain_file_is_checked_by_its_header(tmp_path):
    for raw, says in ((RAW[:-1], "truncated"), (RAW + b"x", "too long")):
        with pytest.raises(DataError, match=f"{says}: .* need 516 bytes, the file has {len(raw)}"):
            read_header(put(tmp_path / "a", raw), IMAGES)


def _flipped(packed):
    damaged = bytearray(packed)
    damaged[len(damaged) // 2] ^= 0x55
    return bytes(damaged)


PACKED = gzip.compress(RAW)


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(PACKED[:-1], id="cut in the size"),
        pytest.param(PACKED[:-9], id="cut in the data"),
        pytest.param(PACKED[: len(PACKED) // 2], id="half"),
        pytest.param(PACKED[:5], id="cut in the header"),
        pytest.param(_flipped(PACKED), id="flipped bits"),
        pytest.param(PACKED[:10] + b"\xff" * 500, id="no deflate stream"),
        pytest.param(PACKED[:-8] + bytes(8), id="wrong crc"),
        pytest.param(PACKED + b"x", id="garbage behind"),
    ],
)
def test_damaged_gzip(tmp_path, packed):
    (tmp_path / "a.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.gz: damaged gzip file"):
        read(tmp_path / "a.gz")


def test_a_fault_is_blamed_on_the_right_file(tmp_path):
    good, bad = put(tmp_path / "good.gz", RAW), tmp_path / "bad.gz"
    bad.write_bytes(PACKED[:-9])
    for first, second in ((good, bad), (bad, good)):
        with pytest.raises(DataError, match=r"bad\.gz: damaged"):
            _read_both(first, second)


def _read_both(first, second):
    with open_idx(first, IMAGES) as one, open_idx(second, IMAGES) as two:
        return list(one.chunks()), list(two.chunks())


def test_missing_or_a_folder(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such file.*neondist data mnist"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.gz", "a"])
@pytest.mark.parametrize("extents", [(10**9, 28, 28), (1, 2**31, 2**31), (30_000, 1, 1)])
def test_a_header_that_lies_costs_no_memory(tmp_path, name, extents):
    raw = struct.pack(">4I", IMAGES, *extents) + bytes(100)
    path = put(tmp_path / name, raw)
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_packed_header_that_could_be_true_costs_no_memory_either(tmp_path):
    noise = np.random.RandomState(0).bytes(40_000)
    path = put(tmp_path / "a.gz", struct.pack(">4I", IMAGES, 1, 4000, 10_000) + noise)
    assert read_header(path, IMAGES).sample == (4000, 10_000)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="truncated"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_labels_and_md5(tmp_path):
    import hashlib

    raw = idx(np.arange(9))
    with open_idx(put(tmp_path / "a.gz", raw), LABELS) as reader:
        assert np.concatenate(list(reader.chunks(4))).tolist() == list(range(9))
        assert reader.md5 == hashlib.md5(raw).hexdigest()
