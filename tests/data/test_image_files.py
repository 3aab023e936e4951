"""Crops of image files, identical in every format and on every grid."""

from pathlib import Path

import h5py
import numpy as np
import pytest

import neondist as nd
from neondist.train.inference.file_evaluation import evaluate_files

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


def make_sample(n, channels=3):
    y, x = np.indices(SIZES[n])
    rng = np.random.default_rng(n)
    noise = rng.integers(0, 99, (*SIZES[n], channels))
    return (noise + 9 * n + y[..., None]).astype("uint8"), ((x + y + n) % 3).astype("uint8")


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = array if array.ndim == 3 else array[..., None]
    with nd.create_sink(path, array.shape, array.dtype, "YXC", overwrite=True) as sink:
        sink.write(nd.Box.of(array.shape), array)
        sink.commit()


@pytest.fixture
def write_files(tmp_path):
    def write(suffix):
        for n in range(len(SIZES)):
            image, mask = make_sample(n)
            save(tmp_path / "images" / f"{n}{suffix}", image)
            save(tmp_path / "masks" / f"{n}{suffix}", mask)
        return {"images": f"{tmp_path}/images/*{suffix}", "labels": f"{tmp_path}/masks/*{suffix}"}

    return write


def open_dataset(grid, fields, **overrides):
    data = nd.ImageFiles(**({"crop": [24, 30], "validation": 2, "seed": 5} | fields | overrides))
    data.open(grid)
    return data


def run_on_ranks(ranks, function):
    return nd.loopback.run(ranks, lambda world: function(nd.ProcessGrid(world)))


def train_losses(grid, fields):
    data = open_dataset(grid, fields, validation=1, crops_per_image=2, crop=[13, 18])
    layers = [
        nd.ConvLayerDist(4, 3, padding=1, activation=nd.ReLU()),
        nd.BatchNormLayerDist(),
        nd.ConvLayerDist(3, 3, padding=1),
    ]
    model = nd.ConvnetDist(layers, cost=nd.CrossEntropy(), optimizer=nd.SGD(learning_rate=0.05), dtype="float64")
    model.build(data.sample_shape, 3, grid)
    values = []
    for epoch, batch in enumerate(([0, 3, 6], [5, 1, 4])):
        data.train.epoch = epoch
        values.append(float(model.train_batch(data.train.images(batch, "float64"), data.train.targets(batch))))
    data.close()
    return values


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.long
def test_losses_match_across_formats_and_grids(write_files, suffix):
    for package in {"", FORMATS[suffix]} - {""}:
        pytest.importorskip(package, reason=f"{suffix} needs {package}")
    fields = write_files(suffix)
    for ranks in (1, 3, 4) if suffix == ".npy" else (3, 4):
        for losses in run_on_ranks(ranks, lambda grid: train_losses(grid, fields)):
            np.testing.assert_allclose(losses, EXPECTED or losses, rtol=1e-12)
            EXPECTED[:] = EXPECTED or losses


EXPECTED = []  # losses of the first format on one rank


def test_crops_lie_inside_their_images(write_files):
    """Check that crops of images and masks coincide, and that only training crops move between epochs."""
    fields = write_files(".npy")
    data = run_on_ranks(1, lambda grid: open_dataset(grid, fields, crops_per_image=3, normalise="none"))[0]
    assert (len(data.train), len(data.validation), data.sample_shape) == (9, 6, (24, 30, 3))
    origins = set()
    for epoch in (0, 1, 7):
        data.train.epoch = epoch
        images, masks = data.train.images(np.arange(9), "float64"), data.train.targets(np.arange(9))
        for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
            item = data.train.tiles.images[number]
            full_image, classes = make_sample(int(item.name[-5]))
            y, x = data.train.tiles.crops.first_cell(number)
            np.testing.assert_array_equal(image, full_image[y : y + 24, x : x + 30])
            np.testing.assert_array_equal(mask, classes[y : y + 24, x : x + 30])
            origins.add((epoch, number, y, x))
    assert len({(number, y, x) for _, number, y, x in origins}) > 20
    before = data.validation.images([0, 1, 5])
    data.train.epoch = 3
    np.testing.assert_array_equal(data.validation.images([0, 1, 5]), before)
    names = [{item.name for item in split.tiles.images} for split in (data.train, data.validation)]
    assert len(names[0]) == 3
    assert not names[0] & names[1]


