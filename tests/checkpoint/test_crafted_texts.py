"""Crafted texts in a checkpoint with a valid checksum: rejected with one message, or harmless."""

import itertools
import json

import numpy as np
import pytest
from checkpoint_runs import forge_checkpoint, load_run, make_experiment, save_run

import neondist as nd
from neondist.comm import SingleTransport, loopback
from neondist.errors import DataError
from neondist.train import predict
from neondist.train.callbacks.checkpoint import RunProgress

UNUSUAL_VALUES = [
    None,
    True,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    10**400,
    1 << 60,
    "1",
    "",
    [],
    {},
    [[1]],
    {"a": 1},
    [None],
    [{}],
]
UNUSUAL_VALUES += ["\ud800", -0.0, [1e308, 1e308], {"epoch": 1}]
INTEGER_FIELDS = ["epoch", "step", "seen", "samples", "seed"]


def iterate_paths(value, path=()):
    """Yield the path of every item of nested lists and dicts."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from iterate_paths(item, (*path, key))


def replace_item(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replace_item(copy[path[0]], path[1:], new)
    return copy


def craft_texts(text):
    """Yield texts with one unusual value each, texts with one renamed field, and malformed texts."""
    original = json.loads(text)
    for path, new in itertools.product(iterate_paths(original), UNUSUAL_VALUES):
        yield json.dumps(replace_item(original, path, new))
    for path in iterate_paths(original):
        if path and isinstance(path[-1], str):
            yield json.dumps(replace_item(original, path, original)).replace(f'"{path[-1]}"', '"other"', 1)
    yield from ["", "{", "\0", "[" * 100_000, '{"a":' * 100_000, text + "x", "9" * 5000, "NaN"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    import h5py

    path = tmp_path_factory.mktemp("good") / "c.h5"
    save_run(path)
    with h5py.File(path) as file:
        return path, {name: file[name][()].decode() for name in ("position", "images")}


def test_crafted_positions(texts):
    error_types = [_catch_error_type(RunProgress.from_json, text) for text in craft_texts(texts[1]["position"])]
    assert len(error_types) > 300
    assert all(error_type is None or issubclass(error_type, ValueError) for error_type in error_types)
    for name in INTEGER_FIELDS:
        for value in (-1, 0.5, True, None, "1", [], float("nan"), 1 << 60):
            text = _set_field(texts[1]["position"], name, value)
            assert _catch_error_type(RunProgress.from_json, text) is ValueError, (name, value)


def _set_field(text, name, value):
    return json.dumps(json.loads(text) | {name: value})


def _catch_error_type(action, text):
    try:
        action(text)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"epoch": -1}', "NaN", '{"epoch": 1e400}'])
def test_resume_from_a_crafted_position(texts, text):
    path = forge_checkpoint(texts[0], lambda file: _replace_text(file, "position", text))
    with pytest.raises(DataError, match=r"forged\.h5: does not record the progress of its run"):
        load_run(path)


def test_crafted_image_facts(texts, tmp_path):
    from neondist.train.inference.checkpoint_prediction import parse_shape_and_normalisation

    for text in craft_texts(texts[1]["images"]):
        error_type = _catch_error_type(lambda text: parse_shape_and_normalisation(texts[0], {"images": text}), text)
        assert error_type in (None, DataError), text
    with pytest.raises(DataError, match=r"does not record how its images were normalised; give a checkpoint of"):
        parse_shape_and_normalisation(texts[0], {})
    path = forge_checkpoint(
        texts[0], lambda file: _replace_text(file, "images", '{"shape": [1, "a"], "factor": [1], "offset": [0]}')
    )
    np.save(tmp_path / "x.npy", np.ones((1, 7, 6, 2)))
    with pytest.raises(DataError, match="how its images were normalised is invalid"):
        loopback.run(1, lambda world: predict(make_experiment(), path, tmp_path / "x.npy", tmp_path / "y.npy"))


def _replace_text(file, name, text):
    del file[name]
    file[name] = np.bytes_(text.encode())


def test_crafted_scheme_state(texts):
    """`restore_scheme_state` parses the text before it uses any other data."""
    from neondist.io.checkpoint import SCHEME_STATE_TEXT_NAME, CheckpointContents, restore_scheme_state
    from neondist.io.checkpoint.read import CheckpointReader

    original = json.dumps({"of": "owner", "layers": {"conv1": [[[0, 5, "forward", 1, 4]]]}})

    exchanged = {"conv1": [nd.GlobalArray(nd.ProcessGrid.serial(), (5, 2, 2, 1), nd.Window(1), dtype="float64")]}
    for text in craft_texts(original):
        reader = CheckpointReader(CheckpointContents(texts[0], {SCHEME_STATE_TEXT_NAME: text}), None, SingleTransport())
        error_type = _catch_error_type(
            lambda _, reader=reader: restore_scheme_state(reader, exchanged, "owner", SingleTransport()), text
        )
        assert error_type in (None, DataError), text
