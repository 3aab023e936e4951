"""Performance model: times on machines, and dry runs that record the messages of a rank."""

import io
import re
from pathlib import Path

import numpy as np
import pytest

import neondist as nd
from neondist.bench.model import calibrate, predict, rank_profile
from neondist.bench.model.dry_run import DryRunMessageLog, dry_run_grid
from neondist.bench.model.rank_profile import RankProfile
from neondist.bench.model.table import (
    describe_conclusions,
    prediction_table,
    schemes_table,
    write_report,
)
from neondist.bench.noise import noise_warnings
from neondist.cli.bench.scaling import parse_rank_counts
from neondist.comm import loopback
from neondist.errors import ConfigError
from neondist.geometry import GridShape
from neondist.system import machine
from neondist.terminal.progress_line import first_rank_progress

NODE_LINK, NETWORK_LINK = machine.Link(1e-6, 1e9), machine.Link(1e-5, 1e8)


def test_link_and_allreduce():
    cluster = machine.Machine(4, NODE_LINK, NETWORK_LINK)
    assert NODE_LINK.message_seconds(2, 1e9) == pytest.approx(1 + 2e-6)
    assert cluster.slowest_link(4) is NODE_LINK
    assert cluster.slowest_link(5) is NETWORK_LINK
    assert cluster.allreduce_seconds(1, 1e9) == 0
    assert cluster.allreduce_seconds(4, 4e6) == pytest.approx(4 * 1e-6 + 6e-3)


def test_allreduce_is_hierarchical():
    cluster = machine.Machine(4, NODE_LINK, NETWORK_LINK)
    assert cluster.allreduce_seconds(32, 4e6) == pytest.approx(
        cluster.allreduce_seconds(4, 4e6) + 6 * 1e-5 + 2 * 4e6 * 7 / 8 / 1e8
    )
    assert machine.Machine(4, NODE_LINK, NETWORK_LINK, nodes=2).allreduce_seconds(12, 0) == pytest.approx(
        6 * 1e-6 + 2 * 1e-5
    )  # 6 on each


def test_expected_delay_of_the_slowest_node():
    cluster = machine.Machine(4, NODE_LINK, NETWORK_LINK, jitter=0.1)
    assert [cluster.expected_delay_seconds(ranks, 2.0) for ranks in (1, 4, 8, 9)] == pytest.approx(
        [0, 0, 0.1, 0.1 + 0.2 / 3]
    )
    row = predict.predict_step(GridShape(1, 4, 2), cluster, RankProfile(2.0))
    assert row["seconds_per_step"] == pytest.approx(2.1)
    assert row["mpi_share"] == pytest.approx(0.1 / 2.1)


def test_calibration_by_measured_steps():
    target = machine.Machine(4, NODE_LINK, NETWORK_LINK, compute_factor=0.5, jitter=0.03, nodes=None)
    guess = machine.Machine(4, NODE_LINK, NETWORK_LINK, compute_factor=0.1, jitter=0.2)

    def predict_rows(cluster):
        message_log = DryRunMessageLog([(2, 1000)], [(32, 10**6)])
        return [predict.predict_step(GridShape(n, 2, 2), cluster, RankProfile(1.0, message_log)) for n in (1, 2, 4, 8)]

    expected = {row["ranks"]: row["seconds_per_step"] for row in predict_rows(target)}
    estimate = predict.fit_machine(guess, predict_rows(guess), {4: expected[4], 16: expected[16]})
    assert (estimate.compute_factor, estimate.jitter) == pytest.approx((0.5, 0.03))
    rows = [predict.rescale_row(estimate, row, guess) for row in predict_rows(guess)]
    assert [row["seconds_per_step"] for row in rows] == pytest.approx(list(expected.values()))
    for name in "compute_seconds", "waiting_seconds", "mpi_share":
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in predict_rows(estimate)])
    single = predict.fit_machine(guess, predict_rows(guess), {32: expected[32]})
    assert single.jitter == 0
    falling = predict.fit_machine(guess, predict_rows(guess), {4: 1.0, 32: 0.9})
    assert falling.jitter == 0
    with pytest.raises(ConfigError, match=r"--measured 32=0.001: the messages of that step alone take 0.0191 s"):
        predict.fit_machine(guess, predict_rows(guess), {32: 0.001})


