"""Schema of experiment files, `neondist init`, and completion of --set."""

import json
from functools import cache

import numpy as np
import pytest

import neondist as nd
import yaml
from neondist.cli import main
from neondist.cli.completion import settable_fields
from neondist.config import load_experiment
from neondist.config.keys import settable_keys
from neondist.config.schema import experiment_schema, yaml_custom_tags


class Untagged(yaml.SafeLoader):
    """Loader that drops tags, as editors do before they validate."""


Untagged.add_multi_constructor("!", lambda loader, tag, node: loader.construct_mapping(node, deep=True))

FILE = """\
!FitExperiment
dataset: !Synthetic {shape: [8, 8, 1], classes: 2}
model: !ConvnetDist
  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 3, activation: !ReLU {}}, !FCLayerDist {out_features: 2}]
  optimizer: !SGD {learning_rate: 0.1, schedule: !Warmup {epochs: 1, then: !Plateau {}}}
metrics: [!IoU {}]
epochs: 2
"""


@cache
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    json_schema = json.loads(json.dumps(experiment_schema()))
    jsonschema.Draft7Validator.check_schema(json_schema)
    return jsonschema.Draft7Validator(json_schema)


def schema_errors(text):
    return list(validator().iter_errors(yaml.load(text, Untagged)))


@pytest.mark.long
def test_schema_agrees_with_check():
    assert schema_errors(FILE) == []
    for old, new in [
        ("epochs: 2", "epochs: 0"),
        ("epochs: 2", "epoch: 2"),
        ("out_channels: 2", "out_channels: two"),
        ("!Synthetic {shape", "!Synthetic {shapes"),
        ("epochs: 2", "nonfinite: go on"),
    ]:
        assert schema_errors(FILE.replace(old, new)), new
    branch = "layers: [!Sum {layers: [[[!LCNLayerDist {min_deviation: mean}]], []]}, "
    assert schema_errors(FILE.replace("layers: [", branch)) == []
    for old, new in [("min_deviation", "min_deviatio"), ("mean", "median"), ("[]]", "[2]]"), ("[[[!", "[[[2, !")]:
        assert schema_errors(FILE.replace("layers: [", branch.replace(old, new))), new
    warmup = experiment_schema()["definitions"]["Warmup"]
    assert warmup["properties"]["start"] == {
        "description": "Initial factor, in [0, 1).",
        "type": "number",
        "minimum": 0,
        "exclusiveMaximum": 1,
        "default": 0.01,
    }
    assert warmup["required"] == ["epochs"]
    assert "clip_norm" in experiment_schema()["definitions"]["AdamW"]["properties"]
    assert "!Plateau mapping" in yaml_custom_tags()


def test_schema_command(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$ref"] == "#/definitions/FitExperiment"
    assert main(["schema", "--tags"]) == 0
    assert "!SSIM mapping" in json.loads(capsys.readouterr().out)


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(FILE)
    keys = settable_keys(str(path))
    assert {"epochs=", "best=", "model.layers.0.kernel_size=", "model.layers.1.bias=", "model.dtype="} <= set(keys)
    assert "model.optimizer.schedule.then.patience=" in keys
    assert settable_keys(str(tmp_path / "none.yaml")) == []
    assert keys == settable_fields(str(path))
    assert settable_fields(None) == []
    path.write_text("a: [")
    assert settable_keys(str(path)) == []


def write_images(folder, count=4, masks=False):
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True)
    for i in range(count):
        cells = np.random.default_rng(i).integers(0, 3 if masks else 255, (70, 50), dtype="u1")
        image.fromarray(cells).save(folder / f"{i}.png")


