"""Runs of other people: whatever their files hold, a report is a page without their HTML, or one message."""

import json
import os
import pickle
import re
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import yaml
from neondist.cli import main
from neondist.errors import LONGEST, DataError
from neondist.train import Best
from neondist.train.html_report import read_records, report, result_page

MARK = "<script>'\"&"
RECORD = {"epoch": 1, "step": 3, "train_loss": 1.5, "seconds": 1.0}
MANY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

TEXTS = st.sampled_from([MARK, "\x1b[31m", "\u202e", "\ud800", "]]>", "<!--", "javascript:"]) | st.text(max_size=5)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXTS
    | st.sampled_from([10**400, -(10**308), 1e308, 5e-324]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["epoch", "step", "train_loss", "test_loss", "confusion", "seconds", "bytes_sent"]) | TEXTS
ARRAYS = st.sampled_from(["u1", "i8", "f2", "f4", "f8", "c8", "?", "U3", "S3", "M8[s]", ">i4"]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
)


def worst(**changed):
    found = {"sample": np.array([4]), "loss": np.array([1.0]), "image": np.zeros((1, 4, 4, 1), "u1")}
    return found | {"label": np.array([1]), "said": np.array([2])} | changed


def write(folder, records=(RECORD,), arrays=None):
    text = "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "worst.npz").unlink(missing_ok=True)
    if arrays is not None:
        np.savez(folder / "worst.npz", **arrays)


def is_page_or_message(folder):
    """Return the page, or None where one message says why there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            page = report(folder)
        except DataError as error:
            return None if len(str(error)) <= LONGEST else str(error)
    tags = set(re.findall(r"<[/!]?([^\s>]*)", page))
    own = (
        "doctype html meta title style h1 h2 p table tr th td figure figcaption svg polyline rect circle path text"
        " img pre div span b wbr"
    )
    assert tags <= set(own.split())
    assert "\x1b" not in page
    page.encode()
    return page


@MANY
@example(records=[RECORD | {"train_loss": -(10**400)}, RECORD | {"epoch": 2}])
@given(
    records=st.lists(st.dictionaries(NAMES, VALUES, max_size=4).map(lambda more: RECORD | more), min_size=1, max_size=3)
)
def test_odd_records(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("run")
    write(folder, records)
    is_page_or_message(folder)
    result_page(MARK, {MARK: MARK}, records[0])
    try:
        found = read_records(folder / "metrics.jsonl")
    except DataError:
        return
    assert Best("train_loss").epoch(found, []) >= 0


@MANY
@given(st.dictionaries(st.sampled_from(["sample", "loss", "image", "label", "said"]), ARRAYS, min_size=1, max_size=2))
def test_odd_arrays(tmp_path_factory, changed):
    folder = tmp_path_factory.mktemp("run")
    write(folder, arrays=worst(**changed))
    is_page_or_message(folder)


@pytest.mark.parametrize("depth", [30, 3000, 100_000])
def test_deep_records(tmp_path, depth):
    write(tmp_path, ['{"epoch": 1, "c": ' + "[" * depth + "]" * depth + "}\n"])
    assert is_page_or_message(tmp_path) is None


def test_the_usual_is_shown(tmp_path):
    maps = np.arange(16).reshape(1, 4, 4)
    for of in ({}, {"label": maps, "said": maps}, {"label": maps / 3, "said": np.full((1, 4, 4), np.nan)}):
        write(tmp_path, [RECORD | {"test_confusion": [[3, 1], [0, 2]], "test_iou": [0.5, None]}], worst(**of))
        page = is_page_or_message(tmp_path)
        assert page.count("<img") == (3 if of else 1)
        assert "<td>1.5</td>" in page
        assert ">0.5<" in page


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    write(tmp_path, arrays=worst(label=np.array([Trap()], object)))
    assert is_page_or_message(tmp_path) is None
    (tmp_path / "worst.npz").write_bytes(pickle.dumps(Trap()))
    assert is_page_or_message(tmp_path) is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_what_unpacks_to_too_much(tmp_path):
    write(tmp_path)
    np.savez_compressed(tmp_path / "worst.npz", **worst(image=np.zeros((1, 1 << 14, 1 << 14), "u1")))
    with pytest.raises(DataError, match="unpacks to 268,"):
        report(tmp_path)


FILES = ["metrics.jsonl", "worst.npz", "tiles.png", "environment.json", "experiment.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_no_link_is_followed_out_of_a_run(tmp_path, name, capsys):
    run = tmp_path / "run"
    run.mkdir()
    write(run, arrays=worst())
    (run / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text(json.dumps(RECORD) + "\nsecret\n")
    (run / name).symlink_to(tmp_path / "secret")
    assert main(["report", str(run)]) == 2
    assert "is a link that points outside" in capsys.readouterr().err
    assert not (run / "report.html").exists()


ODD_NAMES = ["a\nmodel: x", 'q"uote', "co: lon", "# hash", "!tag {}", "\ttab", "\x85next\u2028line",
             "bell\x07\x1b[31m", "\u202eright", "[red]x", "\udcff", "{brace}",
             "'", "\\", "*", "-", "null", "n" * 200, "\U0001f600"]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.long
def test_a_name_is_one_text_of_the_file_of_init(tmp_path, name, capsys):
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    folder = tmp_path / name
    for one in (f"{name}1", f"{name}2"):
        (folder / one).mkdir(parents=True)
        image.new("L", (8, 8)).save(folder / one / "x.png")
    assert main(["init", str(folder), "--to", str(tmp_path / "made.yaml")]) == 0
    text = (tmp_path / "made.yaml").read_text()
    plain = yaml.compose(text, yaml.SafeLoader)
    assert [key.value for key, _ in plain.value] == [
        "dataset",
        "augment",
        "model",
        "batch_size",
        "epochs",
        "metrics",
        "best",
    ]
    assert main(["check", str(tmp_path / "made.yaml")]) == 0
    told = capsys.readouterr()
    assert all(one.isprintable() or one == "\n" for one in told.out + told.err)