def test_rows_recomputed_by_strips():
    def profile(strips):
        layers = [nd.ConvLayerDist(3, 3, padding=1), nd.ConvLayerDist(2, 3, padding=1), nd.GlobalAvgPoolingLayerDist()]
        model = nd.ConvnetDist([*layers, nd.FCLayerDist(3)], backend="numpy", dtype="float64", strips=strips)
        experiment = nd.FitExperiment(nd.Synthetic([12, 10, 2], classes=3, train=8, test=2), model, batch_size=4)
        return rank_profile.profile_busiest_rank(experiment, GridShape(), 1e-3)

    full, stripped = profile(None), profile(4)
    assert full.recomputed_fraction == 0
    # of 12 rows of the first layer, strips of 4 compute 5, 6 and 5; products of a cell: 54, and 54 of the second
    assert stripped.recomputed_fraction == pytest.approx(4 * 10 * 54 / (12 * 10 * 108 + 6))
    assert set(stripped.seconds_per_cell) == set(full.seconds_per_cell)
    assert stripped.memory_traffic < full.memory_traffic
    rows = [predict.predict_step(GridShape(), machine.Machine(4, NODE_LINK, NETWORK_LINK), stripped) | {"schemes": []}]
    assert f"| {stripped.recomputed_fraction:.1%} |" in prediction_table(rows)


def test_compute_time():
    one_node = machine.Machine(4, NODE_LINK, NETWORK_LINK, nodes=1, compute_factor=0.5, slowdown=1.6)
    assert [one_node.compute_seconds(1.0, ranks) for ranks in (1, 2, 4, 8)] == pytest.approx([0.5, 0.6, 0.8, 1.6])
    assert machine.Machine(4, NODE_LINK, NETWORK_LINK, slowdown=1.6).compute_seconds(1.0, 4000) == pytest.approx(1.6)
    assert one_node.slowest_link(8) is NODE_LINK
    # half of the time is spent on memory: 1e10 bytes in 1 s
    busy = machine.Machine(2, NODE_LINK, NETWORK_LINK, nodes=1, slowdown=1.2, memory_slowdown=1.8, shared_slowdown=1.1)
    assert busy.compute_seconds(2.0, 2, memory_traffic=1e10) == pytest.approx(3.0)
    assert busy.compute_seconds(2.0, 1, memory_traffic=1e10) == 2.0
    assert busy.compute_seconds(2.0, 4, memory_traffic=0) == pytest.approx(2 * 1.2 * 2 * 1.1)


def test_waiting_for_ranks_on_shared_cores():
    crowded = machine.Machine(2, NODE_LINK, NETWORK_LINK, nodes=1, shared_latency=1e-3)
    assert [crowded.waiting_seconds(ranks, 3) for ranks in (1, 2, 4, 6)] == pytest.approx([0, 0, 3e-3, 6e-3])
    assert machine.Machine(2, NODE_LINK, NETWORK_LINK, shared_latency=1e-3).waiting_seconds(64, 3) == 0


def test_planner_profile_depends_on_the_link():
    cluster = machine.Machine(4, NODE_LINK, NETWORK_LINK, compute_factor=0.5, speed=1e9)
    assert cluster.planner_profile(4) == machine.MachineProfile(1e-6, 1e9, 2e9)
    assert cluster.planner_profile(5).latency == 1e-5


def test_round_trip_of_machines(tmp_path):
    cluster = machine.Machine(4, NODE_LINK, NETWORK_LINK, slowdown=1.5, memory_slowdown=2.0, speed=3e9, host="here")
    machine.write_machine(tmp_path / "m.yaml", cluster, "a comment")
    assert machine.read_machine(tmp_path / "m.yaml") == cluster


