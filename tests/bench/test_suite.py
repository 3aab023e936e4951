"""Benchmark suite: networks, derived figures, and tables; times are not asserted."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from bench_reports import make_report

from neondist.bench import suite
from neondist.bench.networks import NETWORK_GROUPS, NETWORKS
from neondist.bench.suite import bench_suite, geometric_means
from neondist.bench.suite_report import draw_suite, suite_markdown, suite_table
from neondist.bench.tables import share_text
from neondist.cli import main
from neondist.cli.bench import suite as command
from neondist.config import dump, load_experiment
from neondist.errors import ConfigError, LaunchError
from neondist.models import ModelStep
from neondist.terminal.progress_line import SilentProgress

SMALL_SHAPES = {
    "unet": (8, 12, 3),
    "vol": (6, 5, 7, 4),
    "unet3d": (8, 4, 8, 1),
    "lcn": (20, 16, 3),
    "mnist": (28, 28, 1),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.long
def test_networks_match_pytorch(name, tmp_path):
    pytest.importorskip("torch")
    from neondist.bench.torch_twin import TorchTwin

    shape = SMALL_SHAPES.get(name, (20, 24, NETWORKS[name].sample_shape[-1]))
    entry = NETWORKS[name]._replace(batch_size=3, sample_shape=shape)
    experiment = load_experiment("network.yaml", ["dtype=float64", "dist_flag=false"], text=dump(entry.experiment()))
    model = experiment.model
    model.build(shape, 3)
    assert experiment.dataset.target_shape == model.output_shape[:-1]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *shape))
    targets = rng.integers(entry.classes, size=(3, *model.output_shape[:-1]))
    twin = TorchTwin(entry.model(), model.state(), list(model.gradients()), x, targets)
    loss, gradients = ModelStep(model).compute_gradients(x, targets, 3)[0], model.gradients()
    np.savez(tmp_path / "ours.npz", **(model.state() | gradients))
    reference, worst, worst_name = twin.compare_gradients(str(tmp_path / "ours.npz"))
    assert loss == pytest.approx(reference, rel=1e-10)
    assert worst < 1e-8, worst_name


TURN_SECONDS = {"ranks": [2.0, 3.0, 4.0], "one": [4.0, 4.0, 4.0], "eager": [9.0, 9.0, 9.0], "warm": [4.0, 4.0, 2.0]}


class FakeMeasurements:
    """Fixed times of all variants."""

    def __init__(self):
        self.turns = []

    def __call__(self, network, variant, first):
        if variant == "compile":
            raise ConfigError("no compiler")
        turn = self.turns.count((network, variant))
        self.turns.append((network, variant))
        assert first == (turn == 0)
        layer = {"forward": 1.0, "backward": 0.0, "exchange": 0.0, "wait": 0.0, "flops": 8, "flops_per_second": 8e9}
        layers = [{"name": "conv1", **layer, "bytes_moved": 4, "limit": "GEMM", "share_of_limit": 0.5}]
        result = {"seconds": TURN_SECONDS[variant][turn], "peak_bytes": 600 if variant == "eager" else 300}
        if first and variant == "ranks":
            result |= {"layers": layers, "machine": {"flops_per_second": 16e9, "bytes_per_second": 1e9}}
            result |= {"batch_size": 2, "sample_shape": [4, 5, 1]}
        return result


def test_rounds_measure_every_variant():
    measure, progress, activities = FakeMeasurements(), SilentProgress(), []
    progress.begin_part = lambda activity, seconds_left: activities.append(activity)
    (row,) = bench_suite(["a"], [*TURN_SECONDS, "compile"], measure, 3, progress, Path("missing"))
    assert measure.turns == [("a", variant) for _ in range(3) for variant in TURN_SECONDS]
    assert activities[4:6] == ["a: compile, round 1 of 3", "a: ranks, round 2 of 3"]
    assert progress.done_parts == 3 * (len(TURN_SECONDS) + 1)
    assert (row["best"], row["memory"], row["why"]) == ("warm", 0.5, {"compile": "no compiler"})
    assert row["ratios"]["ranks"] == {"ratio": 0.75, "all": [0.5, 0.75, 2.0]}
    assert row["ratios"]["one"]["ratio"] == 1
    assert row["layers"][0]["name"] == "conv1"
    assert geometric_means([row], {"a": ["a"], "both": ["a", "b"]}) == {"a": {"ranks": 0.75, "one": 1, "memory": 0.5}}


def make_suite_report(variants, networks=("a", "b")):
    rows = list(bench_suite(networks, variants, FakeMeasurements(), 3, SilentProgress(), Path("missing")))
    report = make_report(rows, variants, 3, geometric_means(rows, {"all": list(networks)}))
    return report | {"notes": ["a note"], "compared": "warm" in variants}


@pytest.mark.parametrize("variants", [[*TURN_SECONDS, "compile"], ["ranks", "one"]])
@pytest.mark.long
def test_tables_and_picture(variants, tmp_path):
    from rich.console import Console

    report = make_suite_report(variants)
    page = suite_markdown(report)
    if "warm" in variants:
        assert "| a | 2×4×5×1 | 3 s | 4 s | 9 s | 4 s* | - | 0.75 (0.50 to 2.00) | 1.00 (1.00 to 2.00) |" in page
        assert "* geometric mean, all: 2 × 1 ÷ best = 0.75, 1 × 2 ÷ best = 1.00, memory ÷ eager = 0.50" in page
        assert "* b, compile: no compiler" in page
    else:
        assert "| a | 2×4×5×1 | 3 s | 4 s | 300 B |" in page
    assert "| conv1 | 1 s | - | - | - | 8 | GEMM | 50% |" in page
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(suite_table(report))
    assert "a note" in console.export_text()
    pytest.importorskip("matplotlib")
    draw_suite(tmp_path / "s.png", report)
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


EXPERIMENT = """\
!FitExperiment
dataset: !Synthetic {shape: [8, 6, 1], classes: 2, train: 4, test: 2}
model: !ConvnetDist
  layers: [!ConvLayerDist {out_channels: 2, kernel_size: 1}, !GlobalAvgPoolingLayerDist {}]
  cost: !CrossEntropy {}
