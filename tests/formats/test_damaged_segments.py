"""TIFF files with one damaged strip or tile, which are refused or read correctly."""

import struct

import numpy as np
import pytest

import neondist as nd

tifffile = pytest.importorskip("tifffile", reason="made by tifffile")
codecs = pytest.importorskip("imagecodecs", reason="packed by imagecodecs")
CELLS = np.random.default_rng(0).integers(0, 50, (40, 50)).astype("u2")
SMOOTH = (np.add.outer(np.arange(40), np.arange(50)) * 2).astype("u1")
LAYOUTS = {"tiles": {"tile": (16, 16)}, "strips": {"rowsperstrip": 16}}
CODECS = {
    "zlib": (CELLS, {}), "lzw": (CELLS, {}), "packbits": (SMOOTH, {}), "zstd": (CELLS, {}), "lzma": (CELLS, {}),
    "zlib, predicted": (CELLS, {"predictor": True}), "lerc": (CELLS, {}), "jpeg2000": (CELLS, {}),
    "png": (CELLS, {}), "jpegxl": (CELLS, {}), "jpegxr": (CELLS, {}),
    "webp": (np.stack([SMOOTH] * 3, -1), {"compressionargs": {"lossless": True}}),
}  # fmt: skip


def write_tiff(path, array, layout, codec, segment=None, number=1, **options):
    """Write an image, with one segment replaced by `segment`; return the original bytes of that segment."""
    defaults = {"photometric": "rgb" if array.ndim > 2 else "minisblack", "metadata": None, "compression": codec}
    tifffile.imwrite(path, array, **(defaults | LAYOUTS[layout] | options))
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        offsets, sizes = list(page.dataoffsets), list(page.databytecounts)
        file.filehandle.seek(offsets[number])
        raw = file.filehandle.read(sizes[number])
    if segment is None:
        return raw
    with open(path, "ab") as file:
        offsets[number], sizes[number] = file.tell(), len(segment)
        file.write(segment)
    for code, values in ((324 if layout == "tiles" else 273, offsets), (325 if layout == "tiles" else 279, sizes)):
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages[0].tags[code].overwrite(values, dtype="I")
    return raw


def read_outcome(path, expected):
    """Return 'correct', 'wrong', or the message of the error."""
    try:
        with nd.open_source(path) as source:
            values = source.read(nd.Box.of(source.shape))
    except nd.DataError as error:
        return str(error)
    return "correct" if np.array_equal(values.reshape(expected.shape), expected) else "wrong"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CODECS)