def test_three_splits(write_files, tmp_path):
    fields = write_files(".npy")

    def run(grid):
        data = open_dataset(grid, fields, test=0.2)
        assert data.classes is None
        return {name: split.targets(range(len(split))) for name, split in data.splits.items()}

    (targets,), rank_targets = run_on_ranks(1, run), run_on_ranks(3, run)
    assert {name: len(split_targets) for name, split_targets in targets.items()} == {
        "train": 2,
        "validation": 2,
        "test": 1,
    }
    for name, expected in targets.items():
        np.testing.assert_array_equal(
            np.concatenate([split_targets[name] for split_targets in rank_targets], axis=1), expected
        )
    two_splits = open_dataset(nd.ProcessGrid.serial(), fields).validation
    np.testing.assert_array_equal(two_splits.targets(range(2)), targets["validation"])

    image, mask = make_sample(3)
    save(tmp_path / "new" / "3.npy", image)
    save(tmp_path / "drawn" / "3.npy", mask)
    test_files = {"images": f"{tmp_path}/new/*.npy", "labels": f"{tmp_path}/drawn/*.npy"}
    data = open_dataset(nd.ProcessGrid.serial(), fields, test=test_files)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 3, "validation": 2, "test": 1}
    (top, left), y, x = data.test._positions.first_cell(0), data.test.targets([0]), data.test.images([0])
    np.testing.assert_array_equal(y[0], mask[top : top + 24, left : left + 30])
    factor, offset = data.train.factor_and_subtrahend
    np.testing.assert_allclose(x[0], image[top : top + 24, left : left + 30] * factor - offset, rtol=1e-5, atol=1e-5)
    no_validation = open_dataset(nd.ProcessGrid.serial(), fields, validation=None, test=test_files)
    assert list(no_validation.splits) == ["train", "test"]
    for test, message in [
        (0, "test: 0 is invalid"),
        (3, "test: 2 images for validation and 3 for test leave no training images"),
        ({"labels": "a"}, "test: expected a mapping with 'images'"),
        ({"images": fields["images"]}, "0.npy is also a training image"),
        ({"images": test_files["images"], "labels": f"{tmp_path}/t.csv"}, "test: labels differ in type or shape from"),
        ({"images": f"{tmp_path}/none*.npy"}, "test.images: no file matches"),
    ]:
        (tmp_path / "t.csv").write_text("3.npy,1\n")
        with pytest.raises(nd.UserError, match=message):
            open_dataset(nd.ProcessGrid.serial(), fields, test=test)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_splits_in_other_folders(tmp_path, split):
    for folder, names in (("train", "aab"), ("val", "ba")):
        for number, name in enumerate(names):
            save(tmp_path / folder / name / f"{folder}{number}.npy", make_sample(number)[0])
    for option in (f"{tmp_path}/val/*/*.npy", {"images": f"{tmp_path}/val/*/*.npy"}):
        options = {"validation": None, split: option}
        data = nd.ImageFiles(f"{tmp_path}/train/*/*.npy", crop=[24, 30], **options)
        data.open(nd.ProcessGrid.serial())
        assert list(data.splits) == ["train", split]
        assert data.train.targets(range(3)).tolist() == [0, 0, 1]
        assert data.splits[split].targets(range(2)).tolist() == [0, 1]
        assert [Path(item.name).parts[-2:] for item in data.splits[split].tiles.images] == [
            ("a", "val1.npy"),
            ("b", "val0.npy"),
        ]


