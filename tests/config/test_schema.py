"""Schema of experiment files, and completion of --set."""

import json

import pytest
from init_runs import schema_errors

from neondist.cli import main
from neondist.cli.completion import settable_fields
from neondist.config.keys import settable_keys
from neondist.config.schema import experiment_schema, yaml_custom_tags

FILE = """\
!FitExperiment
dataset: !Synthetic {shape: [8, 8, 1], classes: 2}
model: !ConvnetDist
  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 3, activation: !ReLU {}}, !FCLayerDist {out_features: 2}]
  optimizer: !SGD {learning_rate: 0.1, schedule: !Warmup {epochs: 1, then: !Plateau {}}}
metrics: [!IoU {}]
epochs: 2
"""


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