def test_truncated_segments(tmp_path, kind, layout):
    (array, options), codec, path = CODECS[kind], kind.partition(",")[0], tmp_path / "a.tif"
    raw = write_tiff(path, array, layout, codec, **options)
    assert read_outcome(path, array) == "correct"
    for n in (1, len(raw) // 3, len(raw) // 2, len(raw) - 8, len(raw) - 1):
        write_tiff(path, array, layout, codec, raw[:n], **options)
        outcome = read_outcome(path, array)
        assert outcome.startswith(str(path)) or (n > len(raw) // 2 and outcome == "correct"), n


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", ["zlib", "lzw", "packbits", "zstd", "lzma"])
def test_segments_of_wrong_sizes(tmp_path, codec, layout):
    path, encode = tmp_path / "a.tif", getattr(codecs, codec + "_encode")
    array = SMOOTH if codec == "packbits" else CELLS
    size = array.itemsize * 16 * (16 if layout == "tiles" else 50)
    for n in (size // 2, size - 1, size * 15 // 16, size + 9, 3 * size, 1 << (16 if codec == "packbits" else 24)):
        write_tiff(path, array, layout, codec, encode(bytes(n)))
        assert read_outcome(path, array).startswith(str(path)), n
    for n in (size + 1, size + 3):  # padded
        cells = array[:16, 16:32] if layout == "tiles" else array[16:32]
        write_tiff(path, array, layout, codec, encode(cells.tobytes() + bytes(n - size)))
        assert read_outcome(path, array) == "correct"
    if layout == "strips":  # some writers pad the last strip
        last = np.concatenate([array[32:], array[:8]])
        write_tiff(path, array, layout, codec, encode(last.tobytes()), number=2)
        assert read_outcome(path, array) == "correct"


@pytest.mark.parametrize("codec", ["lerc", "png", "jpeg2000", "jpegxl"])
def test_segments_of_wrong_shapes_and_types(tmp_path, codec):
    encode = {"jpeg2000": codecs.jpeg2k_encode}.get(codec) or getattr(codecs, codec + "_encode")
    for shape, dtype in (((8, 8), "u2"), ((64, 64), "u2"), ((16, 16), "u4"), ((16, 16), "f4")):
        if codec == "lerc" or dtype == "u2":
            write_tiff(tmp_path / "a.tif", CELLS, "tiles", codec, encode(np.full(shape, 7, dtype)))
            assert read_outcome(tmp_path / "a.tif", CELLS).startswith(str(tmp_path / "a.tif"))
    wide_tile = encode(np.full((16, 16), 300, "u2"))
    write_tiff(tmp_path / "a.tif", CELLS.astype("u1"), "tiles", codec, wide_tile)
    assert "has uint16 cells in an image of uint8" in read_outcome(tmp_path / "a.tif", CELLS)


def test_size_limits(tmp_path, monkeypatch):
    """Distinguish a tile that exceeds the file from one that exceeds the limit on bytes decoded at once."""
    path, array = tmp_path / "a.tif", np.random.default_rng(0).integers(0, 255, (64, 64)).astype("u1")
    tifffile.imwrite(path, array, tile=(32, 32), compression="zlib")
    monkeypatch.setattr("neondist.formats.tiff.MAX_CHUNK_BYTES", 500)
    assert "but at most 500 B can be decoded at once; rewrite the file with tiles of about" in read_outcome(path, array)
    monkeypatch.undo()
    with tifffile.TiffFile(path, mode="r+b") as file:
        sizes = file.pages[0].databytecounts
        file.pages[0].tags[325].overwrite([60000, *sizes[1:]])
    assert "a tile of 60000 bytes exceeds the file; restore it" in read_outcome(path, array)


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_truncated_jpeg(tmp_path, planar):
    path, noise = tmp_path / "a.tif", np.random.default_rng(0).integers(0, 255, (128, 128, 3)).astype("u1")
    array = noise if planar == "contig" else np.ascontiguousarray(np.moveaxis(noise, -1, 0))
    options = {"tile": (64, 64), "planarconfig": planar, "photometric": "rgb"}
    raw = write_tiff(path, array, "tiles", "jpeg", **options)
    with nd.open_source(path) as source:
        expected = source.read(nd.Box.of(source.shape))
    for fraction in (0.2, 0.5, 0.9, 0.99):
        write_tiff(path, array, "tiles", "jpeg", raw[: int(fraction * len(raw))], **options)
        assert "ends early" in read_outcome(path, expected) or "cannot be read" in read_outcome(path, expected)
    for complete in (raw[:-1], raw[:-2], raw + bytes(40)):  # the end marker is not part of the image
        write_tiff(path, array, "tiles", "jpeg", complete, **options)
        assert read_outcome(path, expected) == "correct"


@pytest.mark.parametrize("codec", ["CCITTFAX4", "CCITTFAX3", "CCITTRLE"])
def test_truncated_fax(tmp_path, codec):
    rasterio = pytest.importorskip("rasterio", reason="made by rasterio")
    path, array = tmp_path / "a.tif", (np.random.default_rng(0).random((40, 64)) > 0.5).astype("u1")
    options = {"driver": "GTiff", "height": 40, "width": 64, "count": 1, "dtype": "uint8", "nbits": 1, "blockysize": 16}
    with rasterio.open(path, "w", compress=codec, **options) as file:
        file.write(array[None])
    assert read_outcome(path, array) == "correct"
    with tifffile.TiffFile(path) as file:
        sizes = list(file.pages[0].databytecounts)
    for fraction in (0.1, 0.5, 0.9):
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages[0].tags[279].overwrite([sizes[0], int(sizes[1] * fraction), *sizes[2:]])
        assert "strip or tile 1 ends early" in read_outcome(path, array)


@pytest.mark.parametrize("codec", ["zlib", "lzw"])
def test_reversed_bit_order(tmp_path, codec):
    path, cells, placeholder = tmp_path / "a.tif", CELLS[:16, :16], struct.pack("<HHI", 65123, 3, 1)
    raw = write_tiff(path, cells, "tiles", codec, number=0)
    write_tiff(path, cells, "tiles", codec, codecs.bitorder_encode(raw), 0, extratags=[(65123, "H", 1, 2, True)])
    path.write_bytes(path.read_bytes().replace(placeholder, struct.pack("<HHI", 266, 3, 1)))
    assert read_outcome(path, cells) == "correct"
    np.testing.assert_array_equal(tifffile.imread(path), cells)
