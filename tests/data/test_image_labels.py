"""Labels and splits of image files: folders, tables and masks."""

from pathlib import Path

import numpy as np
import pytest
from image_samples import make_sample, open_dataset, run_on_ranks, save

import neondist as nd
from neondist.train.inference.file_evaluation import evaluate_files


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
    (top, left), y, x = data.test._crop_positions.first_cell(0), data.test.targets([0]), data.test.images([0])
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


def test_test_folders_share_training_classes(tmp_path):
    for number, name in enumerate(("b/cat", "b/dog", "b/eel", "new/dog", "new/eel")):
        save(tmp_path / name / f"{number}.npy", make_sample(0)[0])
    data = nd.ImageFiles(f"{tmp_path}/b/*/*.npy", validation=None, test={"images": f"{tmp_path}/new/*/*.npy"})
    data.open(nd.ProcessGrid.serial())
    assert (data.classes, data.train.labels.tolist(), data.test.labels.tolist()) == (3, [0, 1, 2], [1, 2])


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
    "l.csv:7: '6.npy' matches no image": "".join(f"{n}.npy,0\n" for n in range(7)),
    "has two rows": "".join(f"{n}.npy,0\n" for n in range(6)) + "0.npy,1\n",
    "has 2 values": "".join(f"{n}.npy,0{',1' * (n == 3)}\n" for n in range(6)),
    "all images have the class 'cat'": "".join(f"{n}.npy,cat\n" for n in range(6)),
    "'cat' of .*1.npy is not a number": "".join(f"{n}.npy,{'cat' if n else 1}\n" for n in range(6)),
    "'1_0' of .*5.npy is not a number": "".join(f"{n}.npy,{n if n < 5 else '1_0'}\n" for n in range(6)),
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


def test_class_names_that_python_reads_as_numbers_or_lines(tmp_path):
    names = ["1_0", "1_1", "2\u20280"]
    for n in range(3):
        np.save(tmp_path / f"{n}.npy", make_sample(0)[0])
    (tmp_path / "l.csv").write_text("".join(f"{n}.npy,{name}\n" for n, name in enumerate(names)))
    data = nd.ImageFiles(f"{tmp_path}/*.npy", f"{tmp_path}/l.csv")
    data.check()
    assert list(data.class_names) == names


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


@pytest.mark.parametrize(
    ("transform", "shift", "expected"),
    [
        (np.eye(4), 0.0, []),
        (np.eye(4), 0.05, []),
        (np.eye(4), 0.4, ["seg.{0} places its cells up to 0.4 cells from those of t1.{0}"]),
        (np.diag([-1, 1, 1, 1]), 0.0, ["seg.{0} places its cells up to 22 cells from those of t1.{0}"]),
        (np.zeros((4, 4)), 0.0, []),
    ],
    ids=["equal", "rounded", "shifted", "flipped", "unknown"],
)
@pytest.mark.parametrize("suffix", ["nii", "tif"])
def test_masks_elsewhere_than_their_image_are_reported(tmp_path, suffix, transform, shift, expected):
    """Compare affines; the zero matrix stands for an unknown one, which nibabel users write as the identity."""
    affine = np.diag([1.5, 2.0, 3.0, 1.0])
    affine[:2, 3] = -20, 30
    mask_affine = affine @ transform if transform.any() else np.eye(4)
    mask_affine[0, 3] += shift * 1.5
    for name, matrix, dtype in (("t1", affine, "float32"), ("seg", mask_affine, "uint8")):
        if suffix == "nii":
            nibabel = pytest.importorskip("nibabel")
            nibabel.save(nibabel.Nifti1Image(np.zeros((12, 10, 4), dtype), matrix), tmp_path / f"{name}.nii")
        else:
            rasterio = pytest.importorskip("rasterio")
            fields = {"height": 10, "width": 12, "count": 1, "dtype": dtype}
            if not np.array_equal(matrix, np.eye(4)):
                fields["transform"] = rasterio.Affine(*matrix[0, [0, 1, 3]], *matrix[1, [0, 1, 3]])
            with rasterio.open(tmp_path / f"{name}.tif", "w", **fields) as file:
                file.write(np.zeros((1, 10, 12), dtype))
    files = {name: str(tmp_path / f"{name}.{suffix}") for name in ("t1", "seg")}
    data = nd.ImageFiles(images=files["t1"], labels=files["seg"], classes=2, validation=None)
    data.check()
    texts = [warning.replace(f"{tmp_path}/", "") for warning in data.warnings]
    assert [text.partition(",")[0].removeprefix("warning: ") for text in texts] == [
        text.format(suffix) for text in expected
    ]
