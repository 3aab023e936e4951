"""Picture files, which are decoded at once, and folders of images."""

import numpy as np
import pytest
from image_sources import draw_image

import neondist as nd

PIL = pytest.importorskip("PIL.Image", reason="pictures need Pillow")


@pytest.mark.parametrize(("shape", "dtype"), [((30, 41, 3), "uint8"), ((30, 41, 1), "uint16"), ((30, 41, 4), "uint8")])
def test_pictures(tmp_path, shape, dtype):
    array = draw_image(shape, dtype)
    with nd.create_sink(tmp_path / "a.png", shape, dtype, "YXC") as sink:
        for top in range(0, 30, 7):
            sink.write([(top, min(30, top + 7)), (0, 41), (0, shape[-1])], array[top : top + 7])
        sink.commit()
    np.testing.assert_array_equal(np.asarray(PIL.open(tmp_path / "a.png")).reshape(shape), array)
    with nd.open_source(tmp_path / "a.png") as source:
        assert (source.shape, source.dtype, source.chunks) == (shape, np.dtype(dtype), shape)
        np.testing.assert_array_equal(source.read([(3, 9), (1, 40), (0, shape[-1])]), array[3:9, 1:40])


def test_jpeg_round_trip(tmp_path):
    array = np.broadcast_to(np.arange(64, dtype="uint8")[:, None, None] * 3, (64, 48, 3))
    with nd.create_sink(tmp_path / "a.jpg", array.shape, "uint8", "YXC", quality=95) as sink:
        sink.write(nd.Box.of(array.shape), array)
        sink.commit()
    with nd.open_source(tmp_path / "a.jpg") as source:
        assert np.abs(source.read(nd.Box.of(array.shape)).astype(int) - array).max() < 8
    with pytest.raises(nd.ConfigError, match=r"dtype float32; it stores 8-bit \(Y, X, C\) with 1 or 3 channels"):
        nd.create_sink(tmp_path / "b.jpg", (4, 4, 1), "float32", "YXC")
    with pytest.raises(nd.ConfigError, match=r"shape \[4\], axes 'C', .* choose \.npy or \.h5"):
        nd.create_sink(tmp_path / "b.png", (4,), "float32", "C")  # scores of a classifier
    with pytest.raises(nd.ConfigError, match="writing this format is not supported"):
        nd.create_sink(tmp_path / "b.gif", (4, 4, 1), "uint8", "YXC")


def test_shape_and_dtype_are_known_before_decoding(tmp_path):
    from neondist.formats.image_loader import ImageLoader

    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        PIL.fromarray(draw_image((5, 7), "uint16" if mode == "I;16" else "uint8")).convert(mode).save(
            tmp_path / "a.png"
        )
        shape, dtype = ImageLoader().shape_and_dtype(tmp_path / "a.png")
        image = ImageLoader().load(tmp_path / "a.png")
        assert (image.shape, image.dtype) == (shape, dtype)
    exif = PIL.Exif()
    exif[274] = 6
    PIL.fromarray(draw_image((5, 7, 3))).save(tmp_path / "a.jpg", exif=exif)
    assert (
        ImageLoader().shape_and_dtype(tmp_path / "a.jpg")[0]
        == ImageLoader().load(tmp_path / "a.jpg").shape
        == (7, 5, 3)
    )


def move_exif_after_pixels(path):
    """Move the EXIF chunk of a PNG file behind its pixels, where the format allows it as well."""
    data = path.read_bytes()
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    path.write_bytes(data[:start] + data[end:-12] + data[start:end] + data[-12:])


@pytest.mark.parametrize("place", ["", "before", "after"])
def test_headers_of_png_files_are_read_without_decoding(tmp_path, monkeypatch, place):
    """Pillow decodes PNG files to look for EXIF data after the pixels: seconds for each folder of large images."""
    from PIL import ImageFile

    from neondist.formats.image_loader import ImageLoader

    exif, path, decoded = PIL.Exif(), tmp_path / "a.png", []
    exif[274], exif[306] = 6, "2020:01:02 03:04:05"
    PIL.fromarray(draw_image((300, 400, 3))).save(path, **{"exif": exif} if place else {})
    if place == "after":
        move_exif_after_pixels(path)
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: decoded.append(1) or load(image))
    shape, dtype = ImageLoader().shape_and_dtype(path)
    with nd.open_source(path) as source:
        assert source.metadata_names() == (["EXIF"] if place else [])
    extents = ImageLoader().extents(path)
    assert bool(decoded) == (place == "after")
    image = ImageLoader().load(path)
    assert (image.shape, image.dtype, extents) == (shape, dtype, shape[:2])
    assert shape == ((400, 300, 3) if place else (300, 400, 3))


def test_folders(tmp_path):
    images = [draw_image((8, 6, 3), seed=n) for n in range(3)]
    for n, array in enumerate(images):
        PIL.fromarray(array).save(tmp_path / f"{n}.png")
    with nd.open_source(tmp_path) as source:
        assert (source.axes, source.shape) == ("NYXC", (3, 8, 6, 3))
        np.testing.assert_array_equal(source.read([(1, 3), (2, 8), (0, 3), (0, 3)]), np.stack(images)[1:, 2:, :3])
    PIL.fromarray(draw_image((8, 7, 3))).save(tmp_path / "2.png")
    with pytest.raises(nd.DataError, match=r"2\.png: has shape \[8, 7, 3\]"):
        nd.open_source(tmp_path)
