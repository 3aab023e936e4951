"""A rank alone of a PyTorch module would send what ranks do send, and takes the time of one of them."""

import json
import sys
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402
from torch_runs import captured_once  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.bench.model import predict, rank_profile  # noqa: E402
from neondist.bench.model.dry_run import DryRunTransport, Notes  # noqa: E402
from neondist.bench.model.table import prediction_table, write  # noqa: E402
from neondist.bench.step import bench_step  # noqa: E402
from neondist.cli import main  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.geometry import GridShape  # noqa: E402
from neondist.system import machine  # noqa: E402

SHAPE, BATCH = (13, 11, 2), 4


class Net(nn.Module):
    """Windows, norms over all ranks and over tiles, and a mean along one axis of the grid alone."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.GroupNorm(2, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y = self.second(self.first(x))
        return self.last((y - y.mean(2, keepdim=True)).square().mean((2, 3)))


def experiment(**grid):
    data = nd.Synthetic(list(SHAPE), classes=3, train=8, test=2)
    return nd.FitExperiment(data, ndt.TorchModel(Net, dtype="float64"), batch_size=BATCH, grid=grid)


@pytest.fixture(autouse=True)
def once():
    with captured_once():
        yield


@pytest.mark.parametrize("shape", [GridShape(1, 2, 3), GridShape(2, 3, 1), GridShape(2, 2, 2), GridShape()])
@pytest.mark.long
def test_a_rank_alone_notes_what_a_rank_among_others_sends(shape):
    def on_ranks(transport):
        made = experiment()
        with nd.ProcessGrid(transport, shape.replicas, shape.rows, shape.cols) as grid:
            made.model.build(SHAPE, BATCH, grid)
            made.model.train_batch(*made.model.trial_batch(made.dataset))
            return made.model.ledger(), made.model.compiled.steps.bytes(grid.rank)

    tile = rank_profile.fullest(shape, SHAPE[:-1])
    ledger, planned = loopback.run(shape.size, on_ranks)[tile]
    made = experiment()
    found = rank_profile.profile_rank(made, shape, 1e-3)
    sent = sum(n * one.nbytes for one, n in ledger.items() if one.kind != "sum")
    assert sum(count for _, count in found.notes.exchanges) == sent == planned
    assert (sent > 0) == (shape.size > 1)
    summed = Counter[int]()
    for one, n in ledger.items():
        if one.kind == "sum":
            summed[one.nbytes] += n
    noted = Counter(nbytes for group, nbytes in found.notes.sums if group > 1)
    assert summed <= noted
    assert all(nbytes <= 16 for nbytes in noted - summed)  # what ranks tell each other before a pass
    if shape == GridShape(2, 2, 2):
        assert {group for group, _ in found.notes.sums} == {8, 4, 2}
    assert found.seconds > 0
    assert found.held == made.model.compiled.memory(tile)
    assert found.moved > found.held / 2
    assert (found.cell_seconds, found.recomputed) == ({}, 0)


def test_weights_stay_as_they_are():
    made, first = experiment(), torch.nn.utils.parameters_to_vector(experiment().model.module.parameters())
    rank_profile.profile_rank(made, GridShape(1, 2, 2), 1e-3)
    assert torch.equal(torch.nn.utils.parameters_to_vector(made.model.module.parameters()), first)


def test_a_group_of_a_rank_alone_has_those_of_its_colour():
    group = DryRunTransport(7, 12, Notes()).split_by(lambda rank: rank % 3)
    assert (group.rank, group.size) == (2, 4)


@pytest.mark.long
def test_steps_are_predicted(monkeypatch, tmp_path):
    monkeypatch.setattr(predict, "LONG", 1e-3)
    monkeypatch.setattr(predict, "QUICK", 1e-3)
    link = machine.Link(1e-6, 1e9)
    rows = predict.predict(experiment, [1, 2, 4], machine.Machine(2, link, link))
    assert [row["ranks"] for row in rows] == [1, 2, 4]
    for row in rows:
        many = row["ranks"] > 1
        assert row["seconds_per_step"] >= row["compute_seconds"] > 0
        assert (row["sum_seconds"] > 0) == (row["bytes_summed"] > 0) == many
        assert row["bytes_held"] > 0
        assert row["schemes"] == []
        assert row["seconds_with_schemes"] == row["seconds_per_step"]
    assert "| 4 | " in prediction_table(rows)
    _, page, *_ = write(tmp_path, rows, "a title")
    assert "best schemes" not in page.read_text()


def test_grids_to_try_are_not_thinner_than_what_is_cut():
    assert predict.grids(6, experiment(cols=1)) == [GridShape(1, 6, 1)]
    assert set(predict.grids(4, experiment(replicas=1))) == {GridShape(1, 2, 2), GridShape(1, 4, 1), GridShape(1, 1, 4)}
    assert set(predict.grids(6, experiment(replicas=1))) == {GridShape(1, 3, 2)}  # the second gives 6 x 5 cells


def test_where_the_time_of_a_module_goes():
    def on_ranks(transport):
        made = experiment()
        return bench_step(made, nd.ProcessGrid(transport), steps=2), made.model.compiled

    made, plan = loopback.run(2, on_ranks)[0]
    rows = {row["name"]: row for row in made["layers"]}
    assert list(plan.rows) == [name for name in rows if name in plan.rows]
    for name in ("first.0", "first.1", "second.0", "last"):
        assert rows[name]["forward"] > 0
        assert rows[name]["backward"] > 0
    costs = plan.costs()
    assert rows["first.0"]["bytes_sent"] == costs["first.0"].sent_all > 0
    assert sum(row["bytes_sent"] for row in rows.values()) == plan.all_costs.total.sent_all
    assert rows["sum of gradients"]["wait"] > 0
    assert made["seconds_per_step"] > 0


NETS = """
from torch import nn
def build():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(70, 2))
"""
FILE = """
!FitExperiment
dataset: !Synthetic {shape: [9, 7, 1], classes: 2, train: 4, test: 2}
model: !TorchModel {factory: nets:build}
batch_size: 2
"""


@pytest.mark.long
def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(predict, "LONG", 1e-3)
    monkeypatch.setattr(predict, "QUICK", 1e-3)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "one.yaml").write_text(FILE)
    machine.write(tmp_path / "machine.yaml", machine.Machine(2, machine.Link(1e-6, 1e9), machine.Link(1e-6, 1e9)), "")
    words = ["one.yaml", "--import", "nets.py"]
    assert main(["bench", "model", "predict", *words, "--ranks", "1..4", "--measure", "none", "--output", "out"]) == 0
    assert "no faster with more than" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "model.jsonl").read_text().splitlines()]
    assert [row["ranks"] for row in rows] == [1, 2, 4]
    assert np.all([row["seconds_per_step"] > 0 for row in rows])
    assert main(["bench", "step", *words, "--steps", "1", "--json", "made.json"]) == 0
    assert json.loads((tmp_path / "made.json").read_text())["backend"] == "torch"
    assert main(["bench", "seams", *words]) == 2
    assert "bench: applies to neondist layers, which TorchModel build does not have" in capsys.readouterr().err
    sys.modules.pop("nets")