batch_size: 4
epochs: 1
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT)
    return tmp_path / "tiny.yaml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--networks mnits", "--networks mnits: unknown; expected plain, vgg, mnist, "),
        ("--networks ,", "--networks: no network is given; choose from plain"),
        ("-n 1000 --networks mnist", "-n 1000: this machine has "),
        ("--networks nowhere.yaml", "nowhere.yaml: no such file"),
        ("--networks mnist,mnist.yaml", "two networks are named mnist"),
        (
            "--networks mnist --json nowhere/made.json",
            "made.json: its folder does not exist; create it, or choose another",
        ),
        ("--networks mnist --plot .", "is a folder; give a file"),
    ],
)
def test_errors(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "suite", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_neondist_alone(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_module_spec", lambda name: None if name == "torch" else name)
    monkeypatch.setattr(command.threads, "count_cores", lambda process=0: 1)
    words = ["--networks", str(file), "--rounds", "1", "--steps", "1", "--json", str(tmp_path / "suite.json")]
    assert main(["bench", "suite", *words]) == 0
    report = json.loads((tmp_path / "suite.json").read_text())
    assert (report["variants"], report["compared"], report["ranks"]) == (["one"], False, 1)
    assert report["networks"][0]["variants"]["one"]["seconds"] > 0
    assert "pip install 'neondist[torch]'" in capsys.readouterr().out


@pytest.mark.long
def test_against_pytorch(file, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setenv("NEONDIST_TESTS_HIDE", "")
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    monkeypatch.setattr(command, "run_step_bench", lambda *_: {"seconds_per_step": 1.0, "process_bytes": [7]})
    monkeypatch.delitem(suite.TORCH_VARIANTS, "eager")  # differs from "warm" in its settings alone
    page = tmp_path / "suite.md"
    assert main(["bench", "suite", "--networks", str(file), "--rounds", "1", "--markdown", str(page)]) == 0
    assert "÷ best" in page.read_text()
    output = capsys.readouterr()
    assert "torch.compile was not timed: it needs a C++ compiler" in output.out
    assert re.match(
        r"turn 0 of [23], now checking the networks, 0 s so far, at least 1 s left\s+"
        r"turn 0 of [23], now tiny: \w+, round 1 of 1, 0 s so far, at least \d+ s left",
        output.err,
    )


def test_failed_job_is_reported(file, monkeypatch, capsys):
    def fail(*_):
        raise LaunchError("ended with exit code 1")

    monkeypatch.setattr(command, "find_module_spec", lambda name: None if name == "torch" else name)
    monkeypatch.setattr(command, "run_step_bench", fail)
    assert main(["bench", "suite", "--networks", str(file), "--rounds", "2"]) == 1
    assert "one: ended with exit code 1" in capsys.readouterr().out


def test_names_of_networks():
    assert tuple(command.NETWORK_NAMES_HELP.split(", ")) == tuple(NETWORKS) == sum(NETWORK_GROUPS.values(), ())
    assert len(NETWORK_GROUPS["main"]) == 6


@pytest.mark.parametrize(
    ("share", "text"), [(None, ""), (0.714, "71%"), (1.43, "143%"), (3.0, "300%"), (1298.0, "-")], ids=str
)
def test_shares_far_beyond_the_limit_are_hidden(share, text):
    assert share_text(share) == text
