"""Crops of images in files of any kind: the same from the same pixels, in every format, on every grid."""

from pathlib import Path

import numpy as np
import pytest

import neondist as nd

FORMATS = {
    ".npy": "",
    ".h5": "",
    ".nc": "netCDF4",
    ".tif": "tifffile",
    ".ome.tif": "tifffile",
    ".zarr": "zarr",
    ".ome.zarr": "zarr",
    ".nii": "nibabel",
    ".png": "PIL",
}
SIZES = [(40, 52), (61, 33), (47, 47), (35, 80), (50, 41)]


def cells(n, channels=3):
    y, x = np.indices(SIZES[n])
    draw = np.random.default_rng(n)
    noise = draw.integers(0, 99, (*SIZES[n], channels))
    return (noise + 9 * n + y[..., None]).astype("uint8"), ((x + y + n) % 3).astype("uint8")


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = array if array.ndim == 3 else array[..., None]
    with nd.create_sink(path, array.shape, array.dtype, "YXC", overwrite=True) as sink:
        sink.write(nd.Box.of(array.shape), array)
        sink.commit()


@pytest.fixture
def made(tmp_path):
    def make(suffix):
        for n in range(len(SIZES)):
            image, mask = cells(n)
            save(tmp_path / "images" / f"{n}{suffix}", image)
            save(tmp_path / "masks" / f"{n}{suffix}", mask)
        return {"images": f"{tmp_path}/images/*{suffix}", "labels": f"{tmp_path}/masks/*{suffix}"}

    return make


def opened(grid, fields, **more):
    data = nd.ImageFiles(**({"crop": [24, 30], "validation": 2, "seed": 5} | fields | more))
    data.open(grid)
    return data


def on_ranks(ranks, function):
    return nd.loopback.run(ranks, lambda world: function(nd.ProcessGrid(world)))


def losses(grid, fields):
    data = opened(grid, fields, validation=1, crops_per_image=2, crop=[13, 18])
    layers = [
        nd.ConvLayerDist(4, 3, padding=1, activation=nd.ReLU()),
        nd.BatchNormLayerDist(),
        nd.ConvLayerDist(3, 3, padding=1),
    ]
    model = nd.ConvnetDist(layers, cost=nd.CrossEntropy(), optimizer=nd.SGD(learning_rate=0.05), dtype="float64")
    model.build(data.sample_shape, 3, grid)
    found = []
    for epoch, part in enumerate(([0, 3, 6], [5, 1, 4])):
        data.train.epoch = epoch
        found.append(float(model.train_batch(data.train.images(part, "float64"), data.train.targets(part))))
    data.close()
    return found


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.long
def test_crops_labels_and_losses_are_the_same_in_all_formats_on_all_grids(made, suffix):
    for kind in {"", FORMATS[suffix]} - {""}:
        pytest.importorskip(kind, reason=f"{suffix} needs {kind}")
    fields = made(suffix)
    for ranks in (1, 3, 4) if suffix == ".npy" else (3, 4):
        for found in on_ranks(ranks, lambda grid: losses(grid, fields)):
            np.testing.assert_allclose(found, EXPECTED or found, rtol=1e-12)
            EXPECTED[:] = EXPECTED or found


EXPECTED = []  # losses of the first format, on one rank


def test_crops_are_parts_of_their_images(made):
    """Every crop lies in its image with its mask, moves from epoch to epoch, and in validation stays."""
    fields = made(".npy")
    data = on_ranks(1, lambda grid: opened(grid, fields, crops_per_image=3, normalise="none"))[0]
    assert (len(data.train), len(data.validation), data.sample_shape) == (9, 6, (24, 30, 3))
    places = set()
    for epoch in (0, 1, 7):
        data.train.epoch = epoch
        images, masks = data.train.images(np.arange(9), "float64"), data.train.targets(np.arange(9))
        for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
            item = data.train.tiles.items[number]
            whole, classes = cells(int(item.name[-5]))
            y, x = data.train.tiles.crops.first(number)
            np.testing.assert_array_equal(image, whole[y : y + 24, x : x + 30])
            np.testing.assert_array_equal(mask, classes[y : y + 24, x : x + 30])
            places.add((epoch, number, y, x))
    assert len({(number, y, x) for _, number, y, x in places}) > 20
    before = data.validation.images([0, 1, 5])
    data.train.epoch = 3
    np.testing.assert_array_equal(data.validation.images([0, 1, 5]), before)
    names = [{item.name for item in split.tiles.items} for split in (data.train, data.validation)]
    assert len(names[0]) == 3
    assert not names[0] & names[1]


