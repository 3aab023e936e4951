"""The performance model: arithmetic of machines, and a rank alone that would send what ranks do send."""

from pathlib import Path

import numpy as np
import pytest

import neondist as nd
from neondist.bench.model import calibrate, machine, predict
from neondist.bench.model.solo import Notes, solo_grid
from neondist.bench.model.table import prediction_table
from neondist.cli.bench.model import span
from neondist.comm import loopback
from neondist.errors import ConfigError
from neondist.geometry import GridShape

NODE, NET = machine.Link(1e-6, 1e9), machine.Link(1e-5, 1e8)


def test_link_and_allreduce():
    cluster = machine.Machine(4, NODE, NET)
    assert NODE.seconds(2, 1e9) == pytest.approx(1 + 2e-6)
    assert cluster.link(4) is NODE
    assert cluster.link(5) is NET
    assert cluster.allreduce(1, 1e9) == 0
    assert cluster.allreduce(4, 4e6) == pytest.approx(4 * 1e-6 + 6e-3)


def test_compute():
    one_node = machine.Machine(4, NODE, NET, nodes=1, compute_factor=0.5, slowdown=1.6)
    assert [one_node.compute(1.0, ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([0.5, 0.6, 0.8, 1.6])
    assert machine.Machine(4, NODE, NET, slowdown=1.6).compute(1.0, 4000) == pytest.approx(1.6)
    assert one_node.link(8) is NODE


def test_a_machine_is_read_as_written(tmp_path):
    made = machine.Machine(4, NODE, NET, slowdown=1.5)
    machine.write(tmp_path / "m.yaml", made, "a comment")
    assert machine.read(tmp_path / "m.yaml") == made


@pytest.mark.parametrize("name", ["cpu_cluster", "gpu_cluster"])
def test_examples(name):
    assert machine.read(Path(__file__).parents[2] / "yaml" / "machines" / f"{name}.yaml").nodes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "the file: needs fields cores_per_node"),
        ("nothing: 1", "nothing: unknown field; choose from cores_per_node"),
        ("cores_per_node: 2\nnode: 3", r"node: needs fields latency, bandwidth; docs/performance.md has"),
        ("node: {latency: -1, bandwidth: 1}", "node.latency: -1 is not a number above 0"),
        ("node: {latency: 1, bandwidth: 1}\nnetwork: {latency: 1, bandwidth: .inf}", "network.bandwidth: inf is not"),
        ("node: {latency: 1e-6, bandwidth: 1}\nnetwork: {latency: 1, bandwidth: 1}", "cores_per_node: None is not"),
        (": {", "cannot be read"),
    ],
)
def test_bad_machines(tmp_path, text, message):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        machine.read(tmp_path / "m.yaml")


def experiment(**grid):
    layers = [
        nd.ConvLayerDist(3, 3, padding=1, activation=nd.RectLin()),
        nd.ConvLayerDist(2, 5, stride=2, padding=2),
        nd.FCLayerDist(3),
    ]
    data = nd.Synthetic([13, 11, 2], classes=3, train=8, test=2)
    model = nd.ConvnetDist(layers, backend="numpy", dtype="float64")
    return nd.FitExperiment(data, model, batch_size=4, grid=grid)


@pytest.mark.parametrize("shape", [GridShape(1, 2, 3), GridShape(2, 3, 1), GridShape(1, 1, 1)])
def test_a_rank_alone_notes_what_a_rank_among_others_sends(shape):
    factors = {"replicas": shape.replicas, "rows": shape.rows, "cols": shape.cols}

    def on_ranks(transport):
        grid = nd.ProcessGrid(transport, **factors)
        made = experiment()
        made.model.build((13, 11, 2), 4, grid)
        lo, hi = grid.sample_range(4)
        x = np.ones((4, 13, 11, 2))[(slice(lo, hi), *grid.tile_box((13, 11)).slices)]
        made.model.train_batch(x, np.zeros(4, int), batch_size=4)
        return made.model.bytes_sent

    sent = loopback.run(shape.size, on_ranks)
    seconds, notes, held = predict.rank_alone(experiment(), shape)
    tile = predict.fullest(shape, (13, 11))
    assert sum(count for _, count in notes.exchanges) == sent[tile]
    group, gradients = max(notes.sums)
    assert group == shape.size
    assert 0 <= gradients - 8 * sum(p.size for p in parameters(experiment())) < 256  # what keeps arrays aligned
    assert seconds > 0
    assert held > 0


def parameters(made):
    made.model.build((13, 11, 2), 4, solo_grid(0, {}, 1, Notes()))
    return [array for layer in made.model.leaves for array in layer.params.values()]


def test_the_best_grid_is_taken_and_the_turning_point_found():
    def alone(made, shape):
        flat = 10 * (shape.rows == 1 and shape.size > 1)
        return 8.0 / shape.size + flat, Notes([(2, 10**6)], [(shape.size, 100)]), 7

    cluster = machine.Machine(1, NODE, machine.Link(0.1, 1e9))
    rows = predict.predict(experiment, [1, 4, 16, 64], cluster, alone)
    assert [row["grid"] for row in rows[:2]] == [{"replicas": 1, "rows": n, "cols": m} for n, m in ((1, 1), (2, 2))]
    assert rows[1]["compute_seconds"] == 2
    assert rows[1]["exchange_seconds"] == pytest.approx(0.2 + 1e-3)
    assert rows[1]["seconds_per_step"] == sum(rows[1][f"{name}_seconds"] for name in ("compute", "exchange", "sum"))
    assert predict.turning_point(rows) == 16
    assert predict.error(rows, {1: rows[0]["seconds_per_step"], 4: rows[1]["seconds_per_step"] / 2}) == 0.5
    assert "| 4 | 1 × 2 × 2 |" in prediction_table(rows)


def test_a_grid_that_is_given_is_kept():
    assert predict.grids(6, experiment(cols=1)) == [GridShape(1, 6, 1)]
    assert predict.grids(6, experiment(replicas=2)) == [GridShape(2, 3, 1), GridShape(2, 1, 3)]
    assert len(predict.grids(6, experiment())) == 3


def test_fullest():
    assert predict.fullest(GridShape(1, 3, 1), (7, 4)) in range(3)
    boxes = GridShape(1, 64, 1).partition((28, 28)).boxes()
    assert boxes[predict.fullest(GridShape(1, 64, 1), (28, 28))].size == 28


def test_calibrate(monkeypatch):
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "SIZES", (1 << 8, 1 << 16))
    one, two = loopback.run(2, lambda transport: calibrate.calibrate(transport, 2))
    assert one == two
    assert one.nodes == 1
    assert one.slowdown >= 1
    assert one.node.latency > 0


def test_span():
    assert span("1..4096")[::4] == [1, 16, 256, 4096]
    assert span("3..13") == [3, 6, 12]
    assert span("2,5") == [2, 5]
