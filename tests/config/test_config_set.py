"""Option `--set key.path=value`."""

import pytest
from toy_registry import ToySGD, load

from neondist.errors import ConfigError

FILE = """\
!ToyExperiment
epochs: 3
anything:
grid: {replicas: 1}
model: !ToyModel
  layers:
    - !ToyConv {out_channels: 16, kernel_size: 5}
    - !ToySerial {}
dist_flag: false
"""


def test_values_of_all_kinds():
    experiment = load(
        FILE, "epochs=5", "dtype=float64", "model.layers.0.kernel_size=[3, 1]", "model.layers.-2.bias=false"
    )
    layer = experiment.model.arguments()["layers"][0].arguments()
    assert (experiment.arguments()["epochs"], experiment.arguments()["dtype"]) == (5, "float64")
    assert (layer["kernel_size"], layer["bias"]) == ((3, 1), False)


def test_object_values():
    experiment = load(FILE, "model.optimizer=!ToySGD {learning_rate: 1e-2}", "model.optimizer.betas=[1]")
    assert experiment.model.arguments()["optimizer"] == ToySGD(0.01, (1.0,))


def test_replaced_layer_and_new_nested_fields():
    experiment = load(
        FILE, "model.layers.1=!ToyConv {out_channels: 2, kernel_size: 1}", "grid.rows=2", "anything.a.b=1"
    )
    assert experiment.model.arguments()["layers"][1].arguments()["out_channels"] == 2
    assert experiment.arguments()["grid"] == {"replicas": 1, "rows": 2}
    assert experiment.arguments()["anything"] == {"a": {"b": 1}}


def test_later_settings_win_and_empty_values_are_null():
    assert load(FILE, "epochs=5", "epochs=6", "grid=").arguments()["epochs"] == 6
    assert load(FILE, "grid=").arguments()["grid"] is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epoch=1", "--set epoch=1: epoch: ToyExperiment has no field 'epoch'; did you mean 'epochs'?"),
        (
            "optimizer=!ToySGD {}",
            "--set optimizer=!ToySGD {}: optimizer: ToyExperiment has no field 'optimizer'; did you mean"
            " 'model.optimizer'?",
        ),
        ("epochs", "--set epochs: write --set key.path=value"),
        ("model..x=1", "--set model..x=1: write --set key.path=value"),
        ("epochs=ten", "--set epochs=ten: epochs: expected an integer, got the text 'ten'"),
        ("epochs.x=1", "--set epochs.x=1: epochs: is a scalar (3) and has no 'epochs.x'; write --set epochs=value"),
        (
            "grid.replica=2",
            "--set grid.replica=2: grid.replica: there is no 'replica'; did you mean 'replicas'?",
        ),
        (
            "model.layers.7.bias=true",
            "--set model.layers.7.bias=true: model.layers.7: model.layers is a list with items 0 to 1; give the"
            " number of an item",
        ),
        (
            "model.layers.first=1",
            "--set model.layers.first=1: model.layers.first: model.layers is a list with items 0 to 1; give the"
            " number of an item",
        ),
        (
            "model.layers.0.kernelsize=1",
            "--set model.layers.0.kernelsize=1: model.layers.0.kernelsize: ToyConv has no field 'kernelsize'; did"
            " you mean 'kernel_size'?",
        ),
        (
            "model.optimizer=!ToySDG {}",
            "--set model.optimizer=!ToySDG {}: model.optimizer: unknown tag !ToySDG; did you mean 'ToySGD'?",
        ),
        (
            "model.optimizer.betas=[1]",
            "--set model.optimizer.betas=[1]: model.optimizer: expected an object (!ToySGD) or null, got a mapping; put"
            " the class before it: !NAME {field: value}",
        ),
        (
            "model.layers.0.out_channels=0",
            "--set model.layers.0.out_channels=0: model.layers.0.out_channels: out_channels 0 must be at least 1",
        ),
        (
            "epochs=1e30",
            "--set epochs=1e30: epochs: expected an integer, got 1e+30",
        ),
        (
            "epochs=[1",
            "--set epochs=[1: epochs: not valid YAML: expected ',' or ']', but got '<stream end>'; check indentation,"
            " brackets and colons",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_setting(setting, message):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        load(FILE, setting)
    assert str(caught.value) == message


def test_long_settings_are_shortened():
    with pytest.raises(ConfigError, match=r"^--set epochs=x{50}\.\.\.: epochs: .*'x{57}\.\.\.'$"):
        load(FILE, "epochs=" + "x" * 500)
