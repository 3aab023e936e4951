"""Reports of `neondist data convert` about lost values, channels, frames, folders and labels."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from convert_runs import convert, convert_and_open
from small_hdf5 import write_image_folder

import neondist as nd
from neondist.errors import DataError
from neondist.formats.image_loader import ImageLoader
from neondist.system import memory
from neondist.train.inference.images import open_images

pytest.importorskip("PIL", reason="images need Pillow")
RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (6, 5), dtype=np.uint8)
WIDE_VALUES = RNG.integers(300, 65536, (6, 5), dtype=np.uint16)


def make_image(array, mode=None):
    from PIL import Image

    image = Image.fromarray(np.asarray(array))
    return image if mode is None else image.convert(mode)


def write_images(folder, image, name="x.png", **options):
    """Save one image of each of two classes."""
    for kind in "ab":
        (folder / kind).mkdir(parents=True, exist_ok=True)
        if isinstance(image, bytes):
            (folder / kind / name).write_bytes(image)
        else:
            image.save(folder / kind / name, **options)
    return folder


def tiff_bytes(bits, sample_format, samples=1, extra=None, content=None):
    """Return a TIFF file of 2 x 3 pixels with tags that no library writes."""
    cells = bytes(range(2 * 3 * samples * bits // 8)) if content is None else content
    tags = [(256, 3), (257, 2), (259, 1), (262, 2 if samples > 2 else 1), (273, 8), (277, samples), (278, 2)]
    tags += [(279, len(cells)), (339, sample_format)] + ([] if extra is None else [(338, extra)])
    shorts, offset = b"", 8 + len(cells)
    if samples > 2:
        shorts, bits_entry = struct.pack(f"<{samples}H", *[bits] * samples), (258, 3, samples, offset)
    else:
        bits_entry = (258, 3, samples, bits if samples == 1 else bits | bits << 16)
    entries = sorted([(tag, 4, 1, value) for tag, value in tags] + [bits_entry])
    body = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<2sHI", b"II", 42, offset + len(shorts)) + cells + shorts + body + bytes(4)


def png16_bytes(colour_type, channels):
    """Return a PNG file of one pixel with 16 bits per channel."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 1, 1, 16, colour_type, 0, 0, 0)
    pixels = zlib.compress(b"\0" + b"\x12\x34" * channels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("dtype", ["u2", "i4", "f4"])
def test_wide_values_are_not_reduced_to_bytes(tmp_path, dtype, mode):
    write_images(tmp_path / "in", make_image(WIDE_VALUES.astype(dtype)), "x.tif")
    assert f"with values beyond the 8 bits of mode {mode}" in convert(tmp_path, tmp_path / "in", "--mode", mode)


@pytest.mark.parametrize("dtype", ["u2", ">u2", "i4", "f4"])
def test_wide_values_are_kept(tmp_path, dtype):
    write_images(tmp_path / "in", make_image(WIDE_VALUES.astype(dtype)), "x.tif")
    _, (train, _) = convert_and_open(tmp_path, tmp_path / "in")
    np.testing.assert_array_equal(train[0][0, ..., 0], WIDE_VALUES)


REFUSED = {
    "16 bits, RGB, PNG": (png16_bytes(2, 3), "x.png", "16 bits per channel, of which only 8 would be kept"),
    "16 bits, LA, PNG": (png16_bytes(4, 2), "x.png", "16 bits per channel"),
    "16 bits, RGBA, PNG": (png16_bytes(6, 4), "x.png", "16 bits per channel"),
    "16 bits, RGB, TIFF": (tiff_bytes(16, 1, 3), "x.tif", "16 bits per channel"),
    "16 bits, RGB, PPM": (b"P6 2 1 65535\n" + bytes(range(12)), "x.ppm", "16 bits per channel"),
    "signed bytes": (tiff_bytes(8, 2), "x.tif", "signed 8-bit values"),
    "large unsigned": (tiff_bytes(32, 1, content=b"\xff" * 24), "x.tif", "above 2147483647"),
    "a fourth channel": (tiff_bytes(8, 1, 4, 0), "x.tif", "X would be lost on reading"),
    "CMYK": (make_image(BYTES).convert("CMYK"), "x.tif", "has CMYK pixels; convert them (--mode RGB)"),
    "YCbCr": (make_image(BYTES).convert("RGB").convert("YCbCr"), "x.tif", "has YCbCr pixels; convert them (--mode"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_lossy_pillow_reads_are_refused(tmp_path, name):
    image, file, message = REFUSED[name]
    write_images(tmp_path / "in", image, file)
    output = convert(tmp_path, tmp_path / "in")
    assert message in output, output
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_several_frames_are_refused(tmp_path, suffix):
    frames = [make_image(BYTES.T.copy().reshape(6, 5)), make_image(255 - BYTES)]
    write_images(tmp_path / "in", make_image(BYTES), f"x{suffix}", save_all=True, append_images=frames)
    assert "frames, of which only one would be kept" in convert(tmp_path, tmp_path / "in")


def test_transparency_is_kept_or_refused(tmp_path):
    alpha = np.where(BYTES > 99, 255, 7).astype(np.uint8)
    write_images(tmp_path / "in", make_image(np.stack([BYTES, BYTES, BYTES, alpha], axis=-1)))
    assert "has transparent pixels, which mode RGB would lose" in convert(tmp_path, tmp_path / "in", "--mode", "RGB")
    _, (train, _) = convert_and_open(tmp_path, tmp_path / "in")
    np.testing.assert_array_equal(train[0][0, ..., 3], alpha)
    write_images(tmp_path / "in", make_image(np.stack([BYTES, alpha], axis=-1)))
    _, (train, _) = convert_and_open(tmp_path, tmp_path / "in")
    np.testing.assert_array_equal(train[0][0], np.stack([BYTES, alpha], axis=-1))
    palette = make_image(np.arange(6, dtype=np.uint8).reshape(2, 3))
    palette.putpalette(range(18), "RGB")
    write_images(tmp_path / "in", palette, transparency=2)
    _, (train, _) = convert_and_open(tmp_path, tmp_path / "in")
    assert train[0][0].reshape(6, 4)[2:4].tolist() == [[6, 7, 8, 0], [9, 10, 11, 255]]
    write_images(tmp_path / "in", make_image(np.stack([BYTES] * 3 + [np.full_like(BYTES, 255)], axis=-1)))
    _, (train, _) = convert_and_open(tmp_path, tmp_path / "in", "--mode", "RGB")
    np.testing.assert_array_equal(train[0][0], np.stack([BYTES] * 3, axis=-1))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif"])
def test_exif_orientation_is_applied(tmp_path, suffix):
    from PIL import Image

    exif = Image.Exif()
    exif[274] = 6  # the first row is the right side
    smooth = np.linspace(0, 255, 12 * 8).reshape(12, 8).astype(np.uint8)
    write_images(tmp_path / "in", make_image(smooth), f"x{suffix}", exif=exif)
    _, (train, _) = convert_and_open(tmp_path, tmp_path / "in")
    np.testing.assert_allclose(train[0][0, ..., 0], np.rot90(smooth, -1), atol=6)
    source = open_images(tmp_path / "in" / "a" / f"x{suffix}", (8, 12, 1))
    np.testing.assert_array_equal(source.read_raw(range(1), (slice(0, 8), slice(0, 12))), train[0][:1])
    assert ImageLoader().extents(tmp_path / "in" / "a" / f"x{suffix}") == (8, 12)


def test_pillow_warnings_are_not_repeated(tmp_path):
    """Refuse damaged metadata of TIFF files, whose tags describe the pixels, but not of JPEG files."""
    from PIL import Image

    smooth = np.linspace(0, 255, 12 * 8).reshape(12, 8).astype(np.uint8)
    damaged = b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0"
    write_images(tmp_path / "in", make_image(smooth), "x.jpg", exif=damaged)
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        Image.open(tmp_path / "in" / "a" / "x.jpg").close()
    assert convert(tmp_path, tmp_path / "in") == "fine"
    (tmp_path / "in" / "a" / "x.jpg").unlink()
    raw = tiff_bytes(8, 1)
    (tmp_path / "in" / "a" / "x.tif").write_bytes(raw[:-6])
    assert "cannot be read as an image (Corrupt EXIF data" in convert(tmp_path, tmp_path / "in")


MASKS = {
    "black and white": (make_image(BYTES > 99, "L"), "m.png", "maps contain only 0 and 255"),
    "shades": (b"P2 2 1 3\n1 2\n", "m.pgm", "can rescale its class indices"),
    "lossy": (make_image(BYTES // 99), "m.jpg", "JPEG is lossy and changes class indices"),
    "colours": (make_image(BYTES, "RGB"), "m.png", "a class map has one channel"),
    "negative": (make_image(BYTES.astype("i4") - 1), "m.tif", "has the label -1"),
    "two of a name": (make_image(BYTES // 99), "m.png", "is a second map for an image"),
}


@pytest.mark.parametrize("name", MASKS)
def test_invalid_label_maps(tmp_path, name):
    labels, file, message = MASKS[name]
    if name == "negative":
        labels = make_image(np.where(BYTES > 99, -1, 0).astype("i4"))
    write_images(tmp_path / "in", make_image(BYTES), f"m{'.png' if name == 'shades' else file[1:]}")
    write_images(tmp_path / "maps", labels, file)
    if name == "two of a name":
        write_images(tmp_path / "maps", labels, "m.bmp")
    assert message in convert(tmp_path, tmp_path / "in", "--maps", tmp_path / "maps")


def test_one_bit_masks_are_classes(tmp_path):
    write_images(tmp_path / "in", make_image(BYTES))
    write_images(tmp_path / "maps", make_image(BYTES > 99))
    _, (train, _) = convert_and_open(tmp_path, tmp_path / "in", "--maps", tmp_path / "maps")
    np.testing.assert_array_equal(train[1][0], BYTES > 99)


def test_skipped_inputs_are_reported(tmp_path, capsys):
    from neondist.cli import main

    for part in ("train", "test", "val", "more"):
        write_image_folder(tmp_path / "in" / part, count=2)
    write_image_folder(tmp_path / "in" / "train", ("owl",), 1)
    (tmp_path / "in" / "train" / "owl" / "000.png").rename(tmp_path / "in" / "train" / "lost.png")
    (tmp_path / "in" / "train" / "cat" / "note.txt").write_text("meow")
    assert main(["data", "convert", str(tmp_path / "in"), "--to", str(tmp_path / "out.h5")]) == 0
    output = capsys.readouterr().out
    for line in (
        f"left out: {tmp_path}/in/train/owl has no images, so it is not counted as a class\n",
        "left out: 1 file called *.txt\n",
        f"left out: 4 images in {tmp_path}/in/more\n",
        f"left out: 1 image in {tmp_path}/in/train\n",
    ):
        assert line in output
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 3, 3)), y=np.arange(4), z=np.zeros(3))
    assert main(["data", "convert", str(tmp_path / "x.npz"), "--to", str(tmp_path / "out.h5")]) == 0
    assert "left out: the array z\n" in capsys.readouterr().out


def test_long_conversions_report_progress(tmp_path, capsys, monkeypatch):
    """Without a terminal too: the samples written and an estimate."""
    from neondist.cli import main

    monkeypatch.setattr("neondist.terminal.progress_line.FIRST_LINE_SECONDS", 0)
    monkeypatch.setattr("neondist.terminal.progress_line.LINE_INTERVAL_SECONDS", 0)
    monkeypatch.setattr("neondist.data.split_source.BLOCK_BYTES", 4096)
    np.savez(tmp_path / "x.npz", x=np.zeros((70, 16, 16)), y=np.arange(70) % 3)
    assert main(["data", "convert", str(tmp_path / "x.npz"), "--to", str(tmp_path / "out.h5")]) == 0
    *lines, last = [line.strip() for line in capsys.readouterr().err.splitlines() if line.startswith("sample")]
    assert lines[0].startswith("sample 0 of 70")
    assert any(line.endswith("left") for line in lines[1:])
    assert last.startswith("sample 70 of 70")


def test_test_folder_without_training_folder(tmp_path):
    for part in ("Test", "other"):
        write_image_folder(tmp_path / "in" / part)
    assert "has a folder 'Test', but no training folder" in convert(tmp_path, tmp_path / "in")
    (tmp_path / "in" / "other").rename(tmp_path / "in" / "Train")
    _, (_, test) = convert_and_open(tmp_path, tmp_path / "in")
    assert len(test[0]) == 6


@pytest.mark.parametrize("link", ["in/dog", "in/cat/more", "in/train"])
def test_links_to_folders_are_not_followed(tmp_path, link):
    write_image_folder(tmp_path / "secret", ("x",))
    write_image_folder(tmp_path / "in", ("cat",))
    (tmp_path / link).symlink_to(tmp_path / "secret")
    assert f"{link}: is a link to a folder" in convert(tmp_path, tmp_path / "in")


TABLES = {
    "many digits": ("cat/000.png," + "9" * 5000, "line 1 is 'cat/000.png,999"),
    "too large": ("cat/000.png,4294967296", "sample 0 has the label 4294967296"),
    "third column": ("cat/000.png,1,train", "line 1 is 'cat/000.png,1,train'"),
    "first file missing": ("cat/000.pgn,1\ncat/001.png,0", "line 1: "),
    "two labels": ("cat/000.png,1\ncat/000.png,0", "line 2: 'cat/000.png' has label 1 in an earlier line"),
    "real number": ("cat/000.png,1.5", "expected FILE,LABEL, with a label from 0"),
    "null": ("cat/\0.png,1", "line 1"),
    "long name": ("c" * 5000 + ",1", "line 1"),
}


@pytest.mark.parametrize("name", TABLES)
def test_invalid_label_tables(tmp_path, name):
    text, message = TABLES[name]
    write_image_folder(tmp_path / "in", ("cat",))
    (tmp_path / "t.csv").write_text(text + "\n")
    output = convert(tmp_path, tmp_path / "in", "--labels", tmp_path / "t.csv")
    assert message in output, output


def test_invalid_arrays(tmp_path):
    def convert_arrays(x, y):
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", y)
        return convert(tmp_path, tmp_path / "x.npy", tmp_path / "y.npy")

    x, y = np.zeros((3, 4, 4)), np.array([0, 1, 0])
    assert "sample 1 has the label -1" in convert_arrays(x, np.array([0, -1, 0]))
    assert f"sample 2 has the label {2**63}" in convert_arrays(x, np.array([0, 1, 2**63], np.uint64))
    assert "maps contain only 0 and 255" in convert_arrays(x, np.full((3, 4, 4), 255, np.uint8))
    assert "real numbers of at most 64 bits" in convert_arrays(x.astype(np.longdouble), y)
    assert "real numbers" in convert_arrays(x + 1j, y)
    assert "x.npy of shape (0, 4, 4): there are no images; give at least one" in convert_arrays(x[:0], y[:0])
    assert "of shape (): give one label per image" in convert_arrays(x, np.array(0))
    assert "x.npy: each sample has shape (); expected (H, W), (H, W, C) or" in convert_arrays(np.array(0.0), y)
    x[1, 2, 3] = np.nan
    assert "sample 1 has values that are not finite" in convert_arrays(x, y)
    assert "--size and --mode apply to folders" in convert(
        tmp_path, tmp_path / "x.npy", tmp_path / "y.npy", "--mode", "L"
    )
    assert "require a folder of images as the only source" in convert(
        tmp_path, tmp_path / "x.npy", tmp_path / "y.npy", "--maps", tmp_path
    )


def test_oversized_images_are_refused_from_the_header(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 10**9)
    write_images(tmp_path / "in", make_image(BYTES))
    assert "an image of 100000 x 100000 needs 30 GB" in convert(tmp_path, tmp_path / "in", "--size", "100000", "100000")
    bomb = io.BytesIO()
    make_image(BYTES).save(bomb, "PNG")
    raw = bytearray(bomb.getvalue())
    raw[16:24] = struct.pack(">II", 50_000, 40_000)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    (tmp_path / "bomb.png").write_bytes(raw)
    for call in (
        ImageLoader().load,
        ImageLoader().load_labels,
        ImageLoader().extents,
        ImageLoader("RGB").load_pillow_image,
    ):
        with pytest.raises(DataError, match="an image of 50000 x 40000 needs 6 GB of memory, but only 1 GB"):
            call(tmp_path / "bomb.png")
    with open(tmp_path / "x.npy", "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (2, 1 << 20, 1 << 20, 1)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + (1 << 41))  # a sparse file
    np.save(tmp_path / "y.npy", np.zeros(2, int))
    assert "a sample of 1048576 x 1048576 x 1 needs 3.299 TB of memory, but only 1 GB" in convert(
        tmp_path, tmp_path / "x.npy", tmp_path / "y.npy"
    )


def test_unreadable_folder(tmp_path, monkeypatch):
    write_image_folder(tmp_path / "in")
    original = os.scandir

    def scandir(path="."):
        if os.fspath(path).endswith("cat"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "in/cat: cannot be read (Permission denied)" in convert(tmp_path, tmp_path / "in")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root can read all files")
@pytest.mark.parametrize("make", [nd.CIFAR10, nd.MNIST, nd.HDF5Dataset, nd.Photographs])
@pytest.mark.parametrize("name", ["", "inside"])
def test_forbidden_paths(tmp_path, make, name):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(DataError):
        make(tmp_path / "closed" / name).check()
    assert "refused" in convert(tmp_path, tmp_path / "closed" / name)
