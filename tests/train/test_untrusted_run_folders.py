"""Reports of untrusted run folders: a page without foreign HTML, or one error message."""

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
from neondist.errors import MAX_MESSAGE_LENGTH, DataError
from neondist.train import Best
from neondist.train.html_report import evaluation_page_html, read_epoch_records, run_report_html

HTML_INJECTION = "<script>'\"&"
EPOCH_RECORD = {"epoch": 1, "step": 3, "train_loss": 1.5, "seconds": 1.0}
FUZZ_SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

TEXT_STRATEGY = st.sampled_from(
    [HTML_INJECTION, "\x1b[31m", "\u202e", "\ud800", "]]>", "<!--", "javascript:"]
) | st.text(max_size=5)
VALUE_STRATEGY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT_STRATEGY
    | st.sampled_from([10**400, -(10**308), 1e308, 5e-324]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT_STRATEGY, inner, max_size=3),
    max_leaves=8,
)
NAME_STRATEGY = (
    st.sampled_from(["epoch", "step", "train_loss", "test_loss", "confusion", "seconds", "bytes_sent"]) | TEXT_STRATEGY
)
ARRAY_NAMES = ["sample", "loss", "image", "label", "prediction", "volume"]
ARRAY_STRATEGY = st.sampled_from(["u1", "i8", "f2", "f4", "f8", "c8", "?", "U3", "S3", "M8[s]", ">i4"]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
)


def make_worst_samples(**overrides):
    samples = {"sample": np.array([4]), "loss": np.array([1.0]), "image": np.zeros((1, 4, 4, 1), "u1")}
    return samples | {"label": np.array([1]), "prediction": np.array([2]), "volume": np.array([False])} | overrides


def write_run(folder, records=(EPOCH_RECORD,), samples=None):
    text = "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "worst.npz").unlink(missing_ok=True)
    if samples is not None:
        np.savez(folder / "worst.npz", **samples)


def render_or_reject(folder):
    """Return the report page, or None if the folder is rejected with one message."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            page = run_report_html(folder)
        except DataError as error:
            return None if len(str(error)) <= MAX_MESSAGE_LENGTH else str(error)
    tags = set(re.findall(r"<[/!]?([^\s>]*)", page))
    allowed_tags = (
        "doctype html meta title style h1 h2 p table tr th td figure figcaption svg polyline rect circle path text"
        " img pre div span b wbr"
    )
    assert tags <= set(allowed_tags.split())
    assert "\x1b" not in page
    page.encode()
    return page


@FUZZ_SETTINGS
@example(records=[EPOCH_RECORD | {"train_loss": -(10**400)}, EPOCH_RECORD | {"epoch": 2}])
@given(
    records=st.lists(
        st.dictionaries(NAME_STRATEGY, VALUE_STRATEGY, max_size=4).map(lambda more: EPOCH_RECORD | more),
        min_size=1,
        max_size=3,
    )
)
def test_arbitrary_records_are_rendered_or_rejected(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, records)
    render_or_reject(folder)
    evaluation_page_html(HTML_INJECTION, {HTML_INJECTION: HTML_INJECTION}, records[0])
    try:
        parsed = read_epoch_records(folder / "metrics.jsonl")
    except DataError:
        return
    assert Best("train_loss").find_best_epoch(parsed, []) >= 0


@FUZZ_SETTINGS
@given(st.dictionaries(st.sampled_from(ARRAY_NAMES), ARRAY_STRATEGY, min_size=1, max_size=2))
def test_arbitrary_arrays_are_rendered_or_rejected(tmp_path_factory, overrides):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, samples=make_worst_samples(**overrides))
    render_or_reject(folder)


@pytest.mark.parametrize("depth", [30, 3000, 100_000])
def test_deeply_nested_records_are_rejected(tmp_path, depth):
    write_run(tmp_path, ['{"epoch": 1, "c": ' + "[" * depth + "]" * depth + "}\n"])
    assert render_or_reject(tmp_path) is None


def test_valid_records_are_shown(tmp_path):
    cells = np.arange(16).reshape(1, 4, 4)
    missing = np.full((1, 4, 4), np.nan)
    for maps in ({}, {"label": cells, "prediction": cells}, {"label": cells / 3, "prediction": missing}):
        records = [EPOCH_RECORD | {"test_confusion": [[3, 1], [0, 2]], "test_iou": [0.5, None]}]
        write_run(tmp_path, records, make_worst_samples(**maps))
        page = render_or_reject(tmp_path)
        assert page.count("<img") == (3 if maps else 1)
        assert "<td>1.5</td>" in page
        assert ">0.5<" in page


def test_pickles_are_not_loaded(tmp_path):
    class PickleTrap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    write_run(tmp_path, samples=make_worst_samples(label=np.array([PickleTrap()], object)))
    assert render_or_reject(tmp_path) is None
    (tmp_path / "worst.npz").write_bytes(pickle.dumps(PickleTrap()))
    assert render_or_reject(tmp_path) is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_oversized_archive_is_rejected(tmp_path):
    write_run(tmp_path)
    np.savez_compressed(tmp_path / "worst.npz", **make_worst_samples(image=np.zeros((1, 1 << 14, 1 << 14), "u1")))
    with pytest.raises(DataError, match="unpacks to 268,"):
        run_report_html(tmp_path)


RUN_FILES = ["metrics.jsonl", "worst.npz", "tiles.png", "environment.json", "experiment.yaml", "classes.json"]


@pytest.mark.parametrize("name", RUN_FILES)
def test_links_out_of_the_run_folder_are_rejected(tmp_path, name, capsys):
    run = tmp_path / "run"
    run.mkdir()
    write_run(run, samples=make_worst_samples())
    (run / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text(json.dumps(EPOCH_RECORD) + "\nsecret\n")
    (run / name).symlink_to(tmp_path / "secret")
    assert main(["report", str(run)]) == 2
    assert "is a link that points outside" in capsys.readouterr().err
    assert not (run / "report.html").exists()


ODD_NAMES = ["a\nmodel: x", 'q"uote', "co: lon", "# hash", "!tag {}", "\ttab", "\x85next\u2028line",
             "bell\x07\x1b[31m", "\u202eright", "[red]x", "\udcff", "{brace}",
             "'", "\\", "*", "-", "null", "n" * 200, "\U0001f600"]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.long
def test_init_quotes_unusual_folder_names(tmp_path, name, capsys):
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    folder = tmp_path / name
    for class_name in (f"{name}1", f"{name}2"):
        (folder / class_name).mkdir(parents=True)
        image.new("L", (8, 8)).save(folder / class_name / "x.png")
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
    output = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in output.out + output.err)