def test_three_splits(made, tmp_path):
    fields = made(".npy")

    def run(grid):
        data = opened(grid, fields, test=0.2)
        assert data.classes is None
        return {name: split.targets(range(len(split))) for name, split in data.splits.items()}

    (found,), whole = on_ranks(1, run), on_ranks(3, run)
    assert {name: len(each) for name, each in found.items()} == {"train": 2, "validation": 2, "test": 1}
    for name, cut in found.items():
        np.testing.assert_array_equal(np.concatenate([each[name] for each in whole], axis=1), cut)
    before = opened(nd.ProcessGrid.serial(), fields).validation
    np.testing.assert_array_equal(before.targets(range(2)), found["validation"])

    image, mask = cells(3)
    save(tmp_path / "new" / "3.npy", image)
    save(tmp_path / "drawn" / "3.npy", mask)
    other = {"images": f"{tmp_path}/new/*.npy", "labels": f"{tmp_path}/drawn/*.npy"}
    data = opened(nd.ProcessGrid.serial(), fields, test=other)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 3, "validation": 2, "test": 1}
    (top, left), y, x = data.test._crops.first(0), data.test.targets([0]), data.test.images([0])
    np.testing.assert_array_equal(y[0], mask[top : top + 24, left : left + 30])
    factor, offset = data.train.normalisation
    np.testing.assert_allclose(x[0], image[top : top + 24, left : left + 30] * factor - offset, rtol=1e-5, atol=1e-5)
    alone = opened(nd.ProcessGrid.serial(), fields, validation=None, test=other)
    assert list(alone.splits) == ["train", "test"]
    for test, told in [
        (0, "test: 0 is invalid"),
        (3, "test: 2 images for validation and 3 for test leave no training images"),
        ({"labels": "a"}, "test: has labels; give images"),
        ({"images": fields["images"]}, "0.npy is also a training image"),
        ({"images": other["images"], "labels": f"{tmp_path}/t.csv"}, "test: has another kind of labels"),
        ({"images": f"{tmp_path}/none*.npy"}, "test.images: no file matches"),
    ]:
        (tmp_path / "t.csv").write_text("3.npy,1\n")
        with pytest.raises(nd.UserError, match=told):
            opened(nd.ProcessGrid.serial(), fields, test=test)


def test_test_images_of_folders_have_the_same_classes(tmp_path):
    for at, name in enumerate(("b/cat", "b/dog", "b/eel", "new/dog", "new/eel")):
        save(tmp_path / name / f"{at}.npy", cells(0)[0])
    data = nd.ImageFiles(f"{tmp_path}/b/*/*.npy", validation=None, test={"images": f"{tmp_path}/new/*/*.npy"})
    data.open(nd.ProcessGrid.serial())
    assert (data.classes, data.train.labels.tolist(), data.test.labels.tolist()) == (3, [0, 1, 2], [1, 2])


def test_batches_read_ahead_and_lazily_are_the_same(made):
    data = on_ranks(1, lambda grid: opened(grid, made(".npy")))[0]
    parts = [[0, 2], [1], [2, 0]]
    plain = [(data.train.images(part), data.train.targets(part)) for part in parts]
    for lazily in (False, True):
        for (x, y), (expected, labels) in zip(data.train.batches(parts, lazily=lazily), plain, strict=True):
            np.testing.assert_array_equal(x.whole() if lazily else x, expected)
            np.testing.assert_array_equal(y, labels)
    data.close()


