"""Folders for `neondist init`, and the validation of the files that it writes."""

import json
from functools import cache

import numpy as np
import pytest

import yaml
from neondist.cli import main
from neondist.config import load_experiment
from neondist.config.schema import experiment_schema


class Untagged(yaml.SafeLoader):
    """Loader that drops tags, as editors do before they validate."""


Untagged.add_multi_constructor("!", lambda loader, tag, node: loader.construct_mapping(node, deep=True))


@cache
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    json_schema = json.loads(json.dumps(experiment_schema()))
    jsonschema.Draft7Validator.check_schema(json_schema)
    return jsonschema.Draft7Validator(json_schema)


def schema_errors(text):
    return list(validator().iter_errors(yaml.load(text, Untagged)))


def write_images(folder, count=4, masks=False):
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True)
    for i in range(count):
        cells = np.random.default_rng(i).integers(0, 3 if masks else 255, (70, 50), dtype="u1")
        image.fromarray(cells).save(folder / f"{i}.png")


def lay_out(tmp_path, names):
    """Write images, and masks of 0 and 1 for names that contain 'mask', 'seg', 'gt' or 'label'."""
    image = pytest.importorskip("PIL.Image")
    for name in names:
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_mask = any(word in name.lower() for word in ("mask", "seg", "gt", "label"))
        image.fromarray(np.random.default_rng(len(name)).integers(0, 2 if is_mask else 255, (24, 24), "u1")).save(path)


def run_init_and_check(capsys, folder="mine"):
    assert main(["init", folder]) == 0
    assert main(["check", "mine.yaml"]) == 0
    capsys.readouterr()
    return load_experiment("mine.yaml")


def write_picture(path, shape=(16, 16, 3), top=256):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(np.random.default_rng(0).integers(0, top, shape).astype("u1")).save(path)
