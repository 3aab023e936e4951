"""Names of classes in reports: from folders, tables, YAML, attributes of labels and of PyTorch modules."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

import neondist as nd
from neondist.cli import main
from neondist.train import state
from neondist.train.html_report import evaluation_page_html

Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")

CLASSIFIER_YAML = """!FitExperiment
dataset: {dataset}
model: !ConvnetDist
  layers: [!ConvLayerDist {{out_channels: 2, kernel_size: 3, stride: 4}}, !FCLayerDist {{out_features: 2}}]
batch_size: 4
epochs: 1
metrics: [!ConfusionMatrix {{}}]
"""
SEGMENTER_YAML = """!FitExperiment
dataset: {dataset}
model: !ConvnetDist {{layers: [!ConvLayerDist {{out_channels: 2, kernel_size: 3, padding: 1}}]}}
batch_size: 4
epochs: 1
metrics: [!ConfusionMatrix {{}}]
"""


def write_class_folders(folder):
    rng = np.random.default_rng(1)
    for name in ("a <cat>", "dog"):
        (folder / "pets" / name).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(rng.integers(0, 255, (12, 12), "u1")).save(folder / "pets" / name / f"{number}.png")
    return "!ImageFiles {images: 'pets/*/*.png', crop: [12, 12], validation: 4}"


def write_csv_table(folder):
    write_class_folders(folder)
    for path in sorted(folder.glob("pets/*/*.png")):
        path.rename(folder / "pets" / f"{path.parent.name[-1]}{path.name}")
    rows = [f"{letter}{number}.png,{name}" for letter, name in ((">", "a <cat>"), ("g", "dog")) for number in range(6)]
    (folder / "labels.csv").write_text("\n".join(rows))
    return "!ImageFiles {images: 'pets/*.png', labels: labels.csv, crop: [12, 12], validation: 4}"


def write_converted_hdf5(folder):
    write_class_folders(folder)
    assert main(["data", "convert", str(folder / "pets"), "--to", str(folder / "pets.h5")]) == 0
    return "!HDF5Dataset {path: pets.h5}"


def write_mask_files(folder):
    rng = np.random.default_rng(1)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number in range(8):
        cells = rng.integers(0, 255, (12, 12), "u1")
        Image.fromarray(cells).save(folder / "images" / f"{number}.png")
        Image.fromarray((cells > 128).astype("u1")).save(folder / "masks" / f"{number}.png")
    return (
        "!ImageFiles {images: 'images/*.png', labels: 'masks/*.png', crop: [12, 12], validation: 4,"
        " class_names: [a <cat>, dog]}"
    )


DATASET_WRITERS = {
    "folders": write_class_folders,
    "table": write_csv_table,
    "attribute": write_converted_hdf5,
    "YAML": write_mask_files,
}


@pytest.mark.parametrize("source", DATASET_WRITERS)
def test_reports_show_class_names(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    template = SEGMENTER_YAML if source == "YAML" else CLASSIFIER_YAML
    (tmp_path / "run.yaml").write_text(template.format(dataset=DATASET_WRITERS[source](tmp_path)))
    assert main(["run", "run.yaml", "--output", "run"]) == 0
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == ["a <cat>", "dog"]
    assert main(["report", "run"]) == 0
    assert main(["evaluate", "run.yaml", "--checkpoint", "run/checkpoint.h5", "--report", "e.html"]) == 0
    for page in ((tmp_path / "run" / "report.html").read_text(), (tmp_path / "e.html").read_text()):
        assert "<th>a &lt;cat&gt;</th><th>dog</th>" in page  # the confusion matrix
        assert "a <cat>" not in page.partition("experiment.yaml")[0]
        if source == "YAML":
            assert "<p>Image, target, prediction.</p>" in page
            assert "</svg> dog</span>" in page
        else:
            assert "target dog, prediction" in page or "target a &lt;cat&gt;, prediction" in page


MODULE_YAML = """!FitExperiment
dataset: {dataset}
model: !TorchModel {{factory: 'nets_of_cells:Net'}}
batch_size: 4
epochs: 1
metrics: [!ConfusionMatrix {{}}]
"""
NETS = """from torch import nn


class Net(nn.Conv2d):
    def __init__(self):
        super().__init__(1, 2, 3, padding=1)
