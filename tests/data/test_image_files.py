"""Crops of image files, identical in every format and on every grid."""

import h5py
import numpy as np
import pytest
from image_samples import SIZES, make_sample, open_dataset, run_on_ranks, save

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
