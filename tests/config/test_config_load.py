"""Loading of valid experiment files."""

import pytest
from toy_registry import ToyConv, ToyConvDist, ToyExperiment, ToyModel, ToyModelDist, ToyRelu, ToySGD, ToyWide, load

import neondist as nd
from neondist.config import describe_yaml_location, dump, load_experiment
from neondist.registry.type_hints import example_class_names

FILE = """\
# a comment
!ToyExperiment
epochs: 3
grid: {replicas: 1}
dtype: float64
anything: [1, {a: 2.5, b: [x, null]}, '7', 2024-01-01]
model: !ToyModelDist
  layers:
    - !ToyConvDist {out_channels: 16, kernel_size: 5, padding: 2, activation: !ToyRelu {}}
    - !ToyConvDist
      out_channels: 8
      kernel_size: [3, 1]
      padding: [[1, 1], [0, 0]]
      scale: 1e-3
      bias: off
      activation: !ToyRelu
  optimizer: !ToySGD {learning_rate: 1, betas: [0.5, 1]}
"""


def toy_conv(**options):
    return ToyConvDist(16, 5, 2, activation=ToyRelu(), **options)


EXPECTED = ToyExperiment(
    ToyModelDist(
        [toy_conv(), ToyConvDist(8, (3, 1), ((1, 1), (0, 0)), scale=0.001, bias=False, activation=ToyRelu())],
        ToySGD(1.0, (0.5, 1.0)),
    ),
    epochs=3,
    grid={"replicas": 1},
    dtype="float64",
    anything=[1, {"a": 2.5, "b": ["x", None]}, "7", "2024-01-01"],
)


def test_every_kind_of_value():
    assert load(FILE) == EXPECTED


def test_types_follow_the_constructor():
    second = load(FILE).model.arguments()["layers"][1].arguments()
    assert second["kernel_size"] == (3, 1)
    assert second["padding"] == ((1, 1), (0, 0))
    assert second["bias"] is False
    assert type(load(FILE).model.arguments()["optimizer"].arguments()["learning_rate"]) is float


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), ("-.5e+2", -50.0), ("3", 3), ("1_000", 1000), ("0x10", 16), ("010", 10),
        (".inf", float("inf")), ("-.inf", float("-inf")), ("'1e-3'", "1e-3"), ("1:30", "1:30"), ("~", None),
        ("yes", True), ("False", False), ("!!str 5", "5"), ("!!int '5'", 5), ("e5", "e5"), ("1.5.2", "1.5.2"),
    ],
)  # fmt: skip
def test_plain_values(text, value):
    value_read = load(f"!ToyExperiment {{model: !ToyModel {{layers: []}}, anything: {text}}}").arguments()["anything"]
    assert value_read == value
    assert type(value_read) is type(value)


def test_round_trip():
    text = dump(EXPECTED)
    assert load(text) == EXPECTED
    assert "python" not in text
    assert "kernel_size: [3, 1]" in text
    assert "epochs: 3" in text
    assert "folder: null" in text  # defaults are written out
    assert load(dump(load(text))) == EXPECTED


@pytest.mark.parametrize(
    "value", ["1e5", "yes", "null", "", "#x", "a: b", "0x1f", "1_0", "1:30", "~", "two\nlines", "é"]
)
def test_round_trip_of_awkward_text(value):
    experiment = ToyExperiment(ToyModelDist([]), anything=value, dtype=value)
    assert load(dump(experiment)) == experiment


@pytest.mark.parametrize("value", [1e-12, 1e300, 3.0, float("inf"), True, 0, -7, [], {}, [[], {}], {"a": [ToyRelu()]}])
def test_round_trip_of_awkward_values(value):
    value_read = load(dump(ToyExperiment(ToyModelDist([]), anything=value))).arguments()["anything"]
    assert value_read == value
    assert type(value_read) is type(value)


def test_numpy_values_are_written_as_plain_ones():
    np = pytest.importorskip("numpy")
    experiment = ToyExperiment(ToyModelDist([]), anything=[np.float32(0.5), np.int64(3), np.dtype("float32")])
    assert load(dump(experiment)).arguments()["anything"] == [0.5, 3, "float32"]


def test_alias_creates_another_object():
    text = "!ToyExperiment\nmodel: !ToyModel {layers: [&c !ToyConv {out_channels: 1, kernel_size: 1}, *c]}"
    first, second = load(text).model.arguments()["layers"]
    assert first == second
    assert first is not second
    changed = load(text, "model.layers.1.out_channels=2").model.arguments()["layers"]
    assert [layer.arguments()["out_channels"] for layer in changed] == [1, 2]


def test_merge_keys_give_defaults():
    text = """!ToyExperiment
anything: &base {out_channels: 4, kernel_size: 3}
model: !ToyModel {layers: [!ToyConv {<<: *base, kernel_size: 5}]}
"""
    (layer,) = load(text).model.arguments()["layers"]
    assert layer == ToyConvDist(4, 5)


def test_kwargs_accept_arguments_of_the_parent():
    text = "!ToyExperiment\nmodel: !ToyModel {layers: [!ToyWide {width: 2, out_channels: 1, kernel_size: 1}]}"
    (layer,) = load(text).model.arguments()["layers"]
    assert layer == ToyWide(2.0, out_channels=1, kernel_size=1)


@pytest.mark.parametrize("name", ["ToyModel", "ToyModelDist"])
@pytest.mark.parametrize(("flag", "model", "layer"), [("true", ToyModelDist, ToyConvDist), ("no", ToyModel, ToyConv)])
def test_dist_flag_selects_classes(name, flag, model, layer):
    suffix = name.removeprefix("ToyModel")
    text = f"""!ToyExperiment
model: !{name} {{layers: [!ToyConv{suffix} {{out_channels: 1, kernel_size: 1, activation: !ToyRelu {{}}}}]}}
dist_flag: {flag}
"""
    experiment = load(text)
    assert type(experiment.model) is model
    assert type(experiment.model.arguments()["layers"][0]) is layer
    serial = load(text, "dist_flag=false")
    assert type(serial.model) is ToyModel


def test_distributed_classes_are_the_default():
    assert type(load("!ToyExperiment {model: !ToyModel {layers: []}}").model) is ToyModelDist


def test_locations_of_objects():
    experiment = load(FILE)
    assert describe_yaml_location(experiment) == "exp.yaml:2"
    assert describe_yaml_location(experiment.model.arguments()["layers"][1]) == "exp.yaml:10: model.layers.1"
    assert describe_yaml_location(experiment.model.arguments()["optimizer"]) == "exp.yaml:17: model.optimizer"
    assert describe_yaml_location(ToyRelu()) == ""
    assert describe_yaml_location(None) == ""


def test_file_with_byte_order_mark(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text(FILE, encoding="utf-8-sig")
    assert load_experiment(path, top="ToyExperiment") == EXPECTED


def test_older_class_names_are_read_and_replaced():
    experiment = load("!ToyExperiment\nmodel: !ToyModel {layers: []}\nanything: [!RectLin {}, !ReLU {}]")
    assert [type(activation) for activation in experiment.arguments()["anything"]] == [nd.ReLU, nd.RectLin]
    assert "RectLin" not in dump(experiment)
    assert "RectLin" not in example_class_names(nd.Activation, max_names=99)
    assert "!ReLU" in example_class_names(nd.Activation, max_names=99)
