"""Command `bench`: output files and error messages; times are not asserted."""

import importlib.util
import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from availability import needs_mpirun
from cli_runs import EXPERIMENT, build_command, run_command

from neondist.backends.cells import CompiledCells
from neondist.bench import halo, step
from neondist.bench.tables import halo_table
from neondist.cli import main
from neondist.comm import SingleTransport, loopback


@pytest.fixture
def file(tmp_path):
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    return tmp_path / "e.yaml"


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch):
    for module in halo, step:
        monkeypatch.setattr(module, "ROUND_SECONDS", 1e-3)


@needs_mpirun
@pytest.mark.long
def test_step_on_ranks(file, tmp_path):
    options = ["--roofline", "--reading", "--json", "report.json", "--trace", "trace.json"]
    command = build_command("bench", "step", "e.yaml", "-n", 2, "--steps", 3, *options)
    code, out, err = run_command(command, tmp_path)
    assert (code, re.sub(r"^step \d+ of \d+, .* left  \n", "", err, flags=re.MULTILINE)) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ranks"], report["batch_size"], report["dtype"], report["backend"]) == (2, 8, "float64", "numpy")
    assert report["steps_per_second"] == pytest.approx(1 / report["seconds_per_step"])
    assert len(report["peak_bytes"]) == 2
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert list(layers)[:3] == ["conv1", "max_pooling1", "fc1"]
    # a halo row of 10 cells, 1 channel, 8 samples, float64, both ways; no gradient of the image itself
    assert layers["conv1"]["bytes_sent"] == 2 * 10 * 8 * 8
    assert layers["fc1"]["wait"] > 0
    assert (layers["conv1"]["flops"], layers["fc1"]["flops"]) == (2 * 2 * 8 * 120 * 9 * 2, 3 * 2 * 8 * 60 * 3)
    assert layers["max_pooling1"]["bytes_moved"] == 8 * 8 * (3 * 240 + 2 * 60)
    assert layers["max_pooling1"]["limit"] == "memory"
    assert report["machine"]["flops_per_second"] > 0
    assert report["reading"]["seconds_per_step"] > 0
    assert len(report["reading"]["ratios"]) == 5
    for text in (
        "conv1",
        "copies into and out of message buffers",
        "excluding what the process used",
        "share of the limit achieved",
    ):
        assert text in out
    assert " times as long as with batches in memory (" in out
    assert out.endswith("written:\n  report.json\n  trace.json\n")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["pid"] for e in events if e["name"] == "step"] == [0, 0, 0, 1, 1, 1]


@pytest.mark.long
def test_step_against_torch(file, tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("NEONDIST_TESTS_HIDE", "matplotlib")  # for the process that trains with PyTorch
    words = ["--steps", "1", "--against", "torch", "--json", str(tmp_path / "report.json")]
    assert main(["bench", "step", str(file), *words]) == 0
    baseline = json.loads((tmp_path / "report.json").read_text())["against"]
    assert baseline["agree"]
    assert baseline["gradients_worst"] < 1e-10
    assert len(baseline["ratios"]) >= 1
    assert baseline["seconds_per_step"] > 0
    assert baseline["peak_bytes"] >= 0
    assert "they agree" in capsys.readouterr().out


def test_step_names_the_gradient_that_differs(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))

    class FakeBaseline:
        def __init__(self, model, state, trained, x, targets, threads):
            assert x.shape == (8, 12, 10, 1)
            assert targets.shape == (8,)
            assert set(trained) <= set(state)

        def compare_gradients(self, gradients):
            return 9.0, 0.5, "conv1/weights"

        def time_steps(self, steps):
            return [1.0] * steps, 7, 8

        def close(self):
            pass

    monkeypatch.setattr(step, "TorchBaseline", FakeBaseline)
    assert main(["bench", "step", str(file), "--against", "torch", "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "5.0e-01 (conv1/weights): they DO NOT AGREE" in out
    assert "memory 7 B" in out


def test_errors(file, tmp_path, monkeypatch, capsys):
    assert main(["bench", "halo"]) == 2
    assert "a single rank has no neighbours; give -n 2 or more" in capsys.readouterr().err
    assert main(["bench", "step", str(file), "--set", "model.layers.0=!LCNLayerDist {kernel_size: 3}"]) == 0
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "step", str(file), "--against", "torch"]) == 2
    assert "pip install 'neondist[torch]'" in capsys.readouterr().err


def test_unwritable_json_file(file, tmp_path, capsys):
    assert main(["bench", "step", str(file), "--steps", "1", "--json", str(tmp_path)]) == 2
    assert "cannot be written (Is a directory)" in capsys.readouterr().err


def test_halo_sizes(monkeypatch, capsys):
    from rich.console import Console

    monkeypatch.setattr(halo, "ROUNDS", 2)
    reports = loopback.run(2, lambda transport: halo.bench_halo(transport, (4, 6)))
    assert reports[0]["sizes"] == reports[1]["sizes"]
    assert [size["shape"] for size in reports[0]["sizes"]] == [[8, 4, 4, 64], [8, 6, 6, 64]]
    assert [size["bytes_sent"] for size in reports[0]["sizes"]] == [8 * n * 64 * 4 for n in (4, 6)]
    Console(width=200).print(halo_table(reports[0]))
    out = capsys.readouterr().out
    assert "8×6×6×64" in out
    assert "with tile: the same plus copying the tile into place; scatter add" in " ".join(out.split())


