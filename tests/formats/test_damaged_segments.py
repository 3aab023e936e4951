"""One strip or tile of a TIFF file that does not unpack to its cells: refused, or the right numbers, never others."""

import struct

import numpy as np
import pytest

import neondist as nd

tifffile = pytest.importorskip("tifffile", reason="made by tifffile")
codecs = pytest.importorskip("imagecodecs", reason="packed by imagecodecs")
CELLS = np.random.default_rng(0).integers(0, 50, (40, 50)).astype("u2")
SMOOTH = (np.add.outer(np.arange(40), np.arange(50)) * 2).astype("u1")
LAYOUTS = {"tiles": {"tile": (16, 16)}, "strips": {"rowsperstrip": 16}}
KINDS = {
    "zlib": (CELLS, {}), "lzw": (CELLS, {}), "packbits": (SMOOTH, {}), "zstd": (CELLS, {}), "lzma": (CELLS, {}),
    "zlib, predicted": (CELLS, {"predictor": True}), "lerc": (CELLS, {}), "jpeg2000": (CELLS, {}),
    "png": (CELLS, {}), "jpegxl": (CELLS, {}), "jpegxr": (CELLS, {}),
    "webp": (np.stack([SMOOTH] * 3, -1), {"compressionargs": {"lossless": True}}),
}  # fmt: skip


def written(path, array, layout, packing, segment=None, number=1, **more):
    """Write an image, one segment of it as it is given; return its bytes."""
    options = {"photometric": "rgb" if array.ndim > 2 else "minisblack", "metadata": None, "compression": packing}
    tifffile.imwrite(path, array, **(options | LAYOUTS[layout] | more))
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


def look(path, expected):
    """Return 'right', 'wrong', or the message of a refusal."""
    try:
        with nd.open_source(path) as source:
            found = source.read(nd.Box.of(source.shape))
    except nd.DataError as error:
        return str(error)
    return "right" if np.array_equal(found.reshape(expected.shape), expected) else "wrong"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_segments_that_end_early(tmp_path, kind, layout):
    (array, more), packing, path = KINDS[kind], kind.partition(",")[0], tmp_path / "a.tif"
    raw = written(path, array, layout, packing, **more)
    assert look(path, array) == "right"
    for n in (1, len(raw) // 3, len(raw) // 2, len(raw) - 8, len(raw) - 1):
        written(path, array, layout, packing, raw[:n], **more)
        found = look(path, array)
        assert found.startswith(str(path)) or (n > len(raw) // 2 and found == "right"), n


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", ["zlib", "lzw", "packbits", "zstd", "lzma"])
def test_segments_that_unpack_to_other_sizes(tmp_path, packing, layout):
    path, encode = tmp_path / "a.tif", getattr(codecs, packing + "_encode")
    array = SMOOTH if packing == "packbits" else CELLS
    size = array.itemsize * 16 * (16 if layout == "tiles" else 50)
    for n in (size // 2, size - 1, size * 15 // 16, size + 9, 3 * size, 1 << (16 if packing == "packbits" else 24)):
        written(path, array, layout, packing, encode(bytes(n)))
        assert look(path, array).startswith(str(path)), n
    for n in (size + 1, size + 3):  # filled up
        cells = array[:16, 16:32] if layout == "tiles" else array[16:32]
        written(path, array, layout, packing, encode(cells.tobytes() + bytes(n - size)))
        assert look(path, array) == "right"
    if layout == "strips":  # some writers fill up the last one
        last = np.concatenate([array[32:], array[:8]])
        written(path, array, layout, packing, encode(last.tobytes()), number=2)
        assert look(path, array) == "right"


@pytest.mark.parametrize("packing", ["lerc", "png", "jpeg2000", "jpegxl"])
def test_images_of_other_sizes_and_types_in_segments(tmp_path, packing):
    encode = {"jpeg2000": codecs.jpeg2k_encode}.get(packing) or getattr(codecs, packing + "_encode")
    for shape, kind in (((8, 8), "u2"), ((64, 64), "u2"), ((16, 16), "u4"), ((16, 16), "f4")):
        if packing == "lerc" or kind == "u2":
            written(tmp_path / "a.tif", CELLS, "tiles", packing, encode(np.full(shape, 7, kind)))
            assert look(tmp_path / "a.tif", CELLS).startswith(str(tmp_path / "a.tif"))
    wide = encode(np.full((16, 16), 300, "u2"))
    written(tmp_path / "a.tif", CELLS.astype("u1"), "tiles", packing, wide)
    assert "has uint16 cells in an image of uint8" in look(tmp_path / "a.tif", CELLS)


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_a_jpeg_that_ends_early(tmp_path, planar):
    path, noise = tmp_path / "a.tif", np.random.default_rng(0).integers(0, 255, (128, 128, 3)).astype("u1")
    array = noise if planar == "contig" else np.ascontiguousarray(np.moveaxis(noise, -1, 0))
    more = {"tile": (64, 64), "planarconfig": planar, "photometric": "rgb"}
    raw = written(path, array, "tiles", "jpeg", **more)
    with nd.open_source(path) as source:
        expected = source.read(nd.Box.of(source.shape))
    for part in (0.2, 0.5, 0.9, 0.99):
        written(path, array, "tiles", "jpeg", raw[: int(part * len(raw))], **more)
        assert "ends early" in look(path, expected) or "cannot be read" in look(path, expected)
    for whole in (raw[:-1], raw[:-2], raw + bytes(40)):  # the marker of its end is no part of the image
        written(path, array, "tiles", "jpeg", whole, **more)
        assert look(path, expected) == "right"


@pytest.mark.parametrize("packing", ["CCITTFAX4", "CCITTFAX3", "CCITTRLE"])
def test_a_fax_that_ends_early(tmp_path, packing):
    rasterio = pytest.importorskip("rasterio", reason="made by rasterio")
    path, array = tmp_path / "a.tif", (np.random.default_rng(0).random((40, 64)) > 0.5).astype("u1")
    facts = {"driver": "GTiff", "height": 40, "width": 64, "count": 1, "dtype": "uint8", "nbits": 1, "blockysize": 16}
    with rasterio.open(path, "w", compress=packing, **facts) as file:
        file.write(array[None])
    assert look(path, array) == "right"
    with tifffile.TiffFile(path) as file:
        sizes = list(file.pages[0].databytecounts)
    for part in (0.1, 0.5, 0.9):
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages[0].tags[279].overwrite([sizes[0], int(sizes[1] * part), *sizes[2:]])
        assert "strip or tile 1 ends early" in look(path, array)


@pytest.mark.parametrize("packing", ["zlib", "lzw"])
def test_bits_in_the_other_order(tmp_path, packing):
    path, cells, other = tmp_path / "a.tif", CELLS[:16, :16], struct.pack("<HHI", 65123, 3, 1)
    raw = written(path, cells, "tiles", packing, number=0)
    written(path, cells, "tiles", packing, codecs.bitorder_encode(raw), 0, extratags=[(65123, "H", 1, 2, True)])
    path.write_bytes(path.read_bytes().replace(other, struct.pack("<HHI", 266, 3, 1)))
    assert look(path, cells) == "right"
    np.testing.assert_array_equal(tifffile.imread(path), cells)
