"""Schemes as text and in YAML files, and their error messages."""

import pytest
from scheme_runs import SCHEMES

import neondist as nd
from neondist.config import dump, load_experiment
from neondist.errors import ConfigError
from neondist.halo import as_scheme, scheme_text

FILE = """\
!FitExperiment
dataset: !Synthetic {shape: [12, 12, 1], train: 8}
model: !ConvnetDist
  scheme: %s
  layers:
    - !ConvLayerDist {out_channels: 2, kernel_size: 3, scheme: %s}
    - !FCLayerDist {out_features: 10}
"""


@pytest.mark.parametrize("text", SCHEMES)
def test_text_round_trip(text):
    scheme = as_scheme(text)
    parsed = as_scheme(scheme_text(scheme))
    assert type(parsed) is type(scheme)
    assert parsed.arguments() == scheme.arguments()


def test_custom_classes_have_names():
    class MyOwnScheme(nd.schemes.Halo):
        pass

    assert type(as_scheme("my_own_scheme")) is MyOwnScheme


MISTAKES = {
    "towr": "scheme 'towr' is unknown; did you mean 'tower'",
    "tower(fil=zeros)": "tower has no argument 'fil'; did you mean 'fill'",
    "halo(x=1)": "halo has no argument 'x'",
    "tower(fill=mirror)": "fill: expected .*got the text 'mirror'",
    "every(j=0)": "Every: j: expected an integer of at least 1, got 0",
    "every(between=never)": "between: expected 'reuse' or",
    "stale(steps=none)": "steps: expected an integer",
    "quantised(bits=4)": "Quantised: bits: expected 16 or 8, got 4",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_error_messages(text):
    with pytest.raises(ConfigError, match=MISTAKES[text].replace("(", r"\(")):
        as_scheme(text)


def test_yaml_round_trip(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(FILE % ("!Tower {fill: reflect}", "quantised(bits=8)"))
    model = load_experiment(file).model
    assert model.leaves[0].scheme.bits == 8
    assert model.leaves[1].scheme.fill == "reflect"
    (tmp_path / "b.yaml").write_text(dump(load_experiment(file)))
    reloaded = load_experiment(tmp_path / "b.yaml").model
    assert [layer.scheme.arguments() for layer in reloaded.leaves] == [
        layer.scheme.arguments() for layer in model.leaves
    ]


@pytest.mark.parametrize(
    ("model", "layer", "message"),
    [
        ("towr", "halo", r"a.yaml:\d+: model.*scheme 'towr' is unknown; did you mean 'tower'"),
        ("every(j=0)", "halo", r"a.yaml:\d+: model.scheme: scheme 'every\(j=0\)': Every: j: expected"),
        ("halo", "every(j=0)", r"a.yaml:6: model.layers.0.scheme: scheme 'every\(j=0\)': Every: j: expected"),
        ("halo", "!Tower {fill: mirror}", r"a.yaml:6: model.layers.0.scheme.fill: expected .*'replicate'.*mirror"),
        ("halo", "7", r"a.yaml:6: model.layers.0.scheme: expected an object \(!"),
    ],
)
def test_yaml_errors_name_the_line(tmp_path, model, layer, message):
    (tmp_path / "a.yaml").write_text(FILE % (model, layer))
    with pytest.raises(ConfigError, match=message):
        load_experiment(tmp_path / "a.yaml")


def test_check_shows_schemes_other_than_halo(tmp_path, capsys):
    from neondist.cli import main

    for scheme, count in (("halo", 0), ("tower(fill=reflect)", 1)):
        (tmp_path / "a.yaml").write_text(FILE % ("halo", scheme))
        assert main(["check", str(tmp_path / "a.yaml"), "-n", "4"]) == 0
        assert capsys.readouterr().out.count("tower(fill=reflect)") == count