@pytest.mark.parametrize("name", ["cpu_cluster", "gpu_cluster"])
def test_example_machines(name):
    assert machine.read_machine(Path(__file__).parents[2] / "yaml" / "machines" / f"{name}.yaml").nodes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[1]",
            "m.yaml:1: expected a mapping with cores_per_node, node, .*, got a list; see the two examples",
        ),
        ("nothing: 1", "m.yaml:1: nothing: unknown field; choose from compute_factor, cores_per_node, error"),
        ("cores_per_node: 2\nnode: 3\nnetwork: 3", "m.yaml:2: node: expected a mapping with latency, bandwidth, got 3"),
        ("cores_per_node: 2\nnode: {latency: -1}\nnetwork: 3", "m.yaml:2: node.bandwidth: missing"),
        (
            "cores_per_node: 2\nnode: {latency: -1, bandwidth: 1}\nnetwork: 3",
            "node.latency: expected a number above 0, got -1",
        ),
        (
            "cores_per_node: 2\nnode: {latency: 1, bandwidth: 1}\nnetwork: {latency: 1, bandwidth: .inf}",
            "m.yaml:3: network.bandwidth: expected a number above 0, got inf",
        ),
        ("node: {latency: 1e-6, bandwidth: 1}\nnetwork: {latency: 1, bandwidth: 1}", "cores_per_node: missing"),
        ("cores_per_node: 0.5\nnode: {latency: 1, bandwidth: 1}\nnetwork: {latency: 1, bandwidth: 1}", "of at least 1"),
        (": {", "m.yaml:1: not valid YAML"),
    ],
)
def test_invalid_machines(tmp_path, text, message):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        machine.read_machine(tmp_path / "m.yaml")


def make_experiment(**grid):
    layers = [
        nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU()),
        nd.ConvLayerDist(2, 5, stride=2, padding=2),
        nd.FCLayerDist(3),
    ]
    data = nd.Synthetic([13, 11, 2], classes=3, train=8, test=2)
    model = nd.ConvnetDist(layers, backend="numpy", dtype="float64")
    return nd.FitExperiment(data, model, batch_size=4, grid=grid)


@pytest.mark.parametrize("shape", [GridShape(1, 2, 3), GridShape(2, 3, 1), GridShape(1, 1, 1)])
def test_dry_run_records_the_messages_of_a_rank(shape):
    factors = {"replicas": shape.replicas, "rows": shape.rows, "cols": shape.cols}

    def train_on_ranks(transport):
        grid = nd.ProcessGrid(transport, **factors)
        experiment = make_experiment()
        experiment.model.build((13, 11, 2), 4, grid)
        lo, hi = grid.sample_range(4)
        x = np.ones((4, 13, 11, 2))[(slice(lo, hi), *grid.tile_box((13, 11)).slices)]
        experiment.model.train_batch(x, np.zeros(4, int), batch_size=4)
        return experiment.model.bytes_sent

    sent_bytes = loopback.run(shape.size, train_on_ranks)
    profile = rank_profile.profile_busiest_rank(make_experiment(), shape, 1e-3)
    tile = rank_profile.fullest_tile(shape, (13, 11))
    assert sum(count for _, count in profile.message_log.exchange_sizes) == sent_bytes[tile]
    replicated = 8 * sum(p.size for p in replicated_parameters(make_experiment()))
    sums = [nbytes - replicated for group, nbytes in profile.message_log.allreduce_sizes if group == shape.size > 1]
    assert any(0 <= excess < 256 for excess in sums) == (shape.size > 1)  # aligned
    assert profile.seconds > 0
    assert profile.held_bytes > 0
    assert set(profile.seconds_per_cell) == {"conv1", "conv2", "fc1"}
    views = 2 * 13 * 11 // shape.tiles + 3 * 13 * 11 // shape.tiles  # of both convolutions, borders not counted
    assert profile.memory_traffic > 2 * 4 // shape.replicas * 8 * views


def replicated_parameters(experiment):
    """Return all parameters but the weights of the FC layer, whose rows are sharded."""
    experiment.model.build((13, 11, 2), 4, dry_run_grid(0, GridShape(), DryRunMessageLog()))
    *convolutions, fc = experiment.model.leaves
    return [*(array for layer in convolutions for array in layer.params.values()), fc.params["bias"]]