def test_splits_by_tables_of_the_same_folder(tmp_path):
    for number in range(6):
        save(tmp_path / f"{number}.npy", make_sample(number % 5)[0])
    (tmp_path / "train.csv").write_text("0.npy,x\n4.npy,y\n1.npy,y\n")
    (tmp_path / "val.csv").write_text("5.npy,y\n")
    (tmp_path / "test.csv").write_text("file,class\n2.npy,y\n3.npy,x\n")

    def open_splits(**options):
        data = nd.ImageFiles(f"{tmp_path}/*.npy", f"{tmp_path}/train.csv", crop=[24, 30], **options)
        data.open(nd.ProcessGrid.serial())
        return {
            name: [
                (Path(item.name).stem, target) for item, target in zip(split.tiles.images, split.labels, strict=True)
            ]
            for name, split in data.splits.items()
        }

    expected = {"train": [("0", 0), ("1", 1), ("4", 1)], "validation": [("5", 1)], "test": [("2", 1), ("3", 0)]}
    assert open_splits(validation=f"{tmp_path}/val.csv", test={"labels": f"{tmp_path}/test.csv"}) == expected
    assert open_splits(validation=None, test=f"{tmp_path}/test.csv") == {n: expected[n] for n in ("train", "test")}
    for options, message in [
        (
            {"validation": f"{tmp_path}/train.csv"},
            "validation: .*npy is also a training image; make the splits disjoint",
        ),
        (
            {"validation": f"{tmp_path}/val.csv", "test": f"{tmp_path}/val.csv"},
            "test: .*5.npy is also a validation image",
        ),
        ({"validation": {"images": "x/*.npy"}}, "validation.images: no file matches x"),
        ({"validation": {}}, "validation: expected a mapping with 'images'"),
        ({"validation": {"maps": "a"}}, "validation: expected a mapping with 'images'.* got maps"),
    ]:
        with pytest.raises(nd.UserError, match=message):
            open_splits(**options)
    with pytest.raises(nd.ConfigError, match="labels: folders is not a table of the training images"):
        nd.ImageFiles(f"{tmp_path}/*.npy", validation=f"{tmp_path}/val.csv")


def write_bands(folder, bands=("B02", "B03"), count=4):
    images = np.random.default_rng(0).integers(0, 255, (count, 40, 50, len(bands)), dtype=np.uint8)
    for number, image in enumerate(images):
        for channel, band in enumerate(bands):
            save(folder / f"scene{number}_{band}.npy", image[..., channel])
        save(folder / f"scene{number}_mask.npy", (image[..., 0] > 100).astype(np.uint8))
    return images


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_files_of_an_image_are_its_channels(tmp_path, ranks):
    images = write_bands(tmp_path)
    patterns = [f"{tmp_path}/*_B03.npy", f"{tmp_path}/*_B02.npy"]

    def run(grid):
        data = nd.ImageFiles(patterns, f"{tmp_path}/*_mask.npy", normalise="none", validation=None)
        data.open(grid)
        assert data.sample_shape == (40, 50, 2)
        return data.train.images([0, 2, 3]), data.train.targets([0, 2, 3]), grid.tile_box((40, 50)).slices

    for x, y, cells in run_on_ranks(ranks, run):
        expected = images[[0, 2, 3]][(slice(None), *cells)]
        np.testing.assert_array_equal(x, expected[..., ::-1])
        np.testing.assert_array_equal(y, expected[..., 0] > 100)


def test_incomplete_channels_are_rejected(tmp_path):
    write_bands(tmp_path)
    patterns = [f"{tmp_path}/*_B02.npy", f"{tmp_path}/*_B03.npy"]

    def check(images=patterns):
        nd.ImageFiles(images, f"{tmp_path}/*_mask.npy", normalise="none").check()

    with pytest.raises(nd.DataError, match=r"no file matches .*B04"):
        check([*patterns, f"{tmp_path}/*_B04.npy"])
    (tmp_path / "scene2_B03.npy").rename(tmp_path / "scene7_B03.npy")
    with pytest.raises(nd.DataError, match=r"scene2_B02.npy: has no counterpart in .*\*_B03.npy; name the files"):
        check()
    (tmp_path / "scene7_B03.npy").unlink()
    with pytest.raises(nd.DataError, match=r"scene2_B02.npy: has no counterpart in .*\*_B03.npy"):
        check()
    np.save(tmp_path / "scene2_B03.npy", np.zeros((39, 50), "u1"))
    with pytest.raises(
        nd.DataError, match=r"scene2_B03.npy: has extents \[39, 50\] of axes YX, but .*scene2_B02.npy has"
    ):
        check()
    (tmp_path / "scene2_B03.npy").rename(tmp_path / "scene2,_B03.npy")
    with pytest.raises(nd.DataError, match=r"scene2,_B03\.npy: has a comma in its name"):
        check()


def test_test_folders_share_training_classes(tmp_path):
    for number, name in enumerate(("b/cat", "b/dog", "b/eel", "new/dog", "new/eel")):
        save(tmp_path / name / f"{number}.npy", make_sample(0)[0])
    data = nd.ImageFiles(f"{tmp_path}/b/*/*.npy", validation=None, test={"images": f"{tmp_path}/new/*/*.npy"})
    data.open(nd.ProcessGrid.serial())
    assert (data.classes, data.train.labels.tolist(), data.test.labels.tolist()) == (3, [0, 1, 2], [1, 2])


