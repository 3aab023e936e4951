"""Texts that somebody has put into a checkpoint, with a right checksum: refused in one message, or harmless."""

import itertools
import json

import numpy as np
import pytest
from checkpoint_toys import experiment, forged, load, save

import neondist as nd
from neondist.comm import SingleTransport, loopback
from neondist.errors import DataError
from neondist.train import predict
from neondist.train.callbacks.checkpoint import Progress

STRANGE = [
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
STRANGE += ["\ud800", -0.0, [1e308, 1e308], {"epoch": 1}]
WHOLE = ["epoch", "step", "seen", "samples", "seed"]


def places(value, path=()):
    """Every place of nested lists and dicts."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def crafted(text):
    """Texts with one strange value each, without one of their fields, and other nonsense."""
    good = json.loads(text)
    for path, new in itertools.product(places(good), STRANGE):
        yield json.dumps(replaced(good, path, new))
    for path in places(good):
        if path and isinstance(path[-1], str):
            yield json.dumps(replaced(good, path, good)).replace(f'"{path[-1]}"', '"other"', 1)
    yield from ["", "{", "\0", "[" * 100_000, '{"a":' * 100_000, text + "x", "9" * 5000, "NaN"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    import h5py

    path = tmp_path_factory.mktemp("good") / "c.h5"
    save(path)
    with h5py.File(path) as file:
        return path, {name: file[name][()].decode() for name in ("position", "images")}


def test_positions(texts):
    outcomes = [_outcome(Progress.from_json, text) for text in crafted(texts[1]["position"])]
    assert len(outcomes) > 300
    assert all(found is None or issubclass(found, ValueError) for found in outcomes)
    for name in WHOLE:
        for value in (-1, 0.5, True, None, "1", [], float("nan"), 1 << 60):
            assert _outcome(Progress.from_json, _with(texts[1]["position"], name, value)) is ValueError, (name, value)


def _with(text, name, value):
    return json.dumps(json.loads(text) | {name: value})


def _outcome(action, text):
    try:
        action(text)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"epoch": -1}', "NaN", '{"epoch": 1e400}'])
def test_resume_from_a_crafted_position(texts, text):
    bad = forged(texts[0], lambda file: _put(file, "position", text))
    with pytest.raises(DataError, match=r"forged\.h5: does not record the progress of its run"):
        load(bad)


def test_what_images_were(texts, tmp_path):
    from neondist.train.inference.network import normalisation

    for text in crafted(texts[1]["images"]):
        found = _outcome(lambda text: normalisation(texts[0], {"images": text}), text)
        assert found in (None, DataError), text
    bad = forged(texts[0], lambda file: _put(file, "images", '{"shape": [1, "a"], "factor": [1], "offset": [0]}'))
    np.save(tmp_path / "x.npy", np.ones((1, 7, 6, 2)))
    with pytest.raises(DataError, match="does not record how its images were normalised"):
        loopback.run(1, lambda world: predict(experiment(), bad, tmp_path / "x.npy", tmp_path / "y.npy"))


def _put(file, name, text):
    del file[name]
    file[name] = np.bytes_(text.encode())


def test_what_border_schemes_remember(texts):
    """`restore_memory` reads the text before it looks at anything else."""
    from neondist.io.checkpoint import REMEMBERED, Facts, restore_memory
    from neondist.io.checkpoint.read import CheckpointReader

    good = json.dumps({"of": "owner", "layers": {"conv1": [[[0, 5, "forward", 1, 4]]]}})

    exchanged = {"conv1": [nd.GlobalArray(nd.ProcessGrid.serial(), (5, 2, 2, 1), nd.Window(1), dtype="float64")]}
    for text in crafted(good):
        opened = CheckpointReader(Facts(texts[0], {REMEMBERED: text}), None, SingleTransport())
        found = _outcome(lambda _, opened=opened: restore_memory(opened, exchanged, "owner", SingleTransport()), text)
        assert found in (None, DataError), text