def test_normalisation_is_found_once_and_the_same_everywhere(made):
    fields = made(".npy")
    found = on_ranks(3, lambda grid: opened(grid, fields).train.normalisation)
    assert found[0] == found[1] == found[2]
    data = on_ranks(1, lambda grid: opened(grid, fields, crops_per_image=9))[0]
    x = data.train.images(np.arange(27), "float64")
    assert np.abs(x.mean((0, 1, 2))).max() < 0.2
    assert np.abs(x.std((0, 1, 2)) - 1).max() < 0.2
    data = on_ranks(1, lambda grid: opened(grid, fields, crops_per_image=9, normalise="percentile"))[0]
    x = data.train.images(np.arange(27), "float64")
    assert 0.97 < np.mean((x >= 0) & (x <= 1)) < 1
    data = on_ranks(1, lambda grid: opened(grid, fields, mean=[1, 2, 3], std=2.0))[0]
    assert data.train.normalisation == ([0.5], [0.5, 1.0, 1.5])


def test_classes_of_folders_and_tables_and_numbers(tmp_path):
    for n in range(6):
        save(tmp_path / ("cat" if n % 2 else "dog") / f"{n}.npy", cells(0)[0])
    data = nd.ImageFiles(f"{tmp_path}/*/*.npy", validation=2)
    data.check()
    assert (data.sample_shape, data.classes) == ((40, 52, 3), 2)
    data = on_ranks(1, lambda grid: opened(grid, {"images": f"{tmp_path}/*/*.npy", "labels": "folders"}))[0]
    names = [item.name for item in data.train.tiles.items]
    assert data.train.targets(np.arange(4)).tolist() == ["dog" in name for name in names]
    table = tmp_path / "labels.csv"
    table.write_text("file,class\n" + "".join(f"{n}.npy,{n}\n" for n in range(6)))
    data = on_ranks(1, lambda grid: opened(grid, {"images": f"{tmp_path}/*/*.npy", "labels": str(table)}))[0]
    assert data.classes == 6
    assert data.train.targets(np.arange(4)).tolist() == [int(item.name[-5]) for item in data.train.tiles.items]
    table.write_text("".join(f"{n}.npy,{n}.5,{-n}\n" for n in range(6)))
    data = on_ranks(1, lambda grid: opened(grid, {"images": f"{tmp_path}/*/*.npy", "labels": str(table)}))[0]
    number = int(data.train.tiles.items[1].name[-5])
    assert data.train.targets([1]).tolist() == [[number + 0.5, -number]]


def test_time_and_depth_are_samples_or_space(tmp_path):
    netcdf = pytest.importorskip("netCDF4", reason="made by netCDF4")
    rain = np.random.default_rng(0).random((7, 20, 30)).astype("float32")
    rain[:, 3, 4] = np.nan
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("time", 7), ("lat", 20), ("lon", 30)):
            file.createDimension(name, n)
        for name, values in (("rain", rain), ("wind", 2 * np.nan_to_num(rain, nan=0.5))):
            file.createVariable(name, "f4", ("time", "lat", "lon"))[:] = values
    fields = {"images": f"{tmp_path}/a.nc:rain", "labels": f"{tmp_path}/a.nc:wind", "crop": [8, 10], "validation": 2}
    data = on_ranks(1, lambda grid: opened(grid, fields, fill=0.5, normalise="none", crops_per_image=4))[0]
    assert (len(data.train), data.sample_shape) == (20, (8, 10, 1))
    numbers = np.arange(20)
    np.testing.assert_array_equal(data.train.targets(numbers), 2 * data.train.images(numbers))
    with pytest.raises(nd.DataError, match=r"a\.nc:rain: has missing values \(NaN\); replace"):
        on_ranks(2, lambda grid: opened(grid, fields | {"crop": [20, 30]}))
    volume = np.random.default_rng(0).random((12, 20, 30, 1))
    for n in range(2):
        with nd.create_sink(tmp_path / f"{n}.h5", volume.shape, "float64", "ZYXC") as sink:
            sink.write(nd.Box.of(volume.shape), volume)
            sink.commit()
    (tmp_path / "l.csv").write_text("0.h5,0\n1.h5,1\n")
    volumes = {"images": f"{tmp_path}/?.h5", "labels": f"{tmp_path}/l.csv", "crop": [4, 8, 8], "validation": 1}
    assert on_ranks(4, lambda grid: opened(grid, volumes).sample_shape)[0] == (4, 8, 8, 1)
    np.save(tmp_path / "flat.npy", volume[0, ..., 0])
    with pytest.raises(nd.DataError, match=r"flat\.npy: has axes YXC; expected 3"):
        nd.ImageFiles(f"{tmp_path}/flat.npy", crop=[1, 1, 1]).check()


