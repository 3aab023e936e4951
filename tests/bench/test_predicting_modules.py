"""Predictions for PyTorch modules: dry runs record the messages of a rank, and profile its time."""

import json
import sys
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.backends.allocator import release_cached_memory  # noqa: E402
from neondist.bench import memory  # noqa: E402
from neondist.bench.model import predict, rank_profile  # noqa: E402
from neondist.bench.model.dry_run import DryRunMessageLog, DryRunTransport  # noqa: E402
from neondist.bench.model.table import prediction_table, write_report  # noqa: E402
from neondist.bench.step import bench_step  # noqa: E402
from neondist.cli import main  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.geometry import GridShape  # noqa: E402
from neondist.system import machine  # noqa: E402

SHAPE, BATCH = (13, 11, 2), 4


class Net(nn.Module):
    """Convolutions, norms over all ranks and over tiles, and a mean along one axis of the grid."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.GroupNorm(2, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y = self.second(self.first(x))
        return self.last((y - y.mean(2, keepdim=True)).square().mean((2, 3)))


def make_experiment(**grid):
    data = nd.Synthetic(list(SHAPE), classes=3, train=8, test=2)
    return nd.FitExperiment(data, ndt.TorchModel(Net, dtype="float64"), batch_size=BATCH, grid=grid)


@pytest.fixture(autouse=True)
def captures():
    with share_captures():
        yield


@pytest.mark.parametrize("shape", [GridShape(1, 2, 3), GridShape(2, 3, 1), GridShape(2, 2, 2), GridShape()])
@pytest.mark.long
def test_dry_run_records_the_messages_of_a_module(shape):
    def train_on_ranks(transport):
        experiment = make_experiment()
        with nd.ProcessGrid(transport, shape.replicas, shape.rows, shape.cols) as grid:
            experiment.model.build(SHAPE, BATCH, grid)
            experiment.model.train_batch(*experiment.model.timing_batch(experiment.dataset))
            return experiment.model.ledger(), experiment.model.compiled.steps.bytes(grid.rank)

    tile = rank_profile.fullest_tile(shape, SHAPE[:-1])
    ledger, planned = loopback.run(shape.size, train_on_ranks)[tile]
    experiment = make_experiment()
    profile = rank_profile.profile_busiest_rank(experiment, shape, 1e-3)
    sent_bytes = sum(n * key.nbytes for key, n in ledger.items() if key.kind != "sum")
    assert sum(count for _, count in profile.message_log.exchange_sizes) == sent_bytes == planned
    assert (sent_bytes > 0) == (shape.size > 1)
    summed = Counter[int]()
    for key, n in ledger.items():
        if key.kind == "sum":
            summed[key.nbytes] += n
    recorded = Counter(nbytes for group, nbytes in profile.message_log.allreduce_sizes if group > 1)
    assert summed <= recorded
    assert all(nbytes <= 16 for nbytes in recorded - summed)  # control messages before a pass
    if shape == GridShape(2, 2, 2):
        assert {group for group, _ in profile.message_log.allreduce_sizes} == {8, 4, 2}
    assert profile.seconds > 0
    assert profile.held_bytes == experiment.model.compiled.memory(tile)
    assert profile.memory_traffic > profile.held_bytes / 2
    assert (profile.seconds_per_cell, profile.recomputed_fraction) == ({}, 0)


def test_profiling_does_not_change_weights():
    experiment, initial = (
        make_experiment(),
        torch.nn.utils.parameters_to_vector(make_experiment().model.module.parameters()),
    )
    rank_profile.profile_busiest_rank(experiment, GridShape(1, 2, 2), 1e-3)
    assert torch.equal(torch.nn.utils.parameters_to_vector(experiment.model.module.parameters()), initial)


@pytest.mark.long
def test_measured_peak_memory_contains_the_planned_arrays():
    data = nd.Synthetic([400, 320, 2], classes=3, train=2, test=1)
    layers = nn.Conv2d(2, 64, 1), nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)
    experiment = nd.FitExperiment(data, ndt.TorchModel(lambda: nn.Sequential(*layers)), batch_size=2)
    release_cached_memory()  # of earlier tests, which would be reused
    memory.reset_peak_memory()
    before = memory.resident_bytes()
    added = rank_profile.measure_peak_memory(experiment, GridShape(1, 2, 1)) - before
    planned = experiment.model.compiled.memory(0)
    assert added > 0.9 * planned > 50e6  # also modules of PyTorch imported on first use, and temporary buffers


def test_groups_of_a_dry_run():
    group = DryRunTransport(7, 12, DryRunMessageLog()).split_by(lambda rank: rank % 3)
    assert (group.rank, group.size) == (2, 4)


@pytest.mark.long
def test_predicted_steps(monkeypatch, tmp_path):
    monkeypatch.setattr(predict, "PREDICTION_SECONDS", 1e-3)
    monkeypatch.setattr(predict, "COMPARISON_SECONDS", 1e-3)
    link = machine.Link(1e-6, 1e9)
    rows = predict.predict(make_experiment, [1, 2, 4], machine.Machine(2, link, link))
    assert [row["ranks"] for row in rows] == [1, 2, 4]
    for row in rows:
        distributed = row["ranks"] > 1
        assert row["seconds_per_step"] >= row["compute_seconds"] > 0
        assert (row["sum_seconds"] > 0) == (row["bytes_summed"] > 0) == distributed
        assert row["bytes_held"] > 0
        assert row["schemes"] == []
        assert row["seconds_with_schemes"] == row["seconds_per_step"]
    assert "| 4 | " in prediction_table(rows)
    _, page, *_ = write_report(tmp_path, rows, "a title")
    assert "best schemes" not in page.read_text()


def test_grids_fit_the_smallest_output():
    assert predict.candidate_grids(6, make_experiment(cols=1)) == [GridShape(1, 6, 1)]
    assert set(predict.candidate_grids(4, make_experiment(replicas=1))) == {
        GridShape(1, 2, 2),
        GridShape(1, 4, 1),
        GridShape(1, 1, 4),
    }
    assert set(predict.candidate_grids(6, make_experiment(replicas=1))) == {
        GridShape(1, 3, 2)
    }  # the second convolution has 6 x 5 cells


def test_times_of_modules():
    def measure_on_ranks(transport):
        experiment = make_experiment()
        return bench_step(experiment, nd.ProcessGrid(transport), steps=2), experiment.model.compiled

    report, plan = loopback.run(2, measure_on_ranks)[0]
    rows = {row["name"]: row for row in report["layers"]}
    assert list(plan.class_by_benchmark_row) == [name for name in rows if name in plan.class_by_benchmark_row]
    for name in ("first.0", "first.1", "second.0", "last"):
        assert rows[name]["forward"] > 0
        assert rows[name]["backward"] > 0
    costs = plan.costs()
    assert rows["first.0"]["bytes_sent"] == costs["first.0"].total_sent_bytes > 0
    assert sum(row["bytes_sent"] for row in rows.values()) == plan.all_costs.total.total_sent_bytes
    assert rows["sum of gradients"]["wait"] > 0
    assert report["seconds_per_step"] > 0


NETS = """
from torch import nn
def build():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(70, 2))
"""
EXPERIMENT_FILE = """
!FitExperiment
dataset: !Synthetic {shape: [9, 7, 1], classes: 2, train: 4, test: 2}
model: !TorchModel {factory: nets:build}
batch_size: 2
"""


@pytest.mark.long
def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(predict, "PREDICTION_SECONDS", 1e-3)
    monkeypatch.setattr(predict, "COMPARISON_SECONDS", 1e-3)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "one.yaml").write_text(EXPERIMENT_FILE)
    machine.write_machine(
        tmp_path / "machine.yaml", machine.Machine(2, machine.Link(1e-6, 1e9), machine.Link(1e-6, 1e9)), ""
    )
    words = ["one.yaml", "--import", "nets.py"]
    assert main(["bench", "model", "predict", *words, "--ranks", "1..4", "--measure", "none", "--output", "out"]) == 0
    assert "the step is fastest on" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "model.jsonl").read_text().splitlines()]
    assert [row["ranks"] for row in rows] == [1, 2, 4]
    assert np.all([row["seconds_per_step"] > 0 for row in rows])
    assert main(["bench", "step", *words, "--steps", "1", "--json", "step.json"]) == 0
    assert json.loads((tmp_path / "step.json").read_text())["backend"] == "torch"
    assert main(["bench", "seams", *words]) == 2
    assert "bench: applies to neondist layers, which TorchModel build does not have" in capsys.readouterr().err
    sys.modules.pop("nets")
