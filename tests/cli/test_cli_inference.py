"""Commands `evaluate`, `predict` and `run --init-from`, in one process and on ranks."""

import json

import numpy as np
import pytest
from availability import needs_mpirun
from cli_runs import build_command, run_command, run_in_process

EXPERIMENT_FILE = """
!FitExperiment
backend: numpy
dtype: float64
dataset: !Synthetic {shape: [7, 6, 1], classes: 3, train: 12, test: 5}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 2, kernel_size: 3, padding: 1}
    - !FCLayerDist {out_features: 3}
batch_size: 4
"""
EXPERIMENT_AND_CHECKPOINT = "toy.yaml", "--checkpoint", "runs/toy/checkpoint.h5"
INPUT_AND_OUTPUT = "--input", "x.npy", "--output", "y.npy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with an experiment trained in one process."""
    folder = tmp_path_factory.mktemp("apply")
    (folder / "toy.yaml").write_text(EXPERIMENT_FILE)
    code, _, err = run_in_process(folder, "run", "toy.yaml")
    assert code == 0, err
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(9, 7, 6)))
    return folder


def succeed(folder, *words):
    code, out, err = run_command(build_command(*words), folder) if "-n" in words else run_in_process(folder, *words)
    assert code == 0, err
    return out


@needs_mpirun
@pytest.mark.long
def test_evaluate_and_predict_do_not_depend_on_ranks(folder):
    log = json.loads((folder / "runs" / "toy" / "metrics.jsonl").read_text())
    for ranks in ((), ("-n", 2)):
        metrics = json.loads(succeed(folder, "evaluate", *EXPERIMENT_AND_CHECKPOINT, *ranks))
        assert metrics["samples"] == 5
        assert metrics["loss"] == pytest.approx(log["test_loss"], rel=1e-12)
        assert metrics["error"] == log["test_error"]
        out = succeed(
            folder, "predict", *EXPERIMENT_AND_CHECKPOINT, "--input", "x.npy", "--output", f"y{len(ranks)}.npy", *ranks
        )
        assert f"written: y{len(ranks)}.npy, 9 x 3" in out
    np.testing.assert_allclose(np.load(folder / "y2.npy"), np.load(folder / "y0.npy"), rtol=1e-12)


def test_evaluate_on_the_validation_split(folder):
    words = "evaluate", *EXPERIMENT_AND_CHECKPOINT, "--split", "validation"
    options = "--set", "dataset.validation=3", "metrics=[!ConfusionMatrix {}]", "--report", "a.html"
    code, out, err = run_in_process(folder, *words, *options)
    metrics = json.loads(out)  # nothing else
    assert (code, metrics["samples"]) == (0, 3)
    assert err.endswith("written:\n  a.html\n")
    page = (folder / "a.html").read_text()
    assert f"<td class='text'>loss</td><td>{metrics['loss']:.5g}</td>" in page
    assert "<h2>Confusion matrix</h2>" in page
    code, _, err = run_in_process(folder, *words)
    assert (code, "the data set has no validation split; choose from train, test" in err) == (2, True)


def test_predict_classes_without_data_set(folder):
    words = "predict", *EXPERIMENT_AND_CHECKPOINT, "--input", "x.npy", "--output", "c.h5", "--classes"
    assert "written: c.h5, 9" in succeed(folder, *words, "--set", "dataset=!MNIST {path: nowhere}")
    import h5py

    with h5py.File(folder / "c.h5") as file:
        assert file["predictions"].shape == (9,)


def test_predict_names_each_file_of_several_outputs(folder):
    words = "predict", *EXPERIMENT_AND_CHECKPOINT, "--input", "x.npy", "--output", "several.npy", "--raw", "--classes"
    out = succeed(folder, *words)
    assert out.endswith("written: several-raw.npy, 9 x 3\nwritten: several-classes.npy, 9\n")
    assert np.load(folder / "several-raw.npy").shape == (9, 3)
    assert np.load(folder / "several-classes.npy").shape == (9,)


def test_init_from_reports_loaded_arrays(folder):
    words = "run", "toy.yaml", "--init-from", "runs/toy/checkpoint.h5", "--output", "second"
    message = "weights from runs/toy/checkpoint.h5: 3 arrays loaded; not in the file: fc1/bias"
    without_bias = "run", "toy.yaml", "--output", "less", "--set", "model.layers.1.bias=false"
    succeed(folder, *without_bias)
    out = succeed(folder, *words[:3], "less/checkpoint.h5", *words[4:])
    assert message.replace("runs/toy", "less") in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("evaluate", "toy.yaml", "--checkpoint", "none.h5"), "none.h5: no such file"),
        (
            ("predict", "toy.yaml", "--checkpoint", "toy.yaml", *INPUT_AND_OUTPUT),
            "toy.yaml: is not a neondist checkpoint",
        ),
        (("predict", *EXPERIMENT_AND_CHECKPOINT, "--input", "z.npy", "--output", "y.npy"), "z.npy: no such file"),
        (("run", "toy.yaml", "--output", "third", "--init-from", "none.h5"), "none.h5: no such file"),
        (("run", "toy.yaml", "--resume", "--init-from", "x"), "pass only one of resume and init_from"),
        (("evaluate", *EXPERIMENT_AND_CHECKPOINT, "--set", "model.layers.0.out_channels=3"), "does not fit the model"),
    ],
)
def test_errors_are_reported_once(folder, words, message):
    code, _, err = run_in_process(folder, *words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("missing", ["--input", "--labels"])
def test_missing_files_are_reported_before_ranks_are_started(folder, monkeypatch, missing):
    files = {"--input": "x.npy", "--labels": "x.npy", missing: "none.npy"}
    words = [word for pair in files.items() for word in pair]
    monkeypatch.setattr("neondist.launcher.ranks.launch", None)
    code, _, err = run_in_process(folder, "evaluate", *EXPERIMENT_AND_CHECKPOINT, *words, "-n", "2")
    assert (code, err) == (2, "error: none.npy: no such file; check the path\n")