def test_each_rank_reads_little_more_than_its_tile(made, tmp_path):
    """Of tiles that fit the crop's: at most 1.2 times the crop is decoded, by all ranks together."""
    tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")
    array = np.random.default_rng(0).integers(0, 255, (1024, 1024, 1), "uint8")
    for name in "ab":
        tifffile.imwrite(tmp_path / f"{name}.tif", array, tile=(16, 16), compression="zlib")
    (tmp_path / "l.csv").write_text("a.tif,0\nb.tif,1\n")
    fields = {"images": f"{tmp_path}/*.tif", "labels": f"{tmp_path}/l.csv", "crop": [800, 800], "validation": 1}

    def read(grid):
        data = opened(grid, fields, normalise="none")
        tile = data.train.images([0])
        (source,) = data.train.tiles._sources.values()
        return source.bytes_read, tile.size

    taken = on_ranks(4, read)
    assert all(decoded <= 1.2 * size for decoded, size in taken)

    def again(grid, cache="128MiB"):
        data = opened(grid, fields, normalise="none", cache=cache)
        for epoch in range(4):
            data.train.epoch = epoch
            data.train.images([0])
        return sum(source.bytes_read for source in data.train.tiles._sources.values())

    assert on_ranks(1, again)[0] <= array.nbytes  # chunks stay in memory
    assert on_ranks(1, lambda grid: again(grid, 1))[0] > 2 * array.nbytes


