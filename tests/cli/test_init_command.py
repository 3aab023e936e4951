"""`neondist init` for folders of images and masks."""

import json

import numpy as np
import pytest
from init_runs import lay_out, schema_errors, write_images, write_picture

import neondist as nd
from neondist.cli import main
from neondist.config import load_experiment


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
        ({"a/0.png": (16, 16, 3), "b/0.png": (16, 16)}, "remove it, or convert all (neondist data convert --mode RGB)"),
        ({"images/0.png": (16, 16), "images/1.png": (16, 16), "masks/0_mask.png": (16, 16)}, "no mask called 0"),
        ({"images/0.png": (16, 16), "images/1.png": (16, 16), "masks/1.png": (16, 16)}, "name masks like their images"),
        ({"images/0.png": (16, 16), "masks/0.png": (8, 8)}, "make them match"),
        ({"test/a/0.png": (8, 8), "train/a/0.png": (8, 8)}, "train/ has image folders; run neondist init mine/train"),
        ({"test/a/0.png": (8, 8), "train 1/a/0.png": (8, 8)}, "run neondist init 'mine/train 1'"),
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