def test_best_grid_and_turning_point(tmp_path):
    def profile(experiment, shape, least):
        flat = 10 * (shape.rows == 1 and shape.tiles > 1) + 10 * (shape.replicas > 1)
        return RankProfile(8.0 / shape.size + flat, DryRunMessageLog([(2, 10**6)], [(shape.size, 100)]), 7)

    cluster = machine.Machine(1, NODE_LINK, machine.Link(0.1, 1e9))
    rows = predict.predict(make_experiment, [1, 4, 16, 64], cluster, profile)
    assert [row["grid"] for row in rows[:2]] == [{"replicas": 1, "rows": n, "cols": m} for n, m in ((1, 1), (2, 2))]
    parts = [rows[1][f"{name}_seconds"] for name in ("compute", "exchange", "sum", "waiting")]
    assert parts[:2] == pytest.approx([2, 0.2 + 1e-3])
    assert rows[1]["seconds_per_step"] == sum(parts)
    assert rows[1]["latency_seconds"] == pytest.approx(0.2 + 4 * 0.1)
    assert predict.fastest_rank_count(rows) == 16
    assert predict.first_latency_bound_ranks(rows) == 16
    assert predict.first_latency_bound_ranks(rows[:2]) is None
    assert (
        predict.mean_relative_error(rows, {1: rows[0]["seconds_per_step"], 4: rows[1]["seconds_per_step"] / 2}) == 0.5
    )
    assert "| 4 | 1 × 2 × 2 |" in prediction_table(rows)
    assert "from 16 ranks on" in describe_conclusions(rows)[1]
    assert "unknown" in describe_conclusions(rows)[2]
    rows[1]["measured_seconds"] = rows[1]["seconds_per_step"] / 2
    assert "mean error of the prediction: 100.0% (measured on 4 ranks)" in describe_conclusions(rows)
    assert "+100%" in prediction_table(rows)
    lines, page, *_ = write_report(tmp_path, rows, "a title")
    assert lines.read_text().count("\n") == 4
    assert schemes_table(rows) in page.read_text()


def test_best_schemes_are_applied_and_profiled():
    schemes = []

    def profile(experiment, shape, least):
        schemes.append([type(layer.scheme).__name__ for layer in experiment.model.leaves])
        return RankProfile(
            1.0,
            DryRunMessageLog([(1, 100)] * (3 if schemes[-1][0] == "Halo" else 1), []),
            seconds_per_cell={"conv1": 1e-9},
        )

    cluster = machine.Machine(1, NODE_LINK, machine.Link(0.1, 1e9))
    (row,) = predict.predict(lambda: make_experiment(rows=2, cols=2), [4], cluster, profile)
    assert schemes == [["Halo", "Halo", "Halo"], ["OverlapTile", "OverlapTile", "Halo"]]
    assert [choice["scheme"] for choice in row["schemes"]] == ["overlap_tile", "overlap_tile"]
    assert row["seconds_per_step"] - row["seconds_with_schemes"] == pytest.approx(0.2, rel=1e-3)
    assert all(choice["saves"] > 0.05 for choice in row["schemes"])
    assert "conv1 to conv2 `overlap_tile`" in schemes_table([row])
    assert "slower" not in schemes_table([row])
    assert "(slower: keep the scheme)" in schemes_table([row | {"seconds_with_schemes": 9.0}])


def test_prediction_on_a_machine_of_varying_speed():
    """The times of the rank around a measurement replace those of the prediction; the messages stay."""
    cluster = machine.Machine(2, NODE_LINK, NETWORK_LINK, slowdown=1.5)
    before, after = (predict.predict_step(GridShape(1, 1, 2), cluster, RankProfile(t)) for t in (2.0, 3.0))
    alone = predict.measure_uncontended_seconds(
        before, make_experiment(), lambda experiment, shape, least: RankProfile(3.0 * (shape.cols == 2))
    )
    row = predict.replace_uncontended_seconds(cluster, before, [alone, 3.0])
    assert all(
        row[name] == value if name == "grid" else row[name] == pytest.approx(value) for name, value in after.items()
    )
    assert predict.replace_uncontended_seconds(cluster, before, [2.0, 4.0])["noise"] == 1.0


def test_fixed_dimensions_of_grids_are_kept():
    assert predict.candidate_grids(6, make_experiment(cols=1)) == [GridShape(1, 6, 1)]
    assert predict.candidate_grids(6, make_experiment(replicas=2)) == [GridShape(2, 3, 1), GridShape(2, 1, 3)]
    cuts = [GridShape(1, 3, 2), GridShape(1, 1, 6), GridShape(1, 6, 1)]
    assert set(predict.candidate_grids(6, make_experiment())) == {
        *cuts,
        GridShape(2, 3, 1),
        GridShape(3, 2, 1),
    }  # batches of 4
    assert set(predict.candidate_grids(8, make_experiment(replicas=1))) == {
        GridShape(1, 4, 2)
    }  # the second layer has 7 x 6 cells


