"""Zarr stores written by zarr, and stores written by neondist and read by zarr."""

import json

import numpy as np
import pytest
from image_sources import check_source, draw_image

import neondist as nd

zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")

from neondist.formats import zarr_store  # noqa: E402


@pytest.mark.parametrize("options", [{"zarr_format": 2}, {"zarr_format": 3}, {"zarr_format": 3, "shards": (1, 64, 64)}])
def test_arrays_written_by_zarr(tmp_path, options):
    array = draw_image((4, 100, 90), "int16")
    names = {} if options["zarr_format"] == 2 else {"dimension_names": ["band", "lat", "lon"]}
    zarr_array = zarr.create_array(str(tmp_path / "a.zarr"), data=array, chunks=(1, 32, 32), **options, **names)
    if not names:
        zarr_array.attrs["_ARRAY_DIMENSIONS"] = ["band", "lat", "lon"]
    with nd.open_source(tmp_path / "a.zarr") as source:
        assert (source.axes, source.shape, source.chunks) == ("YXC", (100, 90, 4), (32, 32, 1))
        check_source(source, array.transpose(1, 2, 0))
        source.bytes_read = 0
        source.read([(0, 40), (0, 20), (0, 1)])
        assert source.bytes_read == 64 * 32 * 2


@pytest.mark.parametrize("ome", ["0.4", "0.5"])
def test_levels_of_an_image(tmp_path, ome):
    array = draw_image((2, 3, 70, 90), "uint16")
    group = zarr.open_group(str(tmp_path / "a.ome.zarr"), mode="w", zarr_format=2 if ome == "0.4" else 3)
    image = {
        "axes": [{"name": name, "type": "space", "unit": f"of {name}"} for name in "tcyx"],
        "datasets": [
            {"path": f"s{n}", "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 0.5 * 2**n, 0.5 * 2**n]}]}
            for n in range(2)
        ],
    }
    group.attrs.update({"multiscales": [image]} if ome == "0.4" else {"ome": {"version": ome, "multiscales": [image]}})
    for n in range(2):
        level = array[:, :, :: 2**n, :: 2**n]
        group.create_array(f"s{n}", data=level, chunks=(1, 1, 32, 32))
    for n, path in enumerate([f"{tmp_path}/a.ome.zarr", f"{tmp_path}/a.ome.zarr#1"]):
        with nd.open_source(path) as source:
            assert (source.axes, source.levels, source.metadata["scale"]["X"]) == ("TYXC", 2, 0.5 * 2**n)
            check_source(source, array[:, :, :: 2**n, :: 2**n].transpose(0, 2, 3, 1))
            with nd.create_sink(tmp_path / f"{n}.ome.zarr", source.shape, "u1", "TYXC", like=source, ome=ome) as sink:
                sink.commit()
        written = dict(zarr.open_group(str(tmp_path / f"{n}.ome.zarr")).attrs)
        written = written.get("ome", written)["multiscales"][0]
        assert [axis["unit"] for axis in written["axes"]] == ["of t", "of c", "of y", "of x"]
        (step,) = written["datasets"][0]["coordinateTransformations"]
        assert step["scale"] == [1, 1, 0.5 * 2**n, 0.5 * 2**n]
    for path in ("a.ome.zarr/s1", "a.ome.zarr:s1"):
        with nd.open_source(tmp_path / path, axes="TCYX") as source:
            assert source.shape == (2, 35, 45, 3)


@pytest.mark.parametrize("ome", ["0.4", "0.5"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_write_a_pyramid(tmp_path, ome, ranks):
    array = draw_image((1100, 700, 2), "uint8")

    def write_rows(grid):
        options = {"chunks": (256, 128, 2), "grid": grid, "ome": ome}
        with nd.create_sink(tmp_path / "a.ome.zarr", array.shape, "uint8", "YXC", **options) as sink:
            rows = slice(*nd.part_range(1100, grid.size, grid.rank))
            sink.write([rows, slice(0, 700), slice(0, 2)], array[rows])
            sink.commit()

    nd.loopback.run(ranks, lambda world: write_rows(nd.ProcessGrid(world)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.ome.zarr"]
    group = zarr.open(str(tmp_path / "a.ome.zarr"), mode="r")
    assert group.metadata.zarr_format == (2 if ome == "0.4" else 3)
    image = (group.attrs["multiscales"] if ome == "0.4" else group.attrs["ome"]["multiscales"])[0]
    assert [axis["name"] for axis in image["axes"]] == ["c", "y", "x"]
    assert [level["coordinateTransformations"][0]["scale"] for level in image["datasets"]] == [
        [1, 1, 1],
        [1, 2, 2],
        [1, 4, 4],
    ]
    for n in range(3):
        np.testing.assert_array_equal(group[str(n)][:], array[:: 2**n, :: 2**n].transpose(2, 0, 1))
    with nd.open_source(f"{tmp_path}/a.ome.zarr#2") as source:
        check_source(source, array[::4, ::4])


def test_levels_are_means(tmp_path):
    array = draw_image((600, 401, 1), "float64")
    with nd.create_sink(tmp_path / "a.ome.zarr", array.shape, "float64", "YXC") as sink:
        sink.write(nd.Box.of(array.shape), array)
        sink.commit()
    padded = np.pad(array, [(0, 0), (0, 1), (0, 0)], "edge")
    with nd.open_source(f"{tmp_path}/a.ome.zarr#1") as source:
        expected = padded.reshape(300, 2, 201, 2, 1).mean((1, 3))
        np.testing.assert_allclose(source.read(nd.Box.of(source.shape)), expected, rtol=1e-14)


def test_unsafe_stores_are_refused(tmp_path):
    zarr.create_array(str(tmp_path / "a.zarr"), data=draw_image((9, 9)), zarr_format=2)
    metadata = json.loads((tmp_path / "a.zarr" / ".zarray").read_text())
    (tmp_path / "a.zarr" / ".zarray").write_text(json.dumps(metadata | {"filters": [{"id": "pickle", "protocol": 5}]}))
    with pytest.raises(nd.DataError, match="pickle"):
        nd.open_source(tmp_path / "a.zarr")
    with pytest.raises(nd.DataError, match="points outside"):
        nd.open_source(f"{tmp_path}/a.zarr:../b")
    metadata |= {"shape": [10**9, 10**9], "chunks": [10**6, 10**6]}
    (tmp_path / "a.zarr" / ".zarray").write_text(json.dumps(metadata))
    with pytest.raises(nd.DataError, match="1 TB must be decoded at once"):
        nd.open_source(tmp_path / "a.zarr")
    (tmp_path / "b.zarr").mkdir()
    (tmp_path / "b.zarr" / "precious").touch()
    with pytest.raises(nd.OutputError, match="is a folder, but not a Zarr store"):
        nd.create_sink(tmp_path / "b.zarr", (2, 2, 1), "uint8", "YXC", overwrite=True)


@pytest.mark.parametrize("ome", ["0.4", "0.5"])
def test_plates_and_wells(tmp_path, ome):
    group = zarr.open_group(str(tmp_path / "plate.ome.zarr"), mode="w", zarr_format=2 if ome == "0.4" else 3)

    def describe(node, metadata):
        node.attrs.update(metadata if ome == "0.4" else {"ome": {"version": ome, **metadata}})

    wells = ["A/1", "B/12"]
    describe(group, {"plate": {"wells": [{"path": path} for path in wells], "name": "one"}})
    for path, count in zip(wells, (2, 1), strict=True):
        well = group.require_group(path)
        describe(well, {"well": {"images": [{"path": str(n)} for n in range(count)]}})
        for n in range(count):
            image = well.create_group(str(n))
            describe(image, {"multiscales": [{"axes": [{"name": "y"}, {"name": "x"}], "datasets": [{"path": "0"}]}]})
            image.create_array("0", data=draw_image((6, 7), seed=n), chunks=(6, 7))
    with pytest.raises(nd.DataError, match=r"is a plate of 2 wells, .* such as \S*plate\.ome\.zarr/A/1/0$") as raised:
        nd.open_source(tmp_path / "plate.ome.zarr")
    with pytest.raises(nd.DataError, match=r"is a well of 2 images, .* such as \S*/A/1/0$"):
        nd.open_source(tmp_path / "plate.ome.zarr/A/1")
    for path, seed in ((str(raised.value).rpartition(" ")[2], 0), (f"{tmp_path}/plate.ome.zarr:A/1/1", 1)):
        with nd.open_source(path) as source:
            check_source(source, draw_image((6, 7), seed=seed)[..., None])
    with nd.open_source(tmp_path / "plate.ome.zarr/B/12") as source:
        check_source(source, draw_image((6, 7))[..., None])


@pytest.mark.parametrize("ome", ["0.4", "0.5"])
def test_class_maps_are_label_images(tmp_path, ome):
    """Write label images with a colour per label and a transparent background, as in OME-NGFF."""
    for name, options in ("labels", {"classes": 3}), ("image", {}):
        with nd.create_sink(tmp_path / f"{name}.ome.zarr", (8, 8, 1), "uint8", "YXC", ome=ome, **options) as sink:
            sink.write((slice(0, 8), slice(0, 8), slice(0, 1)), np.ones((8, 8, 1), "uint8"))
            sink.commit()
    labels, image = (dict(zarr.open_group(str(tmp_path / f"{name}.ome.zarr")).attrs) for name in ("labels", "image"))
    label_metadata = labels["image-label"] if ome == "0.4" else labels["ome"]["image-label"]
    assert label_metadata.get("version") == ("0.4" if ome == "0.4" else None)
    assert [entry["label-value"] for entry in label_metadata["colors"]] == [0, 1, 2]
    assert [entry["rgba"][3] for entry in label_metadata["colors"]] == [0, 255, 255]
    assert len({tuple(entry["rgba"]) for entry in label_metadata["colors"]}) == 3
    assert all(0 <= value <= 255 for entry in label_metadata["colors"] for value in entry["rgba"])
    assert "image-label" not in {**image, **image.get("ome", {})}
    with nd.open_source(tmp_path / "labels.ome.zarr") as source:
        assert np.all(source.read((slice(0, 8), slice(0, 8), slice(0, 1))) == 1)


@pytest.mark.parametrize(
    ("axis_types", "letters"),
    [
        ([("frame", "time"), ("ch", "channel"), ("y", "space"), ("x", "space")], "TCYX"),
        ([("c", "channel"), ("stack", "space"), ("y", None), ("x", None)], "CNYX"),
        ([("x", "space"), ("t", "channel"), ("y", "space")], "XCY"),
        ([("angle", "other"), ("phase", None), ("y", "space"), ("x", "space")], "NMYX"),
    ],
)
def test_axis_types_precede_names(tmp_path, axis_types, letters):
    """Prefer the type of an axis to its name."""
    array = draw_image((2, 3, 4, 5)[: len(axis_types)])
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    group.create_array("0", data=array)
    axes = [{"name": name} | ({"type": kind} if kind else {}) for name, kind in axis_types]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": [{"path": "0"}]}]
    with nd.open_source(tmp_path / "a.zarr") as source:
        assert source.stored_axes.letters == letters
        assert source.shape[-1] == (array.shape[letters.index("C")] if "C" in letters else 1)


def test_unknown_axes_name_the_file(tmp_path):
    for shape in ((), (2,) * 6):
        zarr.create_array(str(tmp_path / "a.zarr"), data=np.ones(shape), overwrite=True)
        np.save(tmp_path / "a.npy", np.ones(shape))
        for name in ("a.zarr", "a.npy"):
            with pytest.raises(nd.ShapeError, match=rf"{name}: cannot interpret an array of shape .* as images"):
                nd.open_source(tmp_path / name)


@pytest.mark.parametrize("codec", ["zstd", "gzip", "zlib", "blosc", "lz4", "bz2", "lzma"])
def test_chunks_with_too_many_bytes(tmp_path, monkeypatch, codec):
    """Refuse a chunk that exceeds its shape before it is decompressed completely."""
    numcodecs = pytest.importorskip("numcodecs")
    monkeypatch.setattr("neondist.io.decompressed_size._ALWAYS_ACCEPTED_BYTES", 0)
    compressor, path = numcodecs.get_codec({"id": codec}), tmp_path / "a.zarr"
    array = zarr.create_array(
        path, shape=(2, 90, 90), chunks=(1, 90, 90), dtype="u1", compressors=[compressor], zarr_format=2
    )
    array[:] = 7
    (path / "1.0.0").write_bytes(compressor.encode(bytes(1 << 22)))
    sizes, original = [], zarr_store.decompressed_size
    monkeypatch.setattr(
        zarr_store, "decompressed_size", lambda *arguments: sizes.append(original(*arguments)) or sizes[-1]
    )
    with nd.open_source(path) as source:
        assert (source.read([(0, 1), *((0, n) for n in source.shape[1:])]) == 7).all()
        with pytest.raises(nd.DataError, match=r"a\.zarr.*: unpacks to more than .*; restore it from a good copy"):
            source.read([(0, n) for n in source.shape])
    assert max(sizes) > zarr_store._EXPANSION_MARGIN_BYTES