def test_prefetched_and_lazy_batches_match(write_files):
    data = run_on_ranks(1, lambda grid: open_dataset(grid, write_files(".npy")))[0]
    batches = [[0, 2], [1], [2, 0]]
    expected = [(data.train.images(numbers), data.train.targets(numbers)) for numbers in batches]
    for lazy in (False, True):
        for (x, y), (images, labels) in zip(data.train.batches(batches, lazy=lazy), expected, strict=True):
            np.testing.assert_array_equal(x.read_whole() if lazy else x, images)
            np.testing.assert_array_equal(y, labels)
    data.close()


def test_all_ranks_share_the_normalisation(write_files):
    fields = write_files(".npy")
    normalisations = run_on_ranks(3, lambda grid: open_dataset(grid, fields).train.factor_and_subtrahend)
    assert normalisations[0] == normalisations[1] == normalisations[2]
    data = run_on_ranks(1, lambda grid: open_dataset(grid, fields, crops_per_image=9))[0]
    x = data.train.images(np.arange(27), "float64")
    assert np.abs(x.mean((0, 1, 2))).max() < 0.2
    assert np.abs(x.std((0, 1, 2)) - 1).max() < 0.2
    data = run_on_ranks(1, lambda grid: open_dataset(grid, fields, crops_per_image=9, normalise="percentile"))[0]
    x = data.train.images(np.arange(27), "float64")
    assert 0.97 < np.mean((x >= 0) & (x <= 1)) < 1
    data = run_on_ranks(1, lambda grid: open_dataset(grid, fields, mean=[1, 2, 3], std=2.0))[0]
    assert data.train.factor_and_subtrahend == ([0.5], [0.5, 1.0, 1.5])


def test_labels_from_folders_and_tables(tmp_path):
    for n in range(6):
        save(tmp_path / ("cat" if n % 2 else "dog") / f"{n}.npy", make_sample(0)[0])
    data = nd.ImageFiles(f"{tmp_path}/*/*.npy", validation=2)
    data.check()
    assert (data.sample_shape, data.classes) == ((40, 52, 3), 2)
    data = run_on_ranks(1, lambda grid: open_dataset(grid, {"images": f"{tmp_path}/*/*.npy", "labels": "folders"}))[0]
    names = [item.name for item in data.train.tiles.images]
    assert data.train.targets(np.arange(4)).tolist() == ["dog" in name for name in names]
    table = tmp_path / "labels.csv"
    table.write_text("file,class\n" + "".join(f"{n}.npy,{n}\n" for n in range(6)))
    data = run_on_ranks(1, lambda grid: open_dataset(grid, {"images": f"{tmp_path}/*/*.npy", "labels": str(table)}))[0]
    assert data.classes == 6
    assert data.train.targets(np.arange(4)).tolist() == [int(item.name[-5]) for item in data.train.tiles.images]
    table.write_text("".join(f"{n}.npy,{n}.5,{-n}\n" for n in range(6)))
    data = run_on_ranks(1, lambda grid: open_dataset(grid, {"images": f"{tmp_path}/*/*.npy", "labels": str(table)}))[0]
    number = int(data.train.tiles.images[1].name[-5])
    assert data.train.targets([1]).tolist() == [[number + 0.5, -number]]


