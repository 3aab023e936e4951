"""Examples of docs/fields.md on small images: training, and prediction in the format of the input."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import neondist as nd
from neondist.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FIELDS = {
    "segmentation": ("slides", 96, "tif", "tifffile", ["dataset.crop=[32, 32]", "dataset.crops_per_image=4"]),
    "volumes": ("volumes", 20, "nii", "nibabel", ["dataset.crop=[10, 8, 12]", "dataset.crops_per_image=2"]),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.long
def test_example(name, tmp_path, monkeypatch):
    kind, side, suffix, package, changes = FIELDS[name]
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / f"{name}.yaml", tmp_path)
    script = {"__name__": "make_example_images"}
    exec((EXAMPLES / "make_example_images.py").read_text(encoding="utf-8"), script)
    script["main"](kind, "data", str(side))
    assert main(["run", f"{name}.yaml", "--virtual", "2", "--output", "run", "--set", "epochs=3", *changes]) == 0
    epochs = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]
    words = ["--checkpoint", "run/checkpoint.h5", "--input", f"data/new.{suffix}", "--output", f"classes.{suffix}"]
    assert main(["predict", f"{name}.yaml", *words, "--classes"]) == 0
    with nd.open_source(f"classes.{suffix}") as prediction, nd.open_source(f"data/truth/new.{suffix}") as truth:
        assert prediction.shape == truth.shape
        values = prediction.read([(0, n) for n in prediction.shape])
        assert np.isfinite(values).all()
    assert not [file for file in os.listdir() if "partial" in file]


def test_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    np.save("image.npy", np.random.default_rng(0).random((30, 20)))
    script = {"__name__": "make_example_images"}
    exec((EXAMPLES / "make_example_images.py").read_text(encoding="utf-8"), script)
    script["main"]("picture", "out.png", "image.npy", "image.npy")
    assert Path("out.png").stat().st_size > 1000
