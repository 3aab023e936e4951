"""TIFF files written by other libraries, and files of neondist read by them."""

import numpy as np
import pytest
from image_sources import check_source, draw_image

import neondist as nd

tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")


VARIANTS = {
    "tiles": ("YXC", {"tile": (32, 48), "photometric": "rgb"}),
    "packed tiles": ("YXC", {"tile": (32, 48), "compression": "zlib", "predictor": True, "photometric": "rgb"}),
    "strips": ("YXC", {"rowsperstrip": 7, "compression": "lzw", "photometric": "rgb"}),
    "plain strips": ("YXC", {"rowsperstrip": 7, "photometric": "rgb"}),
    "planes": ("CYX", {"tile": (32, 32), "planarconfig": "separate", "photometric": "rgb", "compression": "zlib"}),
    "one channel": ("YX", {"tile": (16, 16), "compression": "zstd"}),
    "big endian": ("YX", {"rowsperstrip": 9, "byteorder": ">"}),
    "pages": ("ZYX", {"tile": (32, 32), "compression": "zlib"}),
    "plain pages": ("ZYX", {}),
    "one page, many planes": ("ZYX", {"metadata": {"axes": "ZYX"}, "contiguous": True}),
    "bigtiff": ("YXC", {"tile": (32, 48), "bigtiff": True, "photometric": "rgb"}),
    "OME": ("TZYX", {"ome": True, "tile": (32, 32), "metadata": {"axes": "TZYX"}, "photometric": "minisblack"}),
    "OME channels": ("CYX", {"ome": True, "metadata": {"axes": "CYX"}, "photometric": "minisblack"}),
    "OME colours": ("ZYXC", {"ome": True, "metadata": {"axes": "ZYXS"}, "photometric": "rgb"}),
    "ImageJ": ("TZYX", {"imagej": True, "metadata": {"axes": "TZYX"}}),
    "volume tiles": ("ZYX", {"tile": (4, 32, 32), "volumetric": True, "compression": "zlib"}),
}
EXTENTS = {"T": 3, "Z": 5, "Y": 70, "X": 103, "C": 3}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_files_written_by_tifffile(tmp_path, variant, dtype):
    axes, options = VARIANTS[variant]
    array = draw_image([EXTENTS[name] for name in axes], dtype)
    path = tmp_path / ("a.ome.tif" if "OME" in variant else "a.tif")
    tifffile.imwrite(path, array, **options)
    order = [name for name in "TZYXC" if name in axes]
    expected = array.transpose([axes.index(name) for name in order])
    expected = expected if "C" in order else expected[..., None]
    with nd.open_source(path) as source:
        assert (source.axes, source.shape) == ("".join(order) + "C" * ("C" not in order), expected.shape)
        check_source(source, expected)


def test_levels_of_a_pyramid(tmp_path):
    array = draw_image((128, 192, 3))
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", bigtiff=True) as file:
        options = {"tile": (32, 32), "photometric": "rgb", "compression": "jpeg", "compressionargs": {"level": 95}}
        file.write(array, subifds=2, **options)
        file.write(array[::2, ::2], subfiletype=1, **options)
        file.write(array[::4, ::4], subfiletype=1, **options)
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as file:
        levels = [level.asarray() for level in file.series[0].levels]
    for level, expected in enumerate(levels):
        with nd.open_source(f"{tmp_path}/a.ome.tif#{level}") as source:
            assert source.levels == 3
            np.testing.assert_array_equal(source.read(nd.Box.of(source.shape)), expected)
            np.testing.assert_array_equal(source.read([(5, 30), (17, 40), (0, 3)]), expected[5:30, 17:40])
    with pytest.raises(nd.DataError, match="has no level 3; its levels are 0 to 2"):
        nd.open_source(tmp_path / "a.ome.tif", level=3)


def test_only_requested_tiles_are_decoded(tmp_path, monkeypatch):
    array = draw_image((1024, 1024, 1))
    tifffile.imwrite(tmp_path / "a.tif", array, tile=(128, 128), compression="zlib")
    read, reads = tifffile.FileHandle.read, []
    monkeypatch.setattr(tifffile.FileHandle, "read", lambda self, n=-1: reads.append(n) or read(self, n))
    with nd.open_source(tmp_path / "a.tif") as source:
        reads.clear()
        source.read([(0, 512 + 8), (0, 512 + 8), (0, 1)])
        assert len(reads) == 25
        assert source.bytes_read == 25 * 128 * 128 == sum(1 for _ in reads) * 128 * 128
        source.read([(0, 512), (512, 1024), (0, 1)])
        assert len(reads) == 25 + 16