def test_time_and_depth_axes(tmp_path):
    netCDF4 = pytest.importorskip("netCDF4", reason="made by netCDF4")
    rain = np.random.default_rng(0).random((7, 20, 30)).astype("float32")
    rain[:, 3, 4] = np.nan
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        for name, n in (("time", 7), ("lat", 20), ("lon", 30)):
            file.createDimension(name, n)
        for name, values in (("rain", rain), ("wind", 2 * np.nan_to_num(rain, nan=0.5))):
            file.createVariable(name, "f4", ("time", "lat", "lon"))[:] = values
    fields = {"images": f"{tmp_path}/a.nc:rain", "labels": f"{tmp_path}/a.nc:wind", "crop": [8, 10], "validation": 2}
    data = run_on_ranks(1, lambda grid: open_dataset(grid, fields, fill=0.5, normalise="none", crops_per_image=4))[0]
    assert (len(data.train), data.sample_shape) == (20, (8, 10, 1))
    numbers = np.arange(20)
    np.testing.assert_array_equal(data.train.targets(numbers), 2 * data.train.images(numbers))
    with pytest.raises(nd.DataError, match=r"a\.nc:rain: has missing values \(NaN\); replace"):
        run_on_ranks(2, lambda grid: open_dataset(grid, fields | {"crop": [20, 30]}))
    volume = np.random.default_rng(0).random((12, 20, 30, 1))
    for n in range(2):
        with nd.create_sink(tmp_path / f"{n}.h5", volume.shape, "float64", "ZYXC") as sink:
            sink.write(nd.Box.of(volume.shape), volume)
            sink.commit()
    (tmp_path / "l.csv").write_text("0.h5,0\n1.h5,1\n")
    volumes = {"images": f"{tmp_path}/?.h5", "labels": f"{tmp_path}/l.csv", "crop": [4, 8, 8], "validation": 1}
    assert run_on_ranks(4, lambda grid: open_dataset(grid, volumes).sample_shape)[0] == (4, 8, 8, 1)
    np.save(tmp_path / "flat.npy", volume[0, ..., 0])
    with pytest.raises(nd.DataError, match=r"flat\.npy: has axes YXC; expected 3"):
        nd.ImageFiles(f"{tmp_path}/flat.npy", crop=[1, 1, 1]).check()


def test_ranks_read_little_more_than_their_tiles(write_files, tmp_path):
    """Check that all ranks together decode at most 1.2 times the crop if the file has small tiles."""
    tifffile = pytest.importorskip("tifffile", reason="TIFF needs tifffile")
    array = np.random.default_rng(0).integers(0, 255, (1024, 1024, 1), "uint8")
    for name in "ab":
        tifffile.imwrite(tmp_path / f"{name}.tif", array, tile=(16, 16), compression="zlib")
    (tmp_path / "l.csv").write_text("a.tif,0\nb.tif,1\n")
    fields = {"images": f"{tmp_path}/*.tif", "labels": f"{tmp_path}/l.csv", "crop": [800, 800], "validation": 1}

    def read(grid):
        data = open_dataset(grid, fields, normalise="none")
        tile = data.train.images([0])
        (source,) = data.train.tiles._sources.values()
        return source.bytes_read, tile.size

    reads = run_on_ranks(4, read)
    assert all(decoded <= 1.2 * size for decoded, size in reads)

    def read_epochs(grid, cache="128MiB"):
        data = open_dataset(grid, fields, normalise="none", cache=cache)
        for epoch in range(4):
            data.train.epoch = epoch
            data.train.images([0])
        return sum(source.bytes_read for source in data.train.tiles._sources.values())

    assert run_on_ranks(1, read_epochs)[0] <= array.nbytes  # chunks are cached
    assert run_on_ranks(1, lambda grid: read_epochs(grid, 1))[0] > 2 * array.nbytes