"""
EVALUATE_FILES = "--input", "image.npy", "--labels", "labels.npy", "--report", "e.html"


def write_cells_with_names(template):
    """Write an experiment, its data set with names of classes, and an image with labels."""
    with h5py.File("cells.h5", "w") as file:
        cells = np.random.default_rng(2).integers(0, 255, (8, 12, 12, 1), "u1")
        for split in ("train", "test"):
            file[f"{split}/images"], file[f"{split}/labels"] = cells, (cells[..., 0] > 128).astype("u1")
            file[f"{split}/labels"].attrs["names"] = ["ground", "vessel"]
    np.save("image.npy", cells[0])
    np.save("labels.npy", (cells[0, ..., 0] > 128).astype("u1"))
    Path("nets_of_cells.py").write_text(NETS)
    Path("run.yaml").write_text(template.format(dataset="!HDF5Dataset {path: cells.h5}"))


@pytest.mark.parametrize("kind", ["layers", pytest.param("module", marks=pytest.mark.long)])
def test_evaluation_shows_class_names_of_a_moved_checkpoint(tmp_path, monkeypatch, kind):
    if kind == "module":
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    write_cells_with_names(MODULE_YAML if kind == "module" else SEGMENTER_YAML)
    imports = ["--import", "nets_of_cells.py"] if kind == "module" else []
    assert main(["run", "run.yaml", "--output", "run", *imports]) == 0
    Path("run/checkpoint.h5").rename("moved.h5")
    assert main(["evaluate", "run.yaml", "--checkpoint", "moved.h5", *EVALUATE_FILES, *imports]) == 0
    page = Path("e.html").read_text()
    assert "<th>ground</th><th>vessel</th>" in page
    assert "</svg> vessel</span>" in page


def test_checkpoints_without_class_names(tmp_path, monkeypatch, capsys):
    """Expect the names of the run folder, if the checkpoint is in it, and else numbers."""
    monkeypatch.chdir(tmp_path)
    write_cells_with_names(SEGMENTER_YAML)
    monkeypatch.setattr(state, "class_name_texts", lambda dataset: {})
    assert main(["run", "run.yaml", "--output", "run"]) == 0
    assert main(["evaluate", "run.yaml", "--checkpoint", "run/checkpoint.h5", *EVALUATE_FILES]) == 0
    assert "<th>ground</th><th>vessel</th>" in Path("e.html").read_text()
    Path("run/checkpoint.h5").rename("moved.h5")
    assert main(["evaluate", "run.yaml", "--checkpoint", "moved.h5", *EVALUATE_FILES]) == 0
    assert "<th>0</th><th>1</th>" in Path("e.html").read_text()
    monkeypatch.setattr(state, "class_name_texts", lambda dataset: {"classes": "[1, 2]"})
    assert main(["run", "run.yaml", "--output", "invalid"]) == 0
    assert main(["evaluate", "run.yaml", "--checkpoint", "invalid/checkpoint.h5", *EVALUATE_FILES]) == 2
    assert "invalid/checkpoint.h5: its class names are invalid (a class name is not of type str)" in (
        capsys.readouterr().err
    )


@pytest.mark.long
def test_class_names_from_a_module_attribute(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets_with_names.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Conv2d):\n    class_names = ['ground', 'vessel']\n\n"
        "    def __init__(self):\n        super().__init__(1, 2, 3, padding=1)\n"
    )
    torch.save(torch.nn.Conv2d(1, 2, 3, padding=1).state_dict(), "w.pt")
    np.save("image.npy", np.zeros((9, 8), "f4"))
    np.save("labels.npy", np.ones((9, 8), "u1"))
    files = "--input", "image.npy", "--labels", "labels.npy", "--report", "e.html"
    assert main(["evaluate", "--weights", "w.pt", "--factory", "nets_with_names.py:Net", *files]) == 0
    assert "</svg> vessel</span>" in (tmp_path / "e.html").read_text()


def test_page_labels_slices_of_volumes():
    cells = np.zeros((1, 4, 4), int)
    samples = {"sample": np.arange(1), "loss": np.ones(1), "image": np.zeros((1, 4, 4, 1), "u1")}
    for volume, text in ((True, "Middle slice of the volume, target"), (False, "<p>Image, target")):
        arrays = {**samples, "label": cells, "prediction": cells, "volume": np.array([volume])}
        assert text in evaluation_page_html("e", {}, {"loss": 1.0}, arrays)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_names": []}, r"class_names: \[\] is invalid; expected distinct names"),
        ({"class_names": ["a", "a"]}, r"class_names: \['a', 'a'\] is invalid; expected distinct names"),
        ({"class_names": ["a", "b"], "classes": 3}, "class_names: 2 names for classes: 3; give one name per class"),
    ],
)
def test_invalid_class_names_are_rejected(arguments, message):
    for create in (nd.HDF5Dataset, nd.ImageFiles):
        with pytest.raises(nd.ConfigError, match=message):
            create("x", **arguments)
