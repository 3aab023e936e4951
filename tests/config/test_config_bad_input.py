"""Mistakes in experiment files: one message with its line, and no object is created."""

import os
import time

import pytest
from toy_registry import load

import neondist as nd
from neondist.cli import main
from neondist.config import dump, load_experiment
from neondist.errors import ConfigError, ShapeError, UserError

HEAD = "!ToyExperiment\nmodel: !ToyModel\n  layers:\n"


def layer(text: str) -> str:
    """Return a file with a layer on line 4."""
    return f"{HEAD}    - {text}\n"


CASES = {
    "unknown tag": (
        layer("!ToyKonv {}"),
        "exp.yaml:4: model.layers.0: unknown tag !ToyKonv; did you mean 'ToyConv'?",
    ),
    "unknown tag in other case": (
        layer("!TOYCONV {}"),
        "exp.yaml:4: model.layers.0: unknown tag !TOYCONV; did you mean 'ToyConv'?",
    ),
    "unknown tag, nothing near": (
        "!ToyExperiment\nmodel: !ToyModel\n  layers: []\n  optimizer: !Zzz {}",
        "exp.yaml:4: model.optimizer: unknown tag !Zzz; choose from ToySGD",
    ),
    "unknown tag, near to another kind": (
        "!ToyExperiment\nmodel: !ToyModel\n  layers: []\n  optimizer: !ToyConvs {}",
        "exp.yaml:4: model.optimizer: unknown tag !ToyConvs; choose from ToySGD",
    ),
    "class without a required method": (
        "!ToyExperiment\nmodel: !ToyModel\n  layers: []\n  optimizer: !Optimizer {learning_rate: 1}",
        "exp.yaml:4: model.optimizer: !Optimizer cannot be created: class Optimizer must define apply",
    ),
    "unknown field": (
        layer("!ToyConv\n      out_channels: 1\n      kernel_sise: 3"),
        "exp.yaml:6: model.layers.0.kernel_sise: ToyConvDist has no field 'kernel_sise'; did you mean 'kernel_size'?",
    ),
    "field of a class without any": (
        layer("!ToyConv {out_channels: 1, kernel_size: 1, activation: !ToyRelu {slope: 1}}"),
        "exp.yaml:4: model.layers.0.activation.slope: ToyRelu has no field 'slope'; it has no fields",
    ),
    "missing field": (
        layer("!ToyConv {out_channels: 1}"),
        "exp.yaml:4: model.layers.0.kernel_size: missing; ToyConvDist requires it: add 'kernel_size: ...' (an"
        " integer or a list [an integer, an integer])",
    ),
    "text for an integer": (
        layer("!ToyConv {out_channels: six, kernel_size: 1}"),
        "exp.yaml:4: model.layers.0.out_channels: expected an integer, got the text 'six'",
    ),
    "quoted integer": (
        layer("!ToyConv {out_channels: '6', kernel_size: 1}"),
        "exp.yaml:4: model.layers.0.out_channels: expected an integer, got the text '6'; remove the quotes",
    ),
    "float for an integer": (
        layer("!ToyConv {out_channels: 6.0, kernel_size: 1}"),
        "exp.yaml:4: model.layers.0.out_channels: expected an integer, got 6.0; write 6",
    ),
    "bool for an integer": (
        layer("!ToyConv {out_channels: yes, kernel_size: 1}"),
        "exp.yaml:4: model.layers.0.out_channels: expected an integer, got true",
    ),
    "number out of its range": (
        "!ToyExperiment\nmodel: !ToyModel\n  layers: []\n  optimizer: !ToySGD\n    learning_rate: 0",
        "exp.yaml:5: model.optimizer.learning_rate: expected a number above 0 or null, got 0",
    ),
    "item out of its range": (
        "!ToyExperiment\nmodel: !ToyModel\n  layers: []\n  optimizer: !ToySGD {betas: [0,\n    -1.5]}",
        "exp.yaml:5: model.optimizer.betas.1: expected a number of at least 0, got -1.5",
    ),
    "bool for a number": (
        layer("!ToyConv {out_channels: 1, kernel_size: 1, scale: true}"),
        "exp.yaml:4: model.layers.0.scale: expected a number, got true",
    ),
    "integer for a bool": (
        layer("!ToyConv {out_channels: 1, kernel_size: 1, bias: 1}"),
        "exp.yaml:4: model.layers.0.bias: expected true or false, got 1",
    ),
    "number for text": (
        layer("!ToyConv {out_channels: 1, kernel_size: 1, name: 5}"),
        "exp.yaml:4: model.layers.0.name: expected text or null, got 5; quote it: '5'",
    ),
    "null for an integer": (
        layer("!ToyConv {out_channels: , kernel_size: 1}"),
        "exp.yaml:4: model.layers.0.out_channels: expected an integer, got nothing",
    ),
    "list of the wrong length": (
        layer("!ToyConv {out_channels: 1, kernel_size: [1, 2, 3]}"),
        "exp.yaml:4: model.layers.0.kernel_size: expected an integer or a list [an integer, an integer], got a list",
    ),
    "wrong item of a list": (
        layer("!ToyConv\n      out_channels: 1\n      kernel_size:\n        - 1\n        - x"),
        "exp.yaml:8: model.layers.0.kernel_size.1: expected an integer, got the text 'x'",
    ),
    "not one of the choices": (
        layer("!ToyConv {out_channels: 1, kernel_size: 1, padding: smae}"),
        "exp.yaml:4: model.layers.0.padding: expected an integer, 'same' or a list (each a list [an integer, an"
        " integer]), got the text 'smae'; did you mean 'same'?",
    ),
    "plain mapping for an object": (
        layer("{out_channels: 1}"),
        "exp.yaml:4: model.layers.0: expected an object (!ToyConv, !ToyConvDist, !ToyLayer, !ToySerial, !ToyWide), got"
        " a mapping; put the class before it: !NAME {field: value}",
    ),
    "name for an object": (
        layer("!ToyConv {out_channels: 1, kernel_size: 1, activation: ToyRelu}"),
        "exp.yaml:4: model.layers.0.activation: expected an object (!ToyRelu) or null, got the text 'ToyRelu'; write"
        " !ToyRelu {}",
    ),
    "object for a plain value": (
        HEAD + "    []\nepochs: !ToyRelu {}",
        "exp.yaml:5: epochs: expected an integer, got !ToyRelu",
    ),
    "object of another kind": (
        layer("!ToyRelu {}"),
        "exp.yaml:4: model.layers.0: expected an object (!ToyConv, !ToyConvDist, !ToyLayer, !ToySerial, !ToyWide), got"
        " !ToyRelu",
    ),
    "scalar where a list should be": (
        "!ToyExperiment\nmodel: !ToyModel\n  layers: 3",
        "exp.yaml:3: model.layers: expected a list (each an object (!ToyConv, !ToyConvDist, !ToyLayer, !ToySerial,"
        " !ToyWide)), got 3",
    ),
    "text where a list should be": (
        "!ToyExperiment\nmodel: !ToyModel\n  layers: abc",
        "exp.yaml:3: model.layers: expected a list (each an object (!ToyConv, !ToyConvDist, !ToyLayer, !ToySerial,"
        " !ToyWide)), got the text 'abc'",
    ),
    "value after a tag": (
        layer("!ToyConv 16"),
        "exp.yaml:4: model.layers.0: !ToyConv takes its fields by name; write !ToyConv {field: value}",
    ),
    "list after a tag": (
        layer("!ToyConv [16, 5]"),
        "exp.yaml:4: model.layers.0: !ToyConv takes its fields by name; write !ToyConv {field: value}",
    ),
    "constructor's error names its field": (
        layer("!ToyConv\n      kernel_size: 1\n      out_channels: -1"),
        "exp.yaml:6: model.layers.0.out_channels: out_channels -1 must be at least 1",
    ),
    "constructor's error says who and then its field": (
        layer("!ToyConv\n      out_channels: 1\n      kernel_size: [3, 0]"),
        "exp.yaml:6: model.layers.0.kernel_size: layer 'x' (ToyConv): kernel_size (3, 0) has no cell",
    ),
    "constructor's error": (
        layer("!ToyConv {out_channels: 1, kernel_size: 0}"),
        "exp.yaml:4: model.layers.0: a window needs a cell",
    ),
    "constructor's error about a child": (
        layer("!ToyConv {out_channels: 1, kernel_size: 1}")
        + layer("!ToyConv {out_channels: 1, kernel_size: 1, name: bad}").removeprefix(HEAD),
        "exp.yaml:5: model.layers.1: layer 1 is bad",
    ),
    "no distributed twin": (
        layer("!ToySerial {}"),
        "exp.yaml:4: model.layers.0: ToySerial has no distributed class; define one next to ToySerial: class"
        " ToySerialDist(nd.Dist, ToySerial): pass (docs/adding_a_layer.md)",
    ),
    "dist_flag of the wrong type": (
        "!ToyExperiment\ndist_flag: maybe\nmodel: !ToyModel {layers: []}",
        "exp.yaml:2: dist_flag: expected true or false, got the text 'maybe'",
    ),
    "key given twice": (
        "!ToyExperiment\nepochs: 1\nmodel: !ToyModel {layers: []}\nepochs: 2",
        "exp.yaml:4: epochs: given twice, first at exp.yaml:2; remove one",
    ),
    "key that is no word": (
        "!ToyExperiment\n? [a, b]\n: 1",
        "exp.yaml:2: a field's name must be a word, not a list or a mapping",
    ),
    "empty file": ("", "exp.yaml:1: the file is empty; it must contain one !ToyExperiment {...}"),
    "comments only": ("# nothing\n\n", "exp.yaml:1: the file is empty; it must contain one !ToyExperiment {...}"),
    "no tag": (
        "\nepochs: 1\n",
        "exp.yaml:2: the file must contain one !ToyExperiment with its fields, got a mapping; begin"
        " with !ToyExperiment",
    ),
    "a list": (
        "- 1\n",
        "exp.yaml:1: the file must contain one !ToyExperiment with its fields, got a list; begin with !ToyExperiment",
    ),
    "another top object": ("!ToySGD {}", "exp.yaml:1: the top object must be !ToyExperiment, got !ToySGD"),
    "two documents": (
        "!ToyExperiment {}\n---\n!ToyExperiment {}",
        "exp.yaml:2: not valid YAML: but found another document; check indentation, brackets and colons",
    ),
    "open bracket": (
        "!ToyExperiment\nepochs: [1,\nmodel: 2\n",
        "exp.yaml:4: not valid YAML: expected ',' or ']', but got '<stream end>', while parsing a flow sequence that"
        " starts on line 2; check indentation, brackets and colons",
    ),
    "tags without braces": (
        "!ToyExperiment\nmetrics: [!F1, !ROCAUC]\n",
        "exp.yaml:2: not valid YAML: expected ',' or ']', but got '<tag>'; write !F1 {}, with braces after the tag",
    ),
    "tag before a brace": (
        "!ToyExperiment\nmodel: {cost: !MSE}\n",
        "exp.yaml:2: not valid YAML: expected ' ', but found '}'; write !MSE {}, with braces after the tag",
    ),
    "open quote": (
        "!ToyExperiment\nepochs: 'a\nmodel: 2\nanything: 3\n",
        "exp.yaml:5: not valid YAML: found unexpected end of stream, while scanning a quoted scalar that starts on line"
        " 2; check indentation, brackets and colons",
    ),
    "a tab": (
        "!ToyExperiment\nmodel: !ToyModel\n\tlayers: []",
        "exp.yaml:3: not valid YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs",
    ),
    "unknown alias": (
        "!ToyExperiment\nmodel: *m",
        "exp.yaml:2: not valid YAML: found undefined alias 'm'; check indentation, brackets and colons",
    ),
    "a control character": (
        "!ToyExperiment\nmodel: \x00",
        "exp.yaml:2: not a text file: a character is not allowed in YAML; remove the character",
    ),
    "alias of itself": (
        "!ToyExperiment\nanything: &a\n  - 1\n  - *a",
        "exp.yaml:2: anything.1: an alias refers to a value that contains it; remove the alias",
    ),
    "python object": (
        "!ToyExperiment\nmodel: !!python/object/apply:os.system ['touch /tmp/neondist-pwned']",
        "exp.yaml:2: model: the tag !!python/object/apply:os.system is not allowed; a tag names a neondist class,"
        " such as !MNIST",
    ),
    "python name at the top": (
        "!!python/name:os.system {}",
        "exp.yaml:1: the tag !!python/name:os.system is not allowed; a tag names a neondist class, such as !MNIST",
    ),
    "verbatim tag": (
        "!ToyExperiment\nmodel: !<os.system> {}",
        "exp.yaml:2: model: the tag !<os.system> is not allowed; a tag names a neondist class, such as !MNIST",
    ),
    "core tag on a wrong value": (
        "!ToyExperiment\nepochs: !!int abc",
        "exp.yaml:2: epochs: 'abc' is not a !!int; remove the tag",
    ),
    "a class that is no tag": ("!ToyExperiment\nmodel: !os.system {}", None),
    "nested without end": (
        "!ToyExperiment\nanything: " + "[" * 60 + "]" * 60,
        None,
    ),
    "nested a thousand deep": ("!ToyExperiment\nanything: " + "[" * 100_000, None),
    "huge integer": ("!ToyExperiment\nepochs: " + "9" * 10_000 + "\nmodel: !ToyModel {layers: []}", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_error_messages(name):
    text, message = CASES[name]
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        load(text)
    assert str(caught.value).startswith("exp.yaml:")
    if message is not None:
        assert str(caught.value) == message
    assert len(str(caught.value).splitlines()) == 1
    assert time.process_time() - start < 30  # not a hang
    assert not os.path.exists("/tmp/neondist-pwned")


def test_class_of_constructor_errors_is_kept():
    with pytest.raises(ShapeError):
        load(CASES["constructor's error"][0])


def test_expanding_aliases():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"exp.yaml:\d+: .*expand to more than 10000 values; use fewer aliases"):
        load("!ToyExperiment\n" + "\n".join(lines))
    assert time.process_time() - start < 30  # not a hang


def test_missing_file_suggests_a_similar_name(tmp_path):
    (tmp_path / "mnist.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_experiment(tmp_path / "mnits.yaml")
    assert str(caught.value) == f"{tmp_path}/mnits.yaml: no such file; did you mean 'mnist.yaml'?"
    with pytest.raises(ConfigError, match="no such file; check the path"):
        load_experiment(tmp_path / "nowhere" / "x.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_experiment(tmp_path)


def test_files_that_are_not_text(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"!ToyExperiment\nepochs: \xff")
    with pytest.raises(ConfigError, match=r"x.yaml:2: not UTF-8 text"):
        load_experiment(path)
    path.write_bytes(b"a" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_experiment(path)


def test_dump_names_unsupported_values():
    from toy_registry import ToyExperiment, ToyModel

    with pytest.raises(ConfigError, match=r"^anything: <function .*> cannot be written to a YAML file"):
        dump(ToyExperiment(ToyModel([]), anything=lambda: 1))


BIG = 10**20
BIG_INTEGERS = {
    "stride": f"!ConvLayerDist {{out_channels: 2, kernel_size: 3, stride: {BIG}}}",
    "dilation": f"!ConvLayerDist {{out_channels: 2, kernel_size: 3, dilation: [1, {BIG}]}}",
    "kernel_size": f"!LCNLayerDist {{kernel_size: {BIG + 1}}}",
    "depth": f"!LRNLayerDist {{depth: {BIG}}}",
}


@pytest.mark.parametrize("field", [*BIG_INTEGERS, "ignore_index", "epochs", "seed"])
def test_integers_beyond_64_bits_are_rejected(tmp_path, capsys, field):
    cost = f"!CrossEntropy {{ignore_index: -{BIG}}}" if field == "ignore_index" else "!CrossEntropy {}"
    layers = f"[{BIG_INTEGERS.get(field, '!GlobalAvgPoolingLayerDist {}')}, !FCLayerDist {{out_features: 2}}]"
    more = f"{field}: {BIG}" if field in ("epochs", "seed") else ""
    (tmp_path / "x.yaml").write_text(
        "!FitExperiment\ndataset: !Synthetic {shape: [8, 8, 1], classes: 2, train: 8, test: 4}\nmodel: !ConvnetDist\n"
        f"  layers: {layers}\n  cost: {cost}\n{more}\n"
    )
    assert main(["check", str(tmp_path / "x.yaml")]) == 2
    error = capsys.readouterr().err
    assert f"{field}" in error
    assert "; integers have at most 64 bits" in error


def test_integers_beyond_64_bits_are_rejected_in_python():
    with pytest.raises(nd.ConfigError, match=r"ignore_index: expected an integer or null, got 1.*at most 64 bits"):
        nd.CrossEntropy(ignore_index=BIG)
    nd.CrossEntropy(ignore_index=-(2**63))


def test_layer_names_with_null_characters_are_rejected(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text(
        "!FitExperiment\ndataset: !Synthetic {shape: [8, 8, 1], classes: 2, train: 8, test: 4}\nmodel: !ConvnetDist\n"
        '  layers:\n    - !FCLayerDist {out_features: 2, name: "a\\0b"}\n'
    )
    assert main(["check", str(tmp_path / "x.yaml")]) == 2
    assert "x.yaml:5: model.layers.0.name: 'a\\x00b' contains a null character" in capsys.readouterr().err