def test_class_values_number_the_classes(tmp_path):
    """Masks of 0 and 255 train, and are evaluated, like masks of 0 and 1."""
    draw = np.random.default_rng(3)
    for kind in ("images", "numbers", "values", "voids"):
        (tmp_path / kind).mkdir()
    for n in range(4):
        classes = draw.integers(0, 2, (12, 14), "uint8")
        np.save(tmp_path / "images" / f"{n}.npy", draw.integers(0, 255, (12, 14, 3), "uint8"))
        np.save(tmp_path / "numbers" / f"{n}.npy", classes)
        np.save(tmp_path / "values" / f"{n}.npy", 255 * classes)
        classes[:2] = 9
        np.save(tmp_path / "voids" / f"{n}.npy", np.where(classes == 9, 9, 255 * (classes == 1)).astype("uint8"))

    def train(kind, **fields):
        data = nd.ImageFiles(f"{tmp_path}/images/*.npy", f"{tmp_path}/{kind}/*.npy", validation=1, **fields)
        model = nd.ConvnetDist([nd.ConvLayerDist(2, 3, padding=1)], cost=nd.CrossEntropy(), seed=1, dtype="float64")
        experiment = nd.FitExperiment(data, model, batch_size=2, epochs=2)
        history = experiment.run(nd.ProcessGrid.serial(), output=tmp_path / f"run_{kind}", hooks=[]).history
        file = tmp_path / kind / "2.npy"
        results = evaluate_files(
            experiment, tmp_path / f"run_{kind}" / "checkpoint.h5", tmp_path / "images" / "2.npy", file,
            nd.ProcessGrid.serial(),
        )  # fmt: skip
        return [(row["train_loss"], row["validation_loss"], row["validation_error"]) for row in history], results

    assert train("values", class_values=[0, 255]) == train("numbers", classes=2)
    fields = {"images": f"{tmp_path}/images/*.npy", "labels": f"{tmp_path}/voids/*.npy", "class_values": [255, 0]}
    data = nd.ImageFiles(**fields, ignore_index=9, validation=1)
    data.open(nd.ProcessGrid.serial())
    stored = np.concatenate([np.load(tmp_path / "voids" / f"{n}.npy")[None] for n in range(4)])
    numbers = [int(item.name[-5]) for item in data.train.labels.images]
    expected = np.where(stored == 9, 9, stored == 0)[numbers]
    np.testing.assert_array_equal(data.train.targets(np.arange(3)), expected)
    data = nd.ImageFiles(**fields, validation=1)
    data.open(nd.ProcessGrid.serial())
    with pytest.raises(nd.DataError, match=r"npy: contains the value 9, but class_values are \[255, 0\]; add it"):
        data.train.targets(np.arange(3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"class_values": [0, 0]}, "expected 2 different values, one per class"),
        ({"class_values": [0, 255], "classes": 3}, "expected 3 different values"),
        ({"class_values": [0, 255], "class_names": ["a"]}, "expected 1 different value, one"),
        ({"class_values": [0, 255], "ignore_index": 255}, "255 is also a class number or one of class_values"),
        ({"class_values": [0, 255], "ignore_index": 1}, "1 is also a class number or one of class_values"),
    ],
)
def test_invalid_class_values_are_rejected(fields, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.ImageFiles("*.png", "m/*.png", **fields)


INVALID = {
    "no file matches": {"images": "nothing/*.npy"},
    r"4\.npy: has no mask called 4": {"masks": [0, 1, 2, 3]},
    r"masks.9\.npy: is a mask without an image": {"masks": [0, 1, 2, 3, 4, 9]},
    r"masks.2\.npy: is 40 x 40 x 1 uint8, but its image": {"wrong": np.zeros((40, 40), "uint8"), "at": "masks/2.npy"},
    r"masks.2\.npy: has 2 masks of 47 x 47": {"wrong": np.zeros((2, 47, 47), "uint8"), "at": "masks/2.npy"},
    r"2\.npy: is 47 x 47 x 1 uint8, but .*0\.npy is 40 x 52 x 3": {"wrong": make_sample(2)[1], "at": "images/2.npy"},
    r"2\.npy: is 47 x 47 x 3 float32, but": {"wrong": make_sample(2)[0].astype("float32"), "at": "images/2.npy"},
    r"smaller than crop \[60, 30\]": {"crop": [60, 30]},
    r"give crop: \[h, w\]": {"crop": None},
    r"crop: \[1, 2, 3, 4\] has 4 extents": {"crop": [1, 2, 3, 4]},
    r"percentiles: \[5\.0, 5\.0\]": {"percentiles": (5.0, 5.0)},
    r"std: expected a number above 0, .*got 0\.0": {"std": 0.0},
    r"masks.\d\.npy: contains label 2; labels must be 0 to 1": {"classes": 2},
}


@pytest.mark.parametrize("message", INVALID)
def test_errors_name_the_file(write_files, tmp_path, message):
    fields, options = write_files(".npy"), dict(INVALID[message])
    masks = options.pop("masks", None)
    if masks is not None:
        for n in set(range(10)) - set(masks):
            (tmp_path / "masks" / f"{n}.npy").unlink(missing_ok=True)
        if 9 in masks:
            save(tmp_path / "masks" / "9.npy", make_sample(0)[1])
    if "at" in options:
        np.save(tmp_path / options.pop("at"), options.pop("wrong"))

    def run(grid):
        data = open_dataset(grid, fields, **options)
        if "label 2" in message:
            data.train.targets([0, 1, 2])

    with pytest.raises(nd.UserError, match=message) as caught:
        run_on_ranks(2, run)
    assert "\n" not in str(caught.value)


NAMES_OF_PAIRS = {
    "cases": ("case{0}/case{0}_t1", "case{0}/case{0}_seg"),
    "one name per case": ("{}/image", "{}/mask"),
    "nnU-Net": ("imagesTr/{}_0000", "labelsTr/{}"),
    "suffix of the mask": ("images/{}", "masks/{}_mask"),
    "the same names in folders": ("images/{}/scan", "masks/{}/scan"),
}


@pytest.mark.parametrize("keys", [["1", "2", "10", "12"], ["a", "aa", "ba", "b_0000"], ["0000", "t1", "mask", "seg"]])
@pytest.mark.parametrize("names", NAMES_OF_PAIRS.values(), ids=list(NAMES_OF_PAIRS))
def test_masks_with_another_beginning_or_end(tmp_path, names, keys):
    for value, key in enumerate(keys):
        for name, dtype in zip(names, ("f4", "u1"), strict=True):
            path = tmp_path / f"{name.format(key)}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, np.full((6, 5), value, dtype))
    patterns = [f"{tmp_path}/{name.replace('{0}', '*').replace('{}', '*')}.npy" for name in names]

    def run(grid):
        data = nd.ImageFiles(*patterns, normalise="none", validation=1)
        data.check()
        data.open(grid)
        return [(float(split.images([i]).max()), int(split.targets([i]).max()))
                for split in (data.train, data.validation) for i in range(len(split))]  # fmt: skip

    (pairs,) = run_on_ranks(1, run)
    assert sorted(pairs) == [(value, value) for value in range(4)]


def test_masks_of_other_cases_are_rejected(tmp_path):
    for name in ("1_t1", "2_t1", "12_t1", "1_seg", "2_seg", "3_seg"):
        np.save(tmp_path / f"{name}.npy", np.zeros((6, 5), "u1"))
    with pytest.raises(nd.UserError, match=r"12_t1\.npy: has no mask called 12_t1"):
        nd.ImageFiles(f"{tmp_path}/*_t1.npy", f"{tmp_path}/*_seg.npy").check()


INVALID_TABLES = {
    "has no row for .*5.npy": "0.npy,1\n1.npy,0\n2.npy,0\n3.npy,0\n4.npy,0\n",
    "'6.npy' matches no image": "".join(f"{n}.npy,0\n" for n in range(7)),
    "has two rows": "".join(f"{n}.npy,0\n" for n in range(6)) + "0.npy,1\n",
    "has 2 values": "".join(f"{n}.npy,0{',1' * (n == 3)}\n" for n in range(6)),
    "all images have the class 'cat'": "".join(f"{n}.npy,cat\n" for n in range(6)),
    "'cat' is not a number": "".join(f"{n}.npy,{'cat' if n else 1}\n" for n in range(6)),
    "not finite": "".join(f"{n}.npy,{'nan' if n == 2 else 1.5}\n" for n in range(6)),
    "5.npy has the class 5; expected 0 to 2": "".join(f"{n}.npy,{n}\n" for n in range(6)),
}


@pytest.mark.parametrize("message", INVALID_TABLES)
def test_errors_in_tables(tmp_path, message):
    for n in range(6):
        np.save(tmp_path / f"{n}.npy", make_sample(0)[0])
    (tmp_path / "l.csv").write_text(INVALID_TABLES[message])
    with pytest.raises(nd.DataError, match=message):
        nd.ImageFiles(f"{tmp_path}/*.npy", f"{tmp_path}/l.csv", classes=3 if "0 to 2" in message else None).check()


@pytest.mark.parametrize("labels", ["folders", "table"])
def test_test_split_uses_training_class_indices(tmp_path, labels):
    for split, names in (("train", "abc"), ("new", "cb")):
        for n, name in enumerate(names):
            save(tmp_path / split / name / f"{split}{n}.npy", make_sample(0)[0])
        (tmp_path / f"{split}.csv").write_text("".join(f"{split}{n}.npy,{name}\n" for n, name in enumerate(names)))
    test_files = {"images": f"{tmp_path}/new/*/*.npy", "labels": f"{tmp_path}/new.csv"}
    train_labels = "folders" if labels == "folders" else f"{tmp_path}/train.csv"
    data = nd.ImageFiles(f"{tmp_path}/train/*/*.npy", train_labels, validation=None, test=test_files)
    data.check()
    assert (data._image_labels.tolist(), data.classes) == ([0, 1, 2, 1, 2], 3)  # new/b comes before new/c
    (tmp_path / "new.csv").write_text("new0.npy,z\nnew1.npy,b\n")
    with pytest.raises(nd.DataError, match=r"new.csv: 'z' is not among the training classes \(a, b, c\); correct it"):
        data.check()


def test_folders_distinguish_images_of_the_same_name(tmp_path):
    for n, folder in enumerate(("a", "b")):
        save(tmp_path / "x" / folder / "0.npy", make_sample(n)[0])
    table = tmp_path / "l.csv"
    table.write_text("file,class\na/0.npy,1\n/elsewhere/x/b/0.npy,0\n")
    data = nd.ImageFiles(f"{tmp_path}/x/*/0.npy", str(table), crop=[16, 16], validation=None)
    data.check()
    assert data._image_labels.tolist() == [1, 0]
    table.write_text("0.npy,1\n")
    with pytest.raises(nd.DataError, match=r"'0.npy' could be .*a/0.npy or .*b/0.npy; add the folder to the path"):
        data.check()


def test_mask_names_with_dots(tmp_path):
    for n in range(2):
        for kind, array in zip(("x", "y"), make_sample(n), strict=True):
            save(tmp_path / kind / f"scan.{n}.npy", array)
    data = nd.ImageFiles(f"{tmp_path}/x/*.npy", f"{tmp_path}/y/*.npy", crop=[16, 16], validation=None)
    data.check()
    assert [Path(mask.name).name for mask in data._masks] == ["scan.0.npy", "scan.1.npy"]


def test_palette_masks_are_read_as_indices(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    for n in range(2):
        picture, mask = make_sample(n)
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "y").mkdir(exist_ok=True)
        image.fromarray(picture).save(tmp_path / "x" / f"{n}.png")
        colours = image.fromarray(mask)
        colours.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0])
        colours.save(tmp_path / "y" / f"{n}.png")
    fields = {"images": f"{tmp_path}/x/*.png", "labels": f"{tmp_path}/y/*.png", "validation": 1, "classes": 3}
    data = run_on_ranks(1, lambda grid: open_dataset(grid, fields))[0]
    assert set(np.unique(data.train.targets([0]))) == {0, 1, 2}