def test_fullest_tile():
    assert rank_profile.fullest_tile(GridShape(1, 3, 1), (7, 4)) in range(3)
    boxes = GridShape(1, 64, 1).partition((28, 28)).boxes()
    assert boxes[rank_profile.fullest_tile(GridShape(1, 64, 1), (28, 28))].size == 28


@pytest.mark.parametrize("speeds", [(1, 1, 1, 1, 1), (1, 2, 1, 1, 2), (0.5, 1, 2, 1, 1)])
def test_calibration_on_cores_of_varying_speed(speeds):
    """Rounds at another speed, and one turn in a fast moment of a single core, change nothing."""
    seconds = {("product", "alone"): [0.2 * s for s in speeds], ("product", "shared"): [0.25 * s for s in speeds]}
    seconds["product", "alone"][0] /= 3
    assert calibrate._fit_slowdown(seconds, "product") == pytest.approx(1.25)
    for count in (2, 30):
        seconds["shared", count] = [1.1 * 0.5 * s * count + 0.01 for s in speeds]
    assert calibrate._fit_core_sharing(seconds, 2, 30) == pytest.approx((1.1, 0.01))


def test_calibrate(monkeypatch):
    monkeypatch.setattr(calibrate, "CALIBRATION_ROUNDS", 1)
    monkeypatch.setattr(calibrate, "TURN_SECONDS", 1e-3)
    monkeypatch.setattr(calibrate, "MESSAGE_SIZES", (1 << 8, 1 << 16))
    monkeypatch.setattr(calibrate, "SYNC_INTERVAL_SECONDS", (1e-4, 1e-3))
    monkeypatch.setattr(calibrate, "COPIED_BYTES", 1 << 16)
    monkeypatch.setattr(calibrate, "CONVOLVED_SHAPE", (8, 8, 2))
    output = io.StringIO()

    def measure(world):
        with first_rank_progress(world.rank, output, unit="measurement", delay=0) as progress:
            return calibrate.calibrate(world, 2, progress)

    estimate, noise = loopback.run(4, measure)[0]
    lines = output.getvalue().splitlines()
    first, second, *_ = (line for line in lines if not line.startswith("preparing"))  # after 1 s on a busy machine
    # six predicted steps, 0.5 s and 0.3 s at least
    assert re.match(r"measurement 0 of 7, now preparing messages and kernels, 0 s so far, at least \d+ s left", first)
    assert re.match(r"measurement 0 of 7, now messages and kernels, 0 s so far, at least \d+ s left", second)
    assert noise == 0  # a single round
    assert (estimate.cores_per_node, estimate.nodes) == (2, 1)
    assert min(estimate.slowdown, estimate.memory_slowdown, estimate.shared_slowdown) >= 1
    assert min(estimate.node.latency, estimate.memory_bandwidth, estimate.speed) > 0
    estimate, _ = loopback.run(2, lambda transport: calibrate.calibrate(transport, 2))[0]
    assert estimate.shared_slowdown == 1
    assert noise_warnings(0.5)
    assert not noise_warnings(0.1)


def test_prediction_error(monkeypatch):
    monkeypatch.setattr(calibrate, "VALIDATION_NETWORKS", ("lcn",))
    monkeypatch.setattr(
        calibrate, "bench_step", lambda make_experiment, grid, steps: {"seconds_per_step": 2.0 * grid.size}
    )
    monkeypatch.setattr(calibrate, "profile_busiest_rank", lambda *_: None)
    monkeypatch.setattr(calibrate, "predict_step", lambda shape, *_: {"seconds_per_step": 1.0 + 2 * (shape.size == 2)})
    errors = loopback.run(2, lambda world: calibrate.measure_prediction_error(world, 2, machine.Machine.default()))
    assert errors == [pytest.approx((0.5 + 0.25) / 2)] * 2


def test_rank_spans_are_parsed():
    assert parse_rank_counts("1..4096")[::4] == [1, 16, 256, 4096]
    assert parse_rank_counts("3..13") == [3, 6, 12]
    assert parse_rank_counts("2,5") == [2, 5]