MISTAKES = {
    "no file matches": {"images": "nothing/*.npy"},
    r"4\.npy: has no mask called 4": {"masks": [0, 1, 2, 3]},
    r"masks.9\.npy: is a mask without an image": {"masks": [0, 1, 2, 3, 4, 9]},
    r"masks.2\.npy: is 40 x 40 x 1 uint8, but its image": {"wrong": np.zeros((40, 40), "uint8"), "at": "masks/2.npy"},
    r"masks.2\.npy: as samples 2 of 47 x 47": {"wrong": np.zeros((2, 47, 47), "uint8"), "at": "masks/2.npy"},
    r"2\.npy: is 47 x 47 x 1 uint8, but .*0\.npy is 40 x 52 x 3": {"wrong": cells(2)[1], "at": "images/2.npy"},
    r"2\.npy: is 47 x 47 x 3 float32, but": {"wrong": cells(2)[0].astype("float32"), "at": "images/2.npy"},
    r"smaller than crop \[60, 30\]": {"crop": [60, 30]},
    r"give crop: \[h, w\]": {"crop": None},
    r"crop: \[1, 2, 3, 4\] are 4 extents": {"crop": [1, 2, 3, 4]},
    r"percentiles: \[5\.0, 5\.0\]": {"percentiles": (5.0, 5.0)},
    r"std: 0\.0 is invalid": {"std": 0.0},
    r"masks.\d\.npy: has the label 2; there are 2 classes": {"classes": 2},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_told_by_file(made, tmp_path, message):
    fields, more = made(".npy"), dict(MISTAKES[message])
    kept = more.pop("masks", None)
    if kept is not None:
        for n in set(range(10)) - set(kept):
            (tmp_path / "masks" / f"{n}.npy").unlink(missing_ok=True)
        if 9 in kept:
            save(tmp_path / "masks" / "9.npy", cells(0)[1])
    if "at" in more:
        np.save(tmp_path / more.pop("at"), more.pop("wrong"))

    def run(grid):
        data = opened(grid, fields, **more)
        if "label 2" in message:
            data.train.targets([0, 1, 2])

    with pytest.raises(nd.UserError, match=message) as caught:
        on_ranks(2, run)
    assert "\n" not in str(caught.value)


TABLES = {
    "has no row for .*5.npy": "0.npy,1\n1.npy,0\n2.npy,0\n3.npy,0\n4.npy,0\n",
    "'6.npy' matches no image": "".join(f"{n}.npy,0\n" for n in range(7)),
    "has two rows": "".join(f"{n}.npy,0\n" for n in range(6)) + "0.npy,1\n",
    "has 2 values": "".join(f"{n}.npy,0{',1' * (n == 3)}\n" for n in range(6)),
    "all images have the class 'cat'": "".join(f"{n}.npy,cat\n" for n in range(6)),
    "'cat' is not a number": "".join(f"{n}.npy,{'cat' if n else 1}\n" for n in range(6)),
    "not finite": "".join(f"{n}.npy,{'nan' if n == 2 else 1.5}\n" for n in range(6)),
    "5.npy has the class 5; valid classes are 0 to 2": "".join(f"{n}.npy,{n}\n" for n in range(6)),
}


@pytest.mark.parametrize("message", TABLES)
def test_mistakes_in_tables(tmp_path, message):
    for n in range(6):
        np.save(tmp_path / f"{n}.npy", cells(0)[0])
    (tmp_path / "l.csv").write_text(TABLES[message])
    with pytest.raises(nd.DataError, match=message):
        nd.ImageFiles(f"{tmp_path}/*.npy", f"{tmp_path}/l.csv", classes=3 if "0 to 2" in message else None).check()


@pytest.mark.parametrize("labels", ["folders", "table"])
def test_classes_of_a_test_split_have_the_numbers_of_training(tmp_path, labels):
    for split, names in (("train", "abc"), ("new", "cb")):
        for n, name in enumerate(names):
            save(tmp_path / split / name / f"{split}{n}.npy", cells(0)[0])
        (tmp_path / f"{split}.csv").write_text("".join(f"{split}{n}.npy,{name}\n" for n, name in enumerate(names)))
    new = {"images": f"{tmp_path}/new/*/*.npy", "labels": f"{tmp_path}/new.csv"}
    of_training = "folders" if labels == "folders" else f"{tmp_path}/train.csv"
    made = nd.ImageFiles(f"{tmp_path}/train/*/*.npy", of_training, validation=None, test=new)
    made.check()
    assert (made._values.tolist(), made.classes) == ([0, 1, 2, 1, 2], 3)  # new/b comes before new/c
    (tmp_path / "new.csv").write_text("new0.npy,z\nnew1.npy,b\n")
    with pytest.raises(nd.DataError, match=r"new.csv: 'z' is not among the training classes, a, b, c; correct it"):
        made.check()


def test_images_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for n, folder in enumerate(("a", "b")):
        save(tmp_path / "x" / folder / "0.npy", cells(n)[0])
    table = tmp_path / "l.csv"
    table.write_text("file,class\na/0.npy,1\n/elsewhere/x/b/0.npy,0\n")
    data = nd.ImageFiles(f"{tmp_path}/x/*/0.npy", str(table), crop=[16, 16], validation=None)
    data.check()
    assert data._values.tolist() == [1, 0]
    table.write_text("0.npy,1\n")
    with pytest.raises(nd.DataError, match=r"'0.npy' could be .*a/0.npy or .*b/0.npy; add the folder to the path"):
        data.check()


def test_names_with_dots_have_masks_of_the_same_name(tmp_path):
    for n in range(2):
        for kind, what in zip(("x", "y"), cells(n), strict=True):
            save(tmp_path / kind / f"scan.{n}.npy", what)
    data = nd.ImageFiles(f"{tmp_path}/x/*.npy", f"{tmp_path}/y/*.npy", crop=[16, 16], validation=None)
    data.check()
    assert [Path(mask.name).name for mask in data._masks] == ["scan.0.npy", "scan.1.npy"]


def test_masks_with_a_palette_are_its_numbers(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    for n in range(2):
        picture, mask = cells(n)
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "y").mkdir(exist_ok=True)
        image.fromarray(picture).save(tmp_path / "x" / f"{n}.png")
        colours = image.fromarray(mask)
        colours.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0])
        colours.save(tmp_path / "y" / f"{n}.png")
    fields = {"images": f"{tmp_path}/x/*.png", "labels": f"{tmp_path}/y/*.png", "validation": 1, "classes": 3}
    data = on_ranks(1, lambda grid: opened(grid, fields))[0]
    assert set(np.unique(data.train.targets([0]))) == {0, 1, 2}