@pytest.fixture
def chunked_fields(tmp_path):
    """Fields for three images and masks in chunks."""
    for n in range(3):
        for name, array in zip(("images", "masks"), make_sample(n), strict=True):
            (tmp_path / name).mkdir(exist_ok=True)
            array = array.reshape(*SIZES[n], -1)
            with h5py.File(tmp_path / name / f"{n}.h5", "w") as file:
                file.create_dataset("cells", data=array, chunks=(8, 10, array.shape[-1]))
    return {"images": f"{tmp_path}/images/*.h5", "labels": f"{tmp_path}/masks/*.h5", "validation": 1}


@pytest.mark.parametrize("cache", [0, "0MiB"])
def test_disabled_chunk_cache(chunked_fields, cache):
    def open_split(cache):
        return open_dataset(nd.ProcessGrid.serial(), chunked_fields, crops_per_image=2, cache=cache).train

    split, numbers = open_split(cache), np.arange(4)
    np.testing.assert_array_equal(split.images(numbers), open_split("1MiB").images(numbers))
    assert (split.bytes_to_be_cached(3), split.tiles._cache.nbytes) == (0, 0)
    assert nd.ClimateFiles("*.nc", ["t"], cache=cache).cache == cache
    for wrong in ("much", -1):
        with pytest.raises(nd.ConfigError, match=r"cache: .* is not an amount of memory"):
            nd.ClimateFiles("*.nc", ["t"], cache=wrong)


@pytest.mark.parametrize("cache", ["1MiB", 3000])
def test_predicted_size_of_chunk_caches(chunked_fields, cache):
    fields = chunked_fields
    split = open_dataset(nd.ProcessGrid.serial(), fields, crops_per_image=2, cache=cache).train
    caches = [split.tiles._cache, split.labels._cache]
    split.images([0])
    missing, before = split.bytes_to_be_cached(3), sum(part.nbytes for part in caches)
    assert split.epoch == 0
    for split.epoch in range(3):
        split.images(np.arange(4)), split.targets(np.arange(4))
    added = sum(part.nbytes for part in caches) - before
    assert added > 1000
    assert 0 <= missing - added < (8 * 10 * 3 + 8 * 10 if cache == 3000 else 1)  # no room for another chunk
    assert split.bytes_to_be_cached(3) == missing - added