@pytest.mark.parametrize(
    ("axes", "shape", "dtype"),
    [
        ("YXC", (61, 47, 3), "uint8"),
        ("YXC", (61, 47, 1), "float32"),
        ("ZYXC", (4, 61, 47, 2), "int16"),
        ("NYXC", (4, 61, 47, 1), "float64"),
        ("TZYXC", (2, 3, 21, 33, 1), "uint16"),
    ],
)
@pytest.mark.parametrize("name", ["a.tif", "a.ome.tiff"])
def test_tifffile_reads_written_files(tmp_path, axes, shape, dtype, name):
    if "N" in axes and "ome" in name:
        with pytest.raises(nd.ConfigError, match="no axis for samples"):
            nd.create_sink(tmp_path / name, shape, dtype, axes)
        return
    array = draw_image(shape, dtype)
    with nd.create_sink(tmp_path / name, shape, dtype, axes, chunks=(*[32] * (len(shape) - 1), shape[-1])) as sink:
        sink.write(nd.Box.of(shape), array)
        sink.commit()
    with tifffile.TiffFile(tmp_path / name) as file:
        assert file.is_bigtiff
        assert file.is_ome == ("ome" in name)
        assert file.pages[0].tile == (32, 32)
    np.testing.assert_array_equal(tifffile.imread(tmp_path / name).reshape(shape), array)
    with nd.open_source(tmp_path / name) as source:
        assert source.axes == axes
        np.testing.assert_array_equal(source.read(nd.Box.of(shape)), array)


@pytest.mark.parametrize("variant", ["tiled", "strips", "planes", "COG"])
def test_geotiff_keeps_its_georeference(tmp_path, variant):
    rasterio = pytest.importorskip("rasterio", reason="made and checked by rasterio")
    array = draw_image((3, 130, 170), "uint16")
    options = {
        "tiled": {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate", "interleave": "pixel"},
        "strips": {"compress": "lzw", "predictor": 2},
        "planes": {"tiled": True, "blockxsize": 64, "blockysize": 64, "interleave": "band", "compress": "zstd"},
        "COG": {"driver": "COG", "compress": "deflate"},
    }[variant]
    transform = rasterio.Affine(10, 0, 5e5, 0, -20, 6e6)
    defaults = {"driver": "GTiff", "height": 130, "width": 170, "count": 3, "dtype": "uint16", "crs": "EPSG:32633"}
    with rasterio.open(tmp_path / "a.tif", "w", **(defaults | {"transform": transform, "nodata": 0} | options)) as file:
        file.write(array)
    with nd.open_source(tmp_path / "a.tif") as source:
        assert (source.shape, source.axes) == ((130, 170, 3), "YXC")
        np.testing.assert_array_equal(source.read([(3, 90), (60, 150), (0, 3)]), array.transpose(1, 2, 0)[3:90, 60:150])
        with nd.create_sink(tmp_path / "out.tif", (130, 170, 1), "uint8", "YXC", like=source) as sink:
            sink.write([(0, 130), (0, 170), (0, 1)], np.full((130, 170, 1), 7, "uint8"))
            sink.commit()
        with pytest.raises(nd.ConfigError, match="whose physical position"):
            nd.create_sink(tmp_path / "half.tif", (65, 85, 1), "uint8", "YXC", like=source)
    with rasterio.open(tmp_path / "out.tif") as file:
        assert (file.crs, file.transform) == (rasterio.CRS.from_epsg(32633), transform)
        assert (file.read() == 7).all()


# uncompressed values are read in place
@pytest.mark.parametrize("options", [{"compress": "deflate"}, {"compress": "none"}])
@pytest.mark.parametrize(
    ("dtype", "nodata"), [("float32", -3.4028234663852886e38), ("float64", -9999.0), ("int16", -1)]
)
def test_nodata_values_are_nan(tmp_path, dtype, nodata, options):
    rasterio = pytest.importorskip("rasterio", reason="made by rasterio")
    array = np.arange(200, dtype=dtype).reshape(1, 10, 20)
    array[0, 3:5, 7] = nodata
    defaults = {"driver": "GTiff", "height": 10, "width": 20, "count": 1, "dtype": dtype, "crs": "EPSG:32633"}
    transform = rasterio.Affine(10, 0, 5e5, 0, -20, 6e6)
    with rasterio.open(tmp_path / "a.tif", "w", **defaults, nodata=nodata, transform=transform, **options) as file:
        file.write(array)
    expected = np.where(array == nodata, np.nan, array) if dtype != "int16" else array
    with nd.open_source(tmp_path / "a.tif") as source:
        np.testing.assert_array_equal(source.read(nd.Box.of(source.shape))[..., 0], expected[0])


def test_ome_keeps_the_pixel_size(tmp_path):
    sizes = {"PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "mm", "PhysicalSizeY": 0.25}
    tifffile.imwrite(tmp_path / "a.ome.tif", draw_image((40, 50)), metadata={"axes": "YX", **sizes})
    with nd.open_source(tmp_path / "a.ome.tif") as source:
        nd.create_sink(tmp_path / "b.ome.tif", (40, 50, 2), "uint8", "YXC", like=source).commit()
    with tifffile.TiffFile(tmp_path / "b.ome.tif") as file:
        assert all(f'{name}="{value}"' in file.ome_metadata for name, value in sizes.items())