@pytest.mark.parametrize("kind", ["classes", "masks"])
def test_init_writes_a_valid_file(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "mine" / ("cat" if kind == "classes" else "images"))
    write_images(tmp_path / "mine" / ("dog" if kind == "classes" else "masks"), masks=kind == "masks")
    assert main(["init", "mine"]) == 0
    assert "neondist run mine.yaml" in capsys.readouterr().out
    assert schema_errors((tmp_path / "mine.yaml").read_text()) == []
    experiment = load_experiment("mine.yaml")
    experiment.validate(2)
    assert experiment.dataset.crop == [64, 48]  # a crop lies in every image
    assert experiment.dataset.crops_per_image == 4
    assert experiment.model.leaves[-1].arguments().get("out_features", 3) == (2 if kind == "classes" else 3)
    assert main(["init", "mine"]) == 2
    assert "mine.yaml: already exists; choose another name with --to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("images", "masks"), [("Images", "Masks"), ("image", "mask"), ("img", "GT"), ("JPEGImages", "SegmentationClass")]
)
def test_init_finds_folders_by_customary_names(tmp_path, monkeypatch, images, masks):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "mine" / images)
    write_images(tmp_path / "mine" / masks, masks=True)
    (tmp_path / "mine" / "Annotations").mkdir()
    assert main(["init", "mine"]) == 0
    dataset = load_experiment("mine.yaml").dataset
    assert (dataset.images, dataset.labels) == (f"mine/{images}/*.png", f"mine/{masks}/*.png")


@pytest.mark.parametrize("splits", [["train", "test"], ["Training", "val", "Test"]])
def test_init_rejects_splits_as_classes(tmp_path, monkeypatch, capsys, splits):
    monkeypatch.chdir(tmp_path)
    for split in splits:
        write_images(tmp_path / "mine" / split)
    assert main(["init", "mine"]) == 2
    assert f"mine: {' and '.join(f'{name}/' for name in sorted(splits))} are splits, not classes; give" in (
        capsys.readouterr().err
    )


