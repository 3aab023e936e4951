"""TIFF values compared with GDAL, tifffile and OpenSlide: masks, nodata, colours and compression."""

import numpy as np
import pytest

import neondist as nd

tifffile = pytest.importorskip("tifffile", reason="made by tifffile")
rasterio = pytest.importorskip("rasterio", reason="made and read by rasterio")
SHAPE = (96, 128)
YY, XX = np.mgrid[: SHAPE[0], : SHAPE[1]]
VALID = ~((YY >= 10) & (YY < 40) & (XX >= 20) & (XX < 90))


def draw_bands(count, dtype, seed=0):
    return (np.random.default_rng(seed).random((count, *SHAPE)) * 120 + 5).astype(dtype)


def write_tiff(path, array, mask=None, overviews=(), internal=True, **options):
    defaults = {
        "driver": "GTiff",
        "height": SHAPE[0],
        "width": SHAPE[1],
        "count": len(array),
        "dtype": array.dtype.name,
    }
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=internal):
        with rasterio.open(path, "w", **(defaults | options)) as file:
            file.write(array)
            if mask is not None:
                file.write_mask(mask)
        if overviews:
            with rasterio.open(path, "r+") as file:
                file.build_overviews(list(overviews))


def read(path):
    with nd.open_source(path) as source:
        full_array = source.read(nd.Box.of(source.shape))
        box = tuple(slice(n // 3, n // 3 + max(1, n // 2)) for n in source.shape)
        np.testing.assert_array_equal(source.read(box), full_array[box])
        return full_array


def read_by_gdal(path, level=None):
    """Return the values that GDAL reads, channels last, with missing floating-point values as NaN."""
    with rasterio.open(path, **({} if level is None else {"overview_level": level})) as file:
        array = file.read(masked=np.dtype(file.dtypes[0]).kind == "f")
    return np.moveaxis(array.filled(np.nan) if isinstance(array, np.ma.MaskedArray) else array, 0, -1)


TILED = {"tiled": True, "blockxsize": 32, "blockysize": 48}
LAYOUTS = {
    "strips": {}, "packed strips": {"compress": "lzw", "predictor": 3}, "tiles": TILED,
    "packed tiles": TILED | {"compress": "deflate"}, "planes": {"interleave": "band"},
    "packed planes": TILED | {"interleave": "band", "compress": "zstd"}, "big-endian": {"endianness": "big"},
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
@pytest.mark.long
def test_masks(tmp_path, layout, count, dtype):
    if "predictor" in (options := LAYOUTS[layout]) and dtype == "int16":
        options = {"compress": "lzw", "predictor": 2}
    path = tmp_path / "a.tif"
    for internal in (True, False):
        for file in tmp_path.iterdir():
            file.unlink()
        write_tiff(path, draw_bands(count, dtype), VALID, (2, 4) if internal else (), internal, **options)
        assert (tmp_path / "a.tif.msk").exists() != internal
        expected = read_by_gdal(path)
        assert np.isnan(expected).sum() == (count * (~VALID).sum() if dtype != "int16" else 0)
        np.testing.assert_array_equal(read(path), expected)
        with nd.open_source(path) as source:
            assert ("mask" if internal else "side file a.tif.msk") in source.metadata_names()
        for level in range(2 * internal):
            np.testing.assert_array_equal(read(f"{path}#{level + 1}"), read_by_gdal(path, level))


def test_page_masks_and_unsupported_masks(tmp_path):
    array = draw_bands(3, "float32")
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for n in range(3):
            file.write(array[n], photometric="minisblack", metadata=None)
            file.write(np.roll(VALID, n, 0), photometric="mask", subfiletype=4, metadata=None)
    expected = np.stack([np.where(np.roll(VALID, n, 0), array[n], np.nan) for n in range(3)])
    np.testing.assert_array_equal(read(tmp_path / "a.tif")[..., 0], expected)
    write_tiff(tmp_path / "b.tif", array, nodata=7.0)
    (tmp_path / "b.tif.aux.xml").write_text(
        '<PAMDataset><PAMRasterBand band="1"><NoDataValue>9</NoDataValue></PAMRasterBand></PAMDataset>'
    )
    with pytest.raises(nd.DataError, match=r"b\.tif\.aux\.xml marks cells without data; write the mask"):
        nd.open_source(tmp_path / "b.tif")
    write_tiff(tmp_path / "c.tif", array)
    tifffile.imwrite(tmp_path / "c.tif.msk", VALID[:50], photometric="minisblack")
    with pytest.raises(nd.DataError, match=r"c\.tif: its mask, of \[50, 128, 1\] cells, does not match its image"):
        nd.open_source(tmp_path / "c.tif")
    tifffile.imwrite(tmp_path / "d.tif", array[0], photometric="minisblack", extratags=[(274, "H", 1, 3, True)])
    tifffile.imwrite(tmp_path / "d.tif.msk", VALID, photometric="minisblack")
    with pytest.raises(nd.DataError, match=r"d\.tif: masks of rotated or mirrored images are not supported; write"):
        nd.open_source(tmp_path / "d.tif")


NUMBERS = [
    np.nan, -9999, 0, 1e20, -3.4e38, np.finfo("f4").min, np.finfo("f4").max, np.inf, -np.inf, -1.5, 1, 1000, 5, 300
]  # fmt: skip
TEXTS = [
    "nan", "NaN", "1.#QNAN", "-9999", " 0 ", "1e20", "-3.4e+38", "-3.4028234663852886e+38", "-3.40282346638529e+38",
    "-3.4028235e+38", "1e40", "-1e400", "inf", "-inf", "-1,5", "1,000", "", "+5", "5.", ".5", "-9999.0000001", "0.1",
    "300", "-9999\n",
]  # fmt: skip
UNREADABLE = ["none", "abc", "7 8", "7abc", "0x10", "1_0", "1d3", "-nan", "infinity", "-1.5e"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_nodata_texts(tmp_path, dtype, packed):
    path = tmp_path / "a.tif"
    with np.errstate(over="ignore"):
        array = np.array([NUMBERS, NUMBERS[::-1]]).astype(dtype)
    for text in TEXTS if dtype != "float16" else [text for text in TEXTS if "1e40" not in text]:
        tags = {"extratags": [(42113, "s", 0, text, True)], "photometric": "minisblack"}
        tifffile.imwrite(path, array, compression="zlib" if packed else None, **tags)
        np.testing.assert_array_equal(read(path), read_by_gdal(path), err_msg=text)
    for text in UNREADABLE:
        tifffile.imwrite(path, array, extratags=[(42113, "s", 0, text, True)], photometric="minisblack")
        with pytest.raises(nd.DataError, match=r"'.*' \(GDAL_NODATA\), which is not a number; correct it: gdal_edit"):
            nd.open_source(path)


@pytest.mark.parametrize(
    ("dtype", "texts"),
    [("uint8", ["5", "5.", "300", "-1", "1.5", "nan", " 7 "]), ("int16", ["-9999", "-1,5", "1e4", "40000"])],
)
def test_unwritten_tiles(tmp_path, dtype, texts):
    options = {"driver": "GTiff", "height": 96, "width": 128, "count": 1, "dtype": dtype, "sparse_ok": True}
    for text in texts:
        with rasterio.open(tmp_path / "a.tif", "w", **options, **TILED, nodata=7) as file:
            file.write(np.ones((1, 48, 32), dtype), window=((0, 48), (32, 64)))
        with tifffile.TiffFile(tmp_path / "a.tif", mode="r+b") as file:
            file.pages[0].tags[42113].overwrite(text)
        np.testing.assert_array_equal(read(tmp_path / "a.tif"), read_by_gdal(tmp_path / "a.tif"), err_msg=text)


BYTES, PREDICTOR = draw_bands(3, "uint8"), {"predictor": 2, "compress": "lzw"}
SMOOTH = np.stack([YY * 2, XX, YY + XX]).astype("uint8")
KINDS = {
    "MinIsWhite": (BYTES[:1], {"photometric": "MINISWHITE"}), "1 bit": (BYTES % 2, {"nbits": 1}),
    "1 bit white": (BYTES[:1] % 2, {"nbits": 1, "photometric": "MINISWHITE"}), "2 bits": (BYTES % 4, {"nbits": 2}),
    "3 bits": (BYTES % 8, {"nbits": 3}), "4 bits": (BYTES % 16, {"nbits": 4, "interleave": "band"}),
    "12 bits": (draw_bands(2, "uint16"), {"nbits": 12}), "fax": (BYTES[:1] % 2, {"nbits": 1, "compress": "CCITTFAX4"}),
    "float16": (draw_bands(2, "float32") // 1, {"nbits": 16}), "int8": (draw_bands(2, "int16").astype("int8") - 50, {}),
    "int64": (draw_bands(2, "int64"), {}), "predictor": (draw_bands(3, "int32"), PREDICTOR),
    "predictor of floats": (draw_bands(3, "float32"), PREDICTOR),
    "predictor 3": (draw_bands(3, "float64"), TILED | {"predictor": 3, "compress": "deflate", "interleave": "band"}),
    "alpha": (draw_bands(4, "uint8"), {"alpha": "yes", "photometric": "RGB"}),
    "lerc": (draw_bands(2, "float32"), {"compress": "lerc"}),
    "JPEG planes": (SMOOTH, {"compress": "jpeg", "interleave": "band"}), "JPEG": (SMOOTH, {"compress": "jpeg"}),
    "JPEG planes of colours": (SMOOTH, TILED | {"compress": "jpeg", "interleave": "band", "photometric": "RGB",
                                                "blockysize": 32}),
    "JPEG planes of 5": (np.concatenate([SMOOTH, SMOOTH[:2]]), {"compress": "jpeg", "interleave": "band"}),
    "12 bits of JPEG": (SMOOTH[:1].astype("uint16") * 16, {"compress": "jpeg", "nbits": 12}),
    "CMYK": (draw_bands(4, "uint8"), {"photometric": "CMYK"}), "CIELab": (BYTES, {"photometric": "CIELAB"}),
    "CMYK in JPEG": (np.concatenate([SMOOTH, SMOOTH[:1]]), {"photometric": "CMYK", "compress": "jpeg"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_pixel_formats(tmp_path, kind):
    array, options = KINDS[kind]
    write_tiff(tmp_path / "a.tif", array, **options)
    if kind.startswith("C"):
        message = r"stores colours as .*, which different readers convert differently; convert the image to RGB"
        with pytest.raises(nd.DataError, match=message):
            nd.open_source(tmp_path / "a.tif")
    else:
        np.testing.assert_array_equal(read(tmp_path / "a.tif"), read_by_gdal(tmp_path / "a.tif"))


def test_colours_match_tifffile(tmp_path):
    path, array = tmp_path / "a.tif", np.moveaxis(SMOOTH, 0, -1)
    colours = np.random.default_rng(0).integers(0, 65535, (3, 256)).astype("uint16")
    tifffile.imwrite(path, SMOOTH[0], photometric="palette", colormap=colours)
    np.testing.assert_array_equal(read(path)[..., 0], SMOOTH[0])
    for subsampling in ((1, 1), (2, 2)):
        tifffile.imwrite(path, array, photometric="ycbcr", compression="jpeg", subsampling=subsampling)
        np.testing.assert_array_equal(read(path), tifffile.imread(path))
        assert np.abs(read(path).astype(int) - read_by_gdal(path)).max() < 5  # decoders interpolate differently
    for options in ({}, {"compression": "lzw"}):
        tifffile.imwrite(path, array, photometric="ycbcr", subsampling=(1, 1), **options)
        with pytest.raises(nd.DataError, match="stores colours as YCBCR"):
            nd.open_source(path)
    for number, packing in ((34676, "SGILOG"), (32809, "THUNDERSCAN"), (65432, "65432")):
        tifffile.imwrite(path, array, photometric="rgb")
        with tifffile.TiffFile(path, mode="r+b") as file:
            file.pages[0].tags[259].overwrite(number)
        with pytest.raises(nd.DataError, match=f"uses an unsupported compression .*{packing}.*; rewrite it with"):
            nd.open_source(path)
    tifffile.imwrite(path, array.astype("complex64"), photometric="rgb")
    with pytest.raises(nd.DataError, match="holds complex64, not numbers"):
        nd.open_source(path)


@pytest.mark.parametrize("kind", ["bytes", "palette", "MinIsWhite", "floats", "packed"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations(tmp_path, orientation, kind):
    """Read images of every orientation upright."""
    array = draw_bands(1, "float32" if kind == "floats" else "uint8")[0]
    options = {
        "palette": {"photometric": "palette", "colormap": np.zeros((3, 256), "uint16")},
        "MinIsWhite": {"photometric": "miniswhite"},
        "packed": {"compression": "zlib", "tile": (32, 48)},
    }
    tags = {"extratags": [(274, "H", 1, orientation, True), (42113, "s", 0, str(array[3, 4]), True)], "metadata": None}
    tifffile.imwrite(tmp_path / "a.tif", array, **({"photometric": "minisblack"} | options.get(kind, {}) | tags))
    upright = np.where(array == array[3, 4], np.nan, array) if kind == "floats" else array
    expected = {1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.T,
                6: upright[::-1].T, 7: upright[::-1, ::-1].T, 8: upright[:, ::-1].T}  # fmt: skip
    np.testing.assert_array_equal(read(tmp_path / "a.tif")[..., 0], expected[orientation])


def test_slides_match_openslide(tmp_path):
    openslide = pytest.importorskip("openslide", reason="compared with OpenSlide")
    array = np.tile(np.moveaxis(SMOOTH, 0, -1), (6, 5, 1))
    text = "Aperio Image Library v11.2.1\n640x576 [0,0 640x576] (64x64) JPEG/RGB Q=90|AppMag = 20|MPP = 0.4990"
    options = {"tile": (64, 64), "photometric": "rgb", "compression": "jpeg", "metadata": None}
    with tifffile.TiffWriter(tmp_path / "a.svs") as file:
        for n in (1, 8, 2, 4):  # the second page of a slide is a thumbnail, in strips
            packing = options | {"tile": None} if n == 8 else options
            file.write(np.ascontiguousarray(array[::n, ::n]), description=text, **packing)
    slide = openslide.OpenSlide(tmp_path / "a.svs")
    assert slide.properties["openslide.vendor"] == "aperio"
    for level, (width, height) in enumerate(slide.level_dimensions):
        expected = np.asarray(slide.read_region((0, 0), level, (width, height)))[..., :3]
        with nd.open_source(f"{tmp_path}/a.svs#{level}") as source:
            np.testing.assert_array_equal(source.read(nd.Box.of(source.shape)), expected)
            cell = float(slide.properties["openslide.mpp-x"]) * slide.level_downsamples[level]
            np.testing.assert_allclose(source.metadata["scale"]["X"], cell, rtol=1e-2)
    slide.close()


@pytest.mark.parametrize(
    ("count", "photometric"),
    [*((n, "MINISBLACK") for n in (1, 2, 3, 4)), (3, "MINISWHITE"), (3, "RGB"), (4, "RGB"), (3, "YCBCR")],
)
def test_jpeg_bands(tmp_path, count, photometric):
    """Read three bands that are not colours as they were written, without libjpeg's conversion to RGB."""
    array = np.resize(SMOOTH, (count, *SHAPE))
    for options in ({}, TILED, TILED | {"interleave": "band"}) if photometric != "YCBCR" else ({}, TILED):
        write_tiff(tmp_path / "a.tif", array, compress="jpeg", photometric=photometric, **options)
        difference = read(tmp_path / "a.tif").astype(int) - read_by_gdal(tmp_path / "a.tif")
        assert np.abs(difference).max() <= (5 if photometric == "YCBCR" else 0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("packing", ["lerc", "lerc_deflate", "lerc_zstd"])
def test_lerc_masks(tmp_path, count, packing):
    """Read masks of LERC, one for all samples or one per sample, which changes the layout of samples."""
    for number, options in enumerate([{}, TILED, TILED | {"interleave": "band"}]):
        array = draw_bands(count, "float64" if number % 2 else "float32")
        array[:, :7], array[0, 20:50, 100:] = np.nan, np.nan
        write_tiff(tmp_path / "a.tif", array, compress=packing, **options)
        assert np.isnan(read_by_gdal(tmp_path / "a.tif")).sum() == np.isnan(array).sum()
        np.testing.assert_array_equal(read(tmp_path / "a.tif"), read_by_gdal(tmp_path / "a.tif"))


def test_reject_lerc_with_different_readings(tmp_path):
    """Reject predictors, which tifffile applies and GDAL does not, and GDAL's big-endian cells."""
    tifffile.imwrite(tmp_path / "a.tif", SMOOTH[0], compression="lerc", predictor=True)
    with pytest.raises(nd.DataError, match=r"LERC with a predictor or .* that wrote it to rewrite it with deflate"):
        nd.open_source(tmp_path / "a.tif")
    for dtype in ("uint8", "int16", "float32"):
        array = draw_bands(1, dtype)
        write_tiff(tmp_path / "a.tif", array, compress="lerc", endianness="big")
        if dtype == "uint8":
            np.testing.assert_array_equal(read(tmp_path / "a.tif"), np.moveaxis(array, 0, -1))
        else:
            with pytest.raises(nd.DataError, match="big-endian cells"):
                nd.open_source(tmp_path / "a.tif")


@pytest.mark.parametrize(
    ("code", "kind", "values"), [(274, "H", (1, 3)), (42113, "s", ("-1", "7")), (274, "H", (6, 6))]
)
def test_pages_with_different_tags(tmp_path, code, kind, values):
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for value in values:
            tags = [(code, kind, 0 if kind == "s" else 1, value, True)]
            file.write(draw_bands(1, "float32")[0], photometric="minisblack", metadata=None, extratags=tags)
    if values[0] == values[1]:
        assert read(tmp_path / "a.tif").shape == (2, *SHAPE[::-1], 1)
        return
    with pytest.raises(nd.DataError, match="page 1 has a different orientation or no-data value from the first page"):
        nd.open_source(tmp_path / "a.tif")