def test_exchange_of_a_tile_in_place_copies_no_tile(monkeypatch):
    calls, copies = {}, []
    monkeypatch.setattr(halo, "_time_rounds", lambda _, by_name: calls.update(by_name) or {n: [1.0] for n in by_name})
    halo.bench_halo(SingleTransport(), (4,))
    monkeypatch.setattr(CompiledCells, "copy", lambda self, source, target: copies.append(source.shape))
    for name, number in (("exchange", 0), ("with_tile", 1)):
        copies.clear()
        calls[name]()
        assert len(copies) == number


def test_sleeping_barrier_on_a_single_rank():
    from neondist.bench.sleeping_barrier import sleeping_barrier

    sleeping_barrier(SingleTransport())


@needs_mpirun
@pytest.mark.long
def test_scaling(file, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["e.yaml", "--ranks", "1,2", "--weak", "--steps", "1", "--rounds", "1", "--set", "batch_size=4"]
    assert main(["bench", "scaling", *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs/e-scaling/scaling.jsonl").read_text().splitlines()]
    assert [(row["ranks"], row["batch_size"]) for row in rows] == [(1, 4), (2, 8)]
    assert "| 2 | 1 × 2 × 1 | 8 |" in capfd.readouterr().out


def test_scaling_errors(file, monkeypatch, capsys):
    assert main(["bench", "scaling", str(file), "-n", "2"]) == 2
    assert "with --ranks instead of -n" in capsys.readouterr().err
    assert main(["bench", "scaling", str(file), "--ranks", "1,2", "--set", "dist_flag=false"]) == 2
    with pytest.raises(SystemExit):
        main(["bench", "scaling", str(file), "--ranks", "1,x"])


DATASET_MODULE = """\
import neondist as nd

class InspectedData(nd.Synthetic):
    def __init__(self):
        super().__init__((12, 10, 1), classes=3, train=24, test=12)
        del self.sample_shape, self.classes

    def check(self):
        self.sample_shape, self.classes = (12, 10, 1), 3
"""


@pytest.mark.parametrize("dataset", ["!HDF5Dataset {path: data.h5}", "!InspectedData {}"])
@pytest.mark.long
def test_predict_with_shapes_read_from_data(file, tmp_path, capsys, monkeypatch, dataset):
    import h5py

    monkeypatch.setattr("neondist.bench.model.predict.COMPARISON_SECONDS", 1e-3)
    monkeypatch.setattr("neondist.bench.model.predict.PREDICTION_SECONDS", 1e-3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_data.py").write_text(DATASET_MODULE)
    with h5py.File("data.h5", "w") as data:
        for split in "train", "test":
            data[f"{split}/images"], data[f"{split}/labels"] = np.zeros((8, 12, 10, 1)), np.arange(8) % 3
    machine = Path(__file__).parents[2] / "yaml/machines/cpu_cluster.yaml"
    words = ["--machine", str(machine), "--ranks", "1,2", "--import", "own_data.py", "--set", f"dataset={dataset}"]
    assert main(["bench", "model", "predict", str(file), *words, "--measure", "none"]) == 0, capsys.readouterr().err


@pytest.mark.long
def test_predict(file, tmp_path, capsys, monkeypatch):
    for name in "COMPARISON_SECONDS", "PREDICTION_SECONDS":
        monkeypatch.setattr(f"neondist.bench.model.predict.{name}", 1e-3)
    machine = Path(__file__).parents[2] / "yaml/machines/cpu_cluster.yaml"
    words = [str(file), "--machine", str(machine), "--ranks", "1..4", "--set", "grid.replicas=1"]
    assert main(["bench", "model", "predict", *words, "--output", str(tmp_path / "predicted")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "predicted/model.jsonl").read_text().splitlines()]
    assert [row["ranks"] for row in rows] == [1, 2, 4]
    assert rows[1]["bytes_sent"] > 0
    assert [choice["layer"] for choice in rows[1]["schemes"]] == ["conv1", "max_pooling1"]
    output = capsys.readouterr().out
    assert "the step is fastest on" in output
    assert "the prediction error is unknown" in output
    assert (tmp_path / "predicted/model.md").read_text().count("| 4 |") == 2
    assert main(["bench", "model", "predict", *words, "-n", "2"]) == 2
    assert "with --ranks, not -n" in capsys.readouterr().err
    measured = ["--measured", "2=0.5,8=0.4", "--output", str(tmp_path / "calibrated")]
    assert main(["bench", "model", "predict", *words, *measured]) == 0
    rows = [json.loads(line) for line in (tmp_path / "calibrated/model.jsonl").read_text().splitlines()]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8]
    assert "calibrated by --measured: compute_factor" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["bench", "model", "predict", *words, "--measured", "2=fast"])
    assert "'2=fast' is not RANKS=SECONDS" in capsys.readouterr().err