def test_init_for_a_single_image_and_mask_writes_a_file_that_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "mine" / "images", 1)
    write_images(tmp_path / "mine" / "masks", 1, masks=True)
    assert main(["init", "mine"]) == 0
    short = ["--set", "epochs=1", "dataset.crop=[16, 16]"]
    assert main(["check", "mine.yaml", *short]) == 0
    assert main(["run", "mine.yaml", "--output", "run", *short]) == 0
    out = capsys.readouterr().out
    assert out.count("no validation or test split: only the training loss is reported") == 1
    assert "4 training samples" in out
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert np.isfinite(record["train_loss"])
    assert not [name for name in record if name.startswith(("validation_", "test_"))]
    assert (tmp_path / "run" / "checkpoint_best.h5").is_file()
    assert main(["report", "run"]) == 0
    assert "Lowest train loss" in (tmp_path / "run" / "report.html").read_text()
    assert main(["evaluate", "mine.yaml", "--checkpoint", "run/checkpoint.h5", *short]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["split"] == "train"


def test_init_sets_one_crop_per_whole_image(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        image.fromarray(np.zeros((40, 48), "u1")).save(tmp_path / "mine" / name / "0.png")
    assert main(["init", "mine"]) == 0
    assert load_experiment("mine.yaml").dataset.crops_per_image == 1


@pytest.mark.parametrize("point", ["", ".0"])
def test_init_explains_integer_labels(tmp_path, monkeypatch, point):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "mine")
    (tmp_path / "mine" / "labels.csv").write_text("".join(f"{i}.png,{i + 10}{point}\n" for i in range(4)))
    assert main(["init", "mine"]) == 0
    comment = "# Image classification, 14 classes. Integers in the table are class numbers, starting at 0; write"
    assert (comment in (tmp_path / "mine.yaml").read_text()) == (not point)
    assert isinstance(load_experiment("mine.yaml").model.cost, nd.MSE) == bool(point)


@pytest.mark.parametrize("factor", [1, 0.5], ids=["names", "numbers"])
def test_init_for_a_table(tmp_path, monkeypatch, factor):
    folder = tmp_path / "my \U0001f4f7 é [1]"
    write_images(folder)
    (folder / "0.png").rename(folder / "0.PNG")  # two spellings of the suffix
    (folder / "._0.png").write_text("none")
    labels = [f"{i}.png,{'cat' if i % 2 else 'ape'}" if factor == 1 else f"{i}.png,{i * factor}" for i in range(4)]
    (folder / "labels.csv").write_text("\n".join(["file,label", labels[0].replace("png", "PNG"), *labels[1:]]))
    monkeypatch.chdir(tmp_path)
    assert main(["init", str(folder), "--to", "x.yaml"]) == 0
    experiment = load_experiment("x.yaml")
    experiment.validate(2)
    assert experiment.dataset._image_labels.ravel().tolist() == [i % 2 if factor == 1 else i * factor for i in range(4)]
    outputs, cost = (2, nd.CrossEntropy) if factor == 1 else (1, nd.MSE)
    assert (experiment.model.leaves[-1].arguments()["out_features"], type(experiment.model.cost)) == (outputs, cost)


@pytest.mark.parametrize("labels", [[0, 1, 255], [0, 1, -1]])
def test_init_ignores_255_and_negative_labels(tmp_path, monkeypatch, labels):
    monkeypatch.chdir(tmp_path)
    for folder, values in (("images", [0]), ("masks", labels)):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        for i in range(3):
            np.save(tmp_path / "mine" / folder / f"{i}.npy", np.resize(np.array(values, "i2"), (16, 16)))
    assert main(["init", "mine"]) == 0
    experiment = load_experiment("mine.yaml")
    experiment.validate(2)
    assert (experiment.dataset.classes, experiment.dataset.ignore_index, experiment.model.cost.ignore_index) == (
        2,
        *labels[2:] * 2,
    )


@pytest.mark.parametrize(
    ("values", "outputs", "class_values", "ignored"),
    [
        ([0, 255], 2, [0, 255], None),
        ([0, 128, 255], 3, [0, 128, 255], None),
        ([0, 15, 255], 16, [], 255),
        ([-1, 0, 500], 2, [0, 500], -1),
        ([0, 1, 2, 4], 5, [], None),
        (range(256), 256, [], None),
    ],
)
def test_init_numbers_classes_of_any_values(tmp_path, monkeypatch, values, outputs, class_values, ignored):
    monkeypatch.chdir(tmp_path)
    for folder in ("images", "masks"):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        for i in range(2):
            np.save(tmp_path / "mine" / folder / f"{i}.npy", np.resize(np.array(values, "i2"), (16, 24)))
    assert main(["init", "mine"]) == 0
    experiment = load_experiment("mine.yaml")
    dataset = experiment.dataset
    assert experiment.model.leaves[-1].arguments()["out_channels"] == outputs
    assert (dataset.class_values, dataset.ignore_index, experiment.model.cost.ignore_index) == (
        class_values,
        ignored,
        ignored,
    )
    dataset.open(nd.ProcessGrid.serial())
    targets = dataset.train.targets([0])
    dataset.close()
    expected = range(len(class_values)) if class_values else set(values) - {ignored}
    assert set(targets.ravel().tolist()) <= {*expected, *({ignored} - {None})}


def lay_out(tmp_path, names):
    """Write images, and masks of 0 and 1 for names that contain 'mask', 'seg', 'gt' or 'label'."""
    image = pytest.importorskip("PIL.Image")
    for name in names:
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_mask = any(word in name.lower() for word in ("mask", "seg", "gt", "label"))
        image.fromarray(np.random.default_rng(len(name)).integers(0, 2 if is_mask else 255, (24, 24), "u1")).save(path)


LAYOUTS = {
    "a_mask": (["{}.png", "{}_mask.png"], "*.png", "*_mask.png"),
    "a-seg": (["{}.jpg", "{}-seg.png"], "*.jpg", "*-seg.png"),
    "image_a": (["case{}_t1.png", "case{}_gt.png"], "*.png", "*_gt.png"),
    "splits": (
        ["images/train/{}.png", "masks/train/{}.png", "images/val/{}.png", "masks/val/{}.png"],
        "images/train/*.png",
        "masks/train/*.png",
    ),
    "patients": (["images/p{}/x{}.png", "labels/p{}/x{}.png"], "images/*/*.png", "labels/*/*.png"),
    "VOC": (
        ["JPEGImages/{}.jpg", "SegmentationClass/{}.png", "SegmentationObject/{}.png", "Annotations/{}.png"],
        "JPEGImages/*.jpg",
        "SegmentationClass/*.png",
    ),
    "cityscapes": (
        [
            "leftImg8bit/train/ulm/ulm_{}_leftImg8bit.png", "gtFine/train/ulm/ulm_{}_gtFine_labelIds.png",
            "gtFine/train/ulm/ulm_{}_gtFine_color.png", "leftImg8bit/val/bonn/bonn_{}_leftImg8bit.png",
        ],
        "leftImg8bit/train/*/*.png",
        "gtFine/train/*/*_labelIds.png",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("numbers", [["7"], ["08", "11", "9"]])
def test_init_finds_customary_layouts(tmp_path, monkeypatch, capsys, layout, numbers):
    monkeypatch.chdir(tmp_path)
    names, images, labels = LAYOUTS[layout]
    lay_out(tmp_path, [name.format(number, number) for name in names for number in numbers])
    assert main(["init", "mine"]) == 0
    dataset = load_experiment("mine.yaml").dataset
    assert (dataset.images, dataset.labels) == (f"mine/{images}", f"mine/{labels}")
    assert (" is used, not val" in capsys.readouterr().out) == (layout in ("splits", "cityscapes"))
    assert main(["check", "mine.yaml"]) == 0
    assert len(dataset._images or dataset.check() or dataset._images) == len(numbers)


def test_init_warns_of_masks_that_number_objects(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("images", "masks"):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        for i in range(2):
            np.save(tmp_path / "mine" / folder / f"{i}.npy", np.arange(1024, dtype="i2").reshape(32, 32))
    assert main(["init", "mine"]) == 0
    assert "masks have values up to 1023, each of them a class; if they number objects" in capsys.readouterr().out


def test_init_chooses_one_modality_of_nnunet_folders(tmp_path, monkeypatch, capsys):
    pytest.importorskip("nibabel", reason="NIfTI needs nibabel")
    monkeypatch.chdir(tmp_path)
    kinds = "imagesTr/la_{}_0000", "imagesTr/la_{}_0001", "labelsTr/la_{}"
    for name in [f"{kind.format(n)}.nii.gz" for n in (3, 12) for kind in kinds]:
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        with nd.create_sink(tmp_path / "mine" / name, (8, 8, 8, 1), "u1", "ZYXC") as sink:
            sink.write([(0, 8), (0, 8), (0, 8), (0, 1)], np.resize(np.arange(2, dtype="u1"), (8, 8, 8, 1)))
            sink.commit()
    assert main(["init", "mine"]) == 0
    assert "only one image of each case is used, *_0000.nii.gz, not _0001.nii.gz" in capsys.readouterr().out
    load_experiment("mine.yaml").validate(2)


def run_init_and_check(capsys, folder="mine"):
    assert main(["init", folder]) == 0
    assert main(["check", "mine.yaml"]) == 0
    capsys.readouterr()
    return load_experiment("mine.yaml")


@pytest.mark.parametrize(
    ("shape", "dtype", "cost", "number"),
    [
        ((), "i8", nd.CrossEntropy, "test_error"),
        ((2,), "f4", nd.MSE, "test_loss"),
        ((8, 9), "i8", nd.DiceCE, "test_loss"),
        ((8, 9, 2), "f4", nd.MSE, "test_loss"),
    ],
)
def test_init_for_an_hdf5_file(tmp_path, monkeypatch, capsys, shape, dtype, cost, number):
    h5py = pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with h5py.File(tmp_path / "mine" / "data.h5", "w") as file:
        file["train/images"] = np.zeros((10, 8, 9, 3), "u1")
        file["train/labels"] = np.arange(10 * np.prod(shape, dtype=int)).reshape(10, *shape).astype(dtype) % 3
    experiment = run_init_and_check(capsys)
    assert (type(experiment.model.cost), experiment.best.number) == (cost, number)
    (tmp_path / "mine" / "data.h5").rename("mine.h5")
    (tmp_path / "mine.yaml").unlink()
    assert run_init_and_check(capsys, "mine.h5").dataset.path == "mine.h5"


@pytest.mark.parametrize(
    "names",
    [
        ["X.npy", "y.npy"],
        ["images.npy", "labels.npy"],
        ["x_train.npy", "y_train.npy", "x_test.npy", "y_test.npy"],
        ["d.npz"],
    ],
)
def test_init_names_the_commands_for_arrays(tmp_path, monkeypatch, capsys, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    images, labels = np.zeros((10, 8, 9), "u1"), np.arange(10) % 3
    for name in names:
        if name.endswith(".npz"):
            np.savez(tmp_path / "mine" / name, images=images, labels=labels)
        else:
            np.save(tmp_path / "mine" / name, labels if name[0] in "yl" else images)
    assert main(["init", "mine"]) == 2
    commands = capsys.readouterr().err.strip().partition("; run neondist ")[2].split(" and then neondist ")
    assert all(main(command.split()) == 0 for command in commands)
    assert main(["check", "mine.yaml"]) == 0


@pytest.mark.parametrize(
    ("table", "folder", "extra"),
    [("train.csv", "", "notes.csv"), ("train.csv", "train", "sample_submission.csv"), ("any.csv", "train_images", "")],
)
def test_init_finds_the_table_of_images(tmp_path, monkeypatch, capsys, table, folder, extra):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "mine" / folder)
    (tmp_path / "mine" / table).write_text("id,label\n" + "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(4)))
    if extra:
        (tmp_path / "mine" / extra).write_text("x,y\n")
    assert run_init_and_check(capsys).dataset.labels == f"mine/{table}"


def test_init_counts_indices_of_palettes(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    for folder in ("images", "masks"):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        for i in range(4):
            picture = image.fromarray(np.full((70, 66), i, "u1"), "P")
            picture.putpalette([200, 10, 90] * 4)
            picture.save(tmp_path / "mine" / folder / f"{i}.{'gif' if folder == 'images' else 'png'}")
    assert main(["init", "mine"]) == 0
    assert "masks contain 0 to 3" in (tmp_path / "mine.yaml").read_text()
    assert load_experiment("mine.yaml").model.leaves[-1].arguments()["out_channels"] == 4


@pytest.mark.parametrize("kind", ["u1", "f4"])
def test_init_for_volumes(tmp_path, monkeypatch, kind):
    pytest.importorskip("nibabel", reason="NIfTI needs nibabel")
    monkeypatch.chdir(tmp_path)
    for folder, dtype in (("images", "i2"), ("masks", kind)):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        for i in range(3):
            with nd.create_sink(tmp_path / "mine" / folder / f"{i}.nii.gz", (12, 40, 36, 1), dtype, "ZYXC") as sink:
                sink.write([(0, 1), (0, 1), (0, 2), (0, 1)], np.ones((1, 1, 2, 1), dtype))
                sink.commit()
    assert main(["init", "mine"]) == 0
    experiment = load_experiment("mine.yaml", ["epochs=1"])
    experiment.validate(2)
    assert (experiment.dataset.crop, experiment.dataset.sample_shape) == ([8, 32, 32], (8, 32, 32, 1))
    outputs, classes, cost = (2, 2, nd.DiceCE) if kind == "u1" else (1, None, nd.MSE)
    assert experiment.model.leaves[-1].arguments()["out_channels"] == outputs
    assert experiment.dataset.arguments().get("classes") == classes
    assert type(experiment.model.cost) is cost


@pytest.mark.parametrize(
    "files", [["{}_t1", "{}_seg"], ["image", "mask"], ["{}_flair", "{}_t1", "{}_seg"]], ids=lambda files: files[0]
)
def test_init_for_one_folder_per_case(tmp_path, monkeypatch, capsys, files):
    monkeypatch.chdir(tmp_path)
    for case in range(8, 12):
        folder = tmp_path / "mine" / f"case{case}"
        folder.mkdir(parents=True)
        for name in files:
            cells = np.full((16, 16), case % 3, "u1" if name == files[-1] else "f4")
            np.save(folder / f"{name.format(folder.name)}.npy", cells)
    (tmp_path / "mine" / "empty").mkdir()
    assert main(["init", "mine"]) == 0
    assert ("only one image of each case is used, *_flair.npy, not _t1.npy" in capsys.readouterr().out) == (
        len(files) == 3
    )
    experiment = load_experiment("mine.yaml")
    experiment.validate(2)
    assert experiment.dataset.images == f"mine/*/*{files[0].replace('{}', '')}.npy"
    assert experiment.dataset.classes == 3


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_init_for_time_series(tmp_path, monkeypatch, suffix):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr" if suffix == ".zarr" else "netCDF4")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    fields = np.random.default_rng(0).random((30, 6, 8), "f4")
    for part in range(2):
        times = slice(15 * part, 15 * part + 15)
        coordinates = {
            "time": ("time", np.arange(30)[times], {"units": "days since 2001-01-01"}),
            "lat": ("lat", np.linspace(-75, 75, 6), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(8) * 45.0, {"units": "degrees_east"}),
        }
        variables = dict.fromkeys(("t2m", "u10"), (("time", "lat", "lon"), fields[times]))
        variables["area"] = (("lat", "lon"), fields[0])
        data = xarray.Dataset(variables, coordinates)
        path = tmp_path / "mine" / f"{part}{suffix}"
        data.to_netcdf(path) if suffix == ".nc" else data.to_zarr(path, consolidated=False)
    assert main(["init", "mine"]) == 0
    assert schema_errors((tmp_path / "mine.yaml").read_text()) == []
    experiment = load_experiment("mine.yaml")
    experiment.validate(2)
    assert (experiment.dataset.variables, experiment.dataset.files) == (["t2m", "u10"], f"mine/*{suffix}")
    assert experiment.model.cost.weights == "cos(lat)"


def test_init_for_dicom_files(tmp_path, capsys):
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "1.DCM").write_bytes(bytes(128) + b"DICM")
    assert main(["init", str(tmp_path), "--to", str(tmp_path / "x.yaml")]) == 2
    assert "has DICOM files; convert each series to NIfTI" in capsys.readouterr().err
    with pytest.raises(nd.DataError, match="DICOM files cannot be read; convert the series to NIfTI"):
        nd.open_source(tmp_path / "series" / "1.DCM")


def test_init_without_images(tmp_path, capsys):
    write_images(tmp_path / "split" / "train" / "cat", 1)
    assert main(["init", str(tmp_path / "split"), "--to", str(tmp_path / "x.yaml")]) == 2
    assert "but train/ has image folders; run neondist init" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "climate").mkdir()
    with nd.create_sink(tmp_path / "climate" / "1.nc", (4, 5, 1), "f4", "YXC") as sink:
        sink.commit()
    for folder, message in (
        ("none", "no such folder"),
        ("empty", "has 0 subfolders with images; give a subfolder"),
        ("climate", "has no variable over time, latitude and longitude; give a folder of such files"),
    ):
        assert main(["init", str(tmp_path / folder), "--to", str(tmp_path / "x.yaml")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()


def write_picture(path, shape=(16, 16, 3), top=256):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(np.random.default_rng(0).integers(0, top, shape).astype("u1")).save(path)


@pytest.mark.parametrize("extent", range(1, 10))
def test_init_for_tiny_images(tmp_path, monkeypatch, extent):
    monkeypatch.chdir(tmp_path)
    for name in ("a/0", "a/1", "b/0", "b/1"):
        write_picture(tmp_path / "mine" / f"{name}.png", (extent, 11, 3))
    assert main(["init", "mine"]) == 0
    load_experiment("mine.yaml").validate(1)


@pytest.mark.parametrize("images", ["images", "imgs", "imagesTr"])
@pytest.mark.parametrize("masks", ["masks", "labels", "annotations", "labelsTr"])
def test_init_recognises_folders_of_masks(tmp_path, monkeypatch, images, masks):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        write_picture(tmp_path / "mine" / images / f"{i}.png")
        write_picture(tmp_path / "mine" / masks / f"{i}.png", (16, 16), 3)
    assert main(["init", "mine"]) == 0
    experiment = load_experiment("mine.yaml")
    experiment.validate(1)
    assert experiment.dataset.classes == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a/0.png": (16, 16, 3), "b/0.png": (16, 16)}, "convert it (neondist data convert --mode RGB), or remove it"),
        ({"images/0.png": (16, 16), "images/1.png": (16, 16), "masks/0_mask.png": (16, 16)}, "no mask called 0"),
        ({"images/0.png": (16, 16), "images/1.png": (16, 16), "masks/1.png": (16, 16)}, "name masks like their images"),
        ({"images/0.png": (16, 16), "masks/0.png": (8, 8)}, "make them match"),
        ({"test/a/0.png": (8, 8), "train/a/0.png": (8, 8)}, "train/ has image folders; run neondist init mine/train"),
        (
            {"test/a/0.png": (8, 8), "train/a/0.png": (8, 8), "val/a/0.png": (8, 8)},
            'run neondist init mine/train, and set validation: "mine/val/*/*.png" in the file',
        ),
    ],
)  # fmt: skip
def test_init_checks_the_files(tmp_path, monkeypatch, capsys, files, message):
    """Reject folders whose experiment `check` would reject, and write none."""
    monkeypatch.chdir(tmp_path)
    for name, shape in files.items():
        write_picture(tmp_path / "mine" / name, shape, 2)
    assert main(["init", "mine"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_init_with_other_separators(tmp_path, monkeypatch, capsys, separator, name):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        write_picture(tmp_path / "mine" / f"{i}.png")
    (tmp_path / "mine" / "labels.csv").write_text("\n".join(f"{i}.png{separator}{i}" for i in range(3)))
    assert main(["init", "mine"]) == 2
    assert f"labels.csv: separates columns with {name}; use commas, as in FILE,CLASS" in capsys.readouterr().err


def test_init_quotes_names_for_the_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_picture(tmp_path / "my images" / name / "0.png")
    assert main(["init", "my images"]) == 0
    assert "`neondist check 'my images.yaml'`, then `neondist run 'my images.yaml'`" in capsys.readouterr().out


def test_representations_of_models():
    model = nd.Convnet([nd.ConvLayer(4, 3), nd.FCLayer(2)])
    assert "not built" in model._repr_html_()
    assert repr(model) == str(model) == "Convnet (not built)"
    with pytest.raises(nd.UserError, match="summary: the model is not built; give the shape of its input"):
        model.summary()
    summary = model.summary((8, 8, 1))
    assert "conv1" in summary
    assert repr(summary) == str(summary)
    model.build((8, 8, 1), 2)
    assert str(model.summary()) == model.compiled.describe()
    for item in (model, model.compiled, model.grid, summary):
        assert item._repr_html_().startswith("<pre>")


def test_repr_of_a_built_model_is_its_table():
    model = nd.Convnet([nd.ConvLayer(4, 3), nd.FCLayer(2)])
    model.build((8, 8, 1), 2)
    assert repr(model) == str(model.summary())
    assert "conv1" in repr(model)
    assert str(model) == repr(model)  # as print shows it


def test_check_rejects_the_best_epoch_of_a_missing_split(tmp_path, monkeypatch, capsys):
    h5py = pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "mine" / "cat")
    write_images(tmp_path / "mine" / "dog")
    assert main(["init", "mine"]) == 0
    assert main(["check", "mine.yaml"]) == 0
    assert main(["check", "mine.yaml", "--set", "dataset.validation=null"]) == 2
    assert "best.number: no 'validation_error', because the data set has no validation split" in capsys.readouterr().err
    assert main(["check", "mine.yaml", "--set", "best.number=test_loss"]) == 2
    assert main(["check", "mine.yaml", "--set", "best.number=test_loss", "dataset.test=1"]) == 0
    with h5py.File("h5.h5", "w") as file:
        file["train/images"], file["train/labels"] = np.zeros((10, 8, 9, 3), "u1"), np.arange(10) % 3
    assert main(["init", "h5.h5"]) == 0
    for number, fields, code in (
        ("test_loss", [], 0),
        ("validation_loss", [], 2),
        ("validation_loss", ["dataset.validation=2"], 0),
        ("f1", [], 0),
    ):
        assert main(["check", "h5.yaml", "--set", f"best.number={number}", *fields]) == code
    assert "--set best.number=validation_loss: best.number: no 'validation_loss'" in capsys.readouterr().err
