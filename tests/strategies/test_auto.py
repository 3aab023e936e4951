"""Automatic choice of grid and strategy: the fastest by predicted cost, within memory, and replayed from a file."""

import re
from dataclasses import replace

import h5py
import numpy as np
import pytest

import neondist as nd
from neondist.backends import backend_name
from neondist.cli import main
from neondist.plan import search
from neondist.strategies import AutoStrategy, ParameterSpec, Strategy, as_builder
from neondist.strategies.auto import DEFAULT_SLOTS_PER_PARAMETER, create_candidate_builders, estimate_sync_costs
from neondist.system.machine import Link, Machine, write_machine
from neondist.system.memory import format_bytes, model_bytes_per_rank, parse_bytes, process_overhead_bytes

SHAPE, BATCH = (21, 18, 2), 4
SLOW = Machine(2, Link(1e-5, 1e8), Link(1e-3, 1e7), speed=1e9)
SPECS = [ParameterSpec("a", (300, 7)), ParameterSpec("b", (7,)), ParameterSpec("c", (64, 64, 3))]
FILE = """
!FitExperiment
dataset: !Synthetic {shape: [21, 18, 2], classes: 3, train: 8, test: 4}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 4, kernel_size: 3, scheme: !Auto {}}
    - !FCLayerDist {out_features: 3}
  cost: !CrossEntropy {}
  optimizer: !Adam {}
batch_size: 4
strategy: !Auto {memory: 1GiB}
"""


def make_network():
    layers = [nd.ConvLayerDist(4, 3), nd.MaxPoolingLayerDist(2), nd.BatchNormLayerDist(), nd.FCLayerDist(3)]
    return nd.ConvnetDist(layers, cost=nd.CrossEntropy(), optimizer=nd.Adam())


def list_choices(ranks, machine=SLOW):
    model = make_network()
    plans = [model.plan(SHAPE, grid, BATCH) for grid in search.candidate_grids(ranks, {}, BATCH, SHAPE[:-1])]
    return search.sort_choices(plans, create_candidate_builders(), machine)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_choice_is_the_fastest(ranks):
    choices = list_choices(ranks)
    grids = {(r, p, q) for r in range(1, BATCH + 1) for p in range(1, 7) for q in range(1, 7) if r * p * q == ranks}
    assert {(c.plan.grid.replicas, c.plan.grid.rows, c.plan.grid.cols) for c in choices} == grids
    assert len(choices) == len(grids) * len(create_candidate_builders())
    choice, runner_up, excluded = search.choose_fastest_grid(choices, None)
    assert choice.step_seconds == min(candidate.step_seconds for candidate in choices) <= runner_up.step_seconds
    assert not excluded
    assert [search.choice_label(candidate) for candidate in choices] == [
        search.choice_label(candidate) for candidate in list_choices(ranks)
    ]
    ties = [candidate for candidate in choices if candidate.step_seconds == choice.step_seconds]
    assert choice.strategy.builder == min(candidate.strategy.builder for candidate in ties)


def test_choice_fits_in_memory():
    choices = list_choices(4)
    needs = sorted({search.max_needed_bytes(candidate) for candidate in choices})
    assert len(needs) > 2
    for limit in needs:
        choice, _, excluded = search.choose_fastest_grid(choices, limit)
        faster = [candidate for candidate in choices if candidate.sort_key < choice.sort_key]
        assert (
            search.max_needed_bytes(choice)
            <= limit
            < min([search.max_needed_bytes(candidate) for candidate in faster], default=limit + 1)
        )
        assert len(excluded) == len(faster)
    with pytest.raises(nd.ConfigError, match=r"or more with any grid and strategy; give memory: \d+MiB or") as error:
        search.choose_fastest_grid(choices, needs[0] - 1)
    memory = parse_bytes("memory", re.findall(r"\d+MiB", str(error.value))[0])
    search.choose_fastest_grid(choices, model_bytes_per_rank(memory, 4))
    with pytest.raises(nd.ConfigError, match=r"with any grid|too little"):
        search.choose_fastest_grid(choices, model_bytes_per_rank(memory - (4 << 20), 4))


def test_choice_memory_matches_its_plan():
    for choice in list_choices(4):
        if choice.plan.grid.replicas == 1:
            model = make_network()
            model.configure_execution(strategy=replace(choice.strategy, grid=None))
            needed, bound = model.plan(SHAPE, choice.plan.grid, BATCH).needed_bytes, search.max_needed_bytes(choice)
            if choice.strategy.builder in ("AllReduce", "ShardedOptimizer", "PS"):
                assert bound == needed
            assert needed <= bound <= needed + choice.sync.held_bytes


def test_builder_chooses_the_fastest_in_memory():
    machine = Machine.default()
    costs = {}
    for builder in create_candidate_builders():
        costs[str(type(builder).__name__)] = estimate_sync_costs(
            builder.assign(SPECS, 4, 4), SPECS, 4, DEFAULT_SLOTS_PER_PARAMETER, machine
        )
    for limit in sorted({cost.held_bytes for cost in costs.values()}):
        fitting = {name: cost.seconds for name, cost in costs.items() if cost.held_bytes <= limit}
        best = min(fitting, key=lambda name: (fitting[name], name))
        assert nd.strategies.Auto(limit).build(SPECS, 4).parameters == as_builder(best).build(SPECS, 4).parameters
    with pytest.raises(nd.ConfigError, match=r"every strategy needs at least .* per rank;"):
        nd.strategies.Auto(1).build(SPECS, 4)


@pytest.mark.parametrize(
    "optimizer", [nd.SGD(0.1), nd.SGD(0.1, momentum=0.9), nd.Adam()], ids=["sgd", "momentum", "adam"]
)
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 2, 2), (2, 1, 2), (4, 1, 1), (1, 3, 2)])
def test_runs_choose_as_the_planner_does(grid, optimizer):
    """Weights of a layer over a tiled feature map stay on their tiles, so their gradients cost no messages."""
    layers = [nd.ConvLayerDist(6, 3, padding=1), nd.FCLayerDist(7), nd.FCLayerDist(3)]
    model = nd.ConvnetDist(layers, cost=nd.CrossEntropy(), optimizer=optimizer)
    shape = nd.GridShape(*grid)
    choices = search.sort_choices([model.plan(SHAPE, shape, BATCH)], create_candidate_builders(), Machine.default())
    held = [search.held_parameter_bytes(choice) for choice in choices]
    for limit in (None, *sorted(set(held))):
        fastest = AutoStrategy(limit).select_fitting(choices, held)[0]
        model.configure_execution(strategy=AutoStrategy(limit))
        plan = model.plan(SHAPE, shape, BATCH)
        assert plan.workload.parameters.strategy.parameters == fastest.strategy.parameters
        assert plan.workload.parameters.memory(0) <= (limit or max(held))


def test_builder_uses_a_measured_machine(tmp_path):
    file = tmp_path / "machine.yaml"
    machine = Machine(1, Link(1.0, 1e12), Link(1.0, 1e12), memory_bandwidth=1e15)
    write_machine(file, machine, "a second for each message")
    assignments = {type(builder).__name__: builder.assign(SPECS, 4, 4) for builder in create_candidate_builders()}
    costs = {
        name: estimate_sync_costs(assignment, SPECS, 4, DEFAULT_SLOTS_PER_PARAMETER, machine).seconds
        for name, assignment in assignments.items()
    }
    best = assignments[min(costs, key=lambda name: (costs[name], name))]
    assert nd.strategies.Auto(machine=str(file)).build(SPECS, 4).parameters == best
    assert nd.strategies.Auto().build(SPECS, 4).parameters != best
    file.write_text("cores_per_node: none")
    with pytest.raises(nd.ConfigError, match=r"machine\.yaml"):
        nd.strategies.Auto(machine=str(file))


def test_auto_depends_on_the_field(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text(FILE)
    from neondist.config import load_experiment

    experiment = load_experiment(file)
    assert isinstance(experiment.model.strategy, AutoStrategy)
    assert experiment.model.strategy.arguments() == {"memory": "1GiB", "machine": None}
    assert type(experiment.model.leaves[0].scheme) is nd.schemes.Auto
    assert isinstance(as_builder("Auto"), AutoStrategy)
    assert as_builder("Auto(memory='1GiB')").arguments() == {"memory": "1GiB", "machine": None}


@pytest.mark.parametrize(("arguments", "message"), [
    (["-n", "2", "--resources", "cpus.yaml"], ""),
    (["--resources", "gpu.yaml"], ""),
    (["-n", "2", "--resources", "gpu.yaml"], ""),
    (["-n", "2", "--strategy", "three.yaml"], "has 3 owners, but the job has 2 ranks; build the strategy for 2"),
    (["-n", "2", "--set", "strategy=!Auto {memory: 1kB}"], "strategy: Auto: every strategy needs at least"),
])  # fmt: skip
def test_plan_honours_ranks_and_limits(tmp_path, capsys, monkeypatch, arguments, message):
    """Resources with more devices than ranks; strategies with more owners; the memory limit of Auto."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(FILE)
    (tmp_path / "cpus.yaml").write_text("nodes: [{address: localhost, cpus: [0, 1, 2]}]")
    (tmp_path / "gpu.yaml").write_text("nodes: [{address: localhost, gpus: [0], cpus: [0, 1, 2]}]")
    assert main(["plan", "one.yaml", "-n", "3", "--strategy", "PSLoadBalancing", "--to", "three.yaml"]) == 0
    text = (tmp_path / "three.yaml").read_text().splitlines(keepends=True)
    (tmp_path / "three.yaml").write_text("".join(line for line in text if not line.startswith(("grid:", "schemes:"))))
    capsys.readouterr()
    assert main(["plan", "one.yaml", *arguments]) == (2 if message else 0)
    printed = capsys.readouterr()
    assert message in printed.err
    assert message or "choice" in printed.out


@pytest.mark.parametrize("options", [["--machine", "pairs.yaml"], ["--resources", "pairs.yaml"]])
def test_plan_over_nodes_names_the_memory_of_a_node(tmp_path, capsys, monkeypatch, options):
    """Name the smallest sufficient limit for the two ranks of each of three nodes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(FILE)
    if "--machine" in options:
        write_machine(tmp_path / "pairs.yaml", replace(Machine.default(), cores_per_node=2), "for two ranks")
    else:
        nodes = [f"{{address: h{i}, cpus: [0, 1], chief: {i == 0}, ssh_config: s}}" for i in range(3)]
        ssh = "{s: {username: u, key_file: k}}"
        (tmp_path / "pairs.yaml").write_text(f"nodes: [{', '.join(nodes)}]\nssh: {ssh}\n")
    arguments = ["plan", "one.yaml", "-n", "6", *options, "--set", "backend=numpy", "--memory"]
    reserved = process_overhead_bytes("numpy")
    assert main([*arguments, str(2 * reserved + 2000)]) == 2
    memory = parse_bytes("memory", re.findall(r"give memory: (\d+MiB)", capsys.readouterr().err)[0])
    assert main([*arguments, str(memory)]) == 0
    assert main([*arguments, str(memory - (2 << 20))]) == 2


def test_plan_depends_on_the_network_of_the_resources(tmp_path, capsys, monkeypatch):
    """Choose other grids for slow and for fast links between nodes, but trust a measured machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(FILE)
    write_machine(tmp_path / "machine.yaml", Machine.default(), "measured")

    def print_plan(gbits, *options):
        nodes = [f"{{address: h{i}, chief: {i == 0}, ssh_config: s, network_bandwidth: {gbits}}}" for i in range(4)]
        nodes[0] = nodes[0].replace(f", network_bandwidth: {gbits}", "")
        ssh = "{s: {username: u, key_file: k}}"
        (tmp_path / "nodes.yaml").write_text(f"nodes: [{', '.join(nodes)}]\nssh: {ssh}\n")
        assert main(["plan", "one.yaml", "--resources", "nodes.yaml", *options]) == 0
        return capsys.readouterr().out

    assert re.search(r"choice +2×2×1 with AllReduce", print_plan(0.01))
    assert re.search(r"choice +4×1×1 with AllReduce", print_plan(100))
    assert print_plan(0.01, "--machine", "machine.yaml") == print_plan(100, "--machine", "machine.yaml")


def test_autodist_plans_for_the_nodes_of_its_resources(tmp_path):
    resources = {"nodes": [{"address": "localhost", "network_bandwidth": 8}]}
    write_machine(tmp_path / "machine.yaml", Machine.default(), "measured")
    given, measured = (
        nd.AutoDist(resources, nd.strategies.Auto(machine=file), nd.ProcessGrid.serial()).strategy.machine
        for file in (None, str(tmp_path / "machine.yaml"))
    )
    assert (given.cores_per_node, given.nodes, given.network.bandwidth) == (1, 1, 1e9)
    assert (measured.cores_per_node, measured.network) == (1, Machine.default().network)


def test_plan_is_printed_written_and_replayed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(FILE)
    assert main(["plan", "one.yaml", "-n", "4", "--to", "chosen.yaml"]) == 0
    printed = capsys.readouterr().out
    assert main(["plan", "one.yaml", "-n", "4"]) == 0
    assert capsys.readouterr().out == printed.replace("chosen.yaml\n", "")
    for text in ("conv1/weights", "synchroniser", "runner-up", "reason: "):
        assert text in printed
    reserved = format_bytes(process_overhead_bytes(backend_name("auto")))
    assert main(["plan", "one.yaml", "-n", "4", "--memory", "1GiB"]) == 2
    assert (
        f"1.07 GB is too little for 4 ranks on a machine; of the limit, {reserved} per rank are reserved"
        in capsys.readouterr().err
    )
    strategy = Strategy.load("chosen.yaml")
    assert strategy.grid == {"replicas": 4, "planes": 1, "rows": 1, "cols": 1}
    assert Strategy.load("chosen.yaml") == strategy
    assert main(["check", "one.yaml", "-n", "4", "--strategy", "chosen.yaml"]) == 0
    assert "4 ranks (4 replicas, 1 row, 1 col)" in capsys.readouterr().out
    assert main(["check", "one.yaml", "-n", "3", "--strategy", "chosen.yaml"]) == 2
    message = "chosen.yaml:5: grid (replicas: 4, rows: 1, cols: 1) does not match 3 ranks; "
    assert message in (err := capsys.readouterr().err)
    assert err.endswith("; or set the experiment's own grid\n")
    assert main(["check", "one.yaml", "-n", "8", "--strategy", "chosen.yaml", "--set", "grid.replicas=4"]) == 0
    capsys.readouterr()
    yaml_text = (tmp_path / "chosen.yaml").read_text()
    (tmp_path / "chosen.yaml").write_text(yaml_text.replace("rows: 1", "rows: 0"))
    assert main(["check", "one.yaml", "-n", "4", "--strategy", "chosen.yaml"]) == 2
    assert "chosen.yaml:5: grid.rows: expected an integer of at least 1" in capsys.readouterr().err


CHAIN = """
!FitExperiment
dataset: !Synthetic {shape: [24, 24, 2], classes: 3, train: 8, test: 4}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 3, kernel_size: 3, padding: 1}
    - !ConvLayerDist {out_channels: 3, kernel_size: 3, padding: 1, activation: !ReLU {}}
    - !BatchNormLayerDist {}
    - !ConvLayerDist {out_channels: 3, kernel_size: 3}
    - !FCLayerDist {out_features: 3}
  cost: !CrossEntropy {}
  optimizer: !SGD {learning_rate: 0.1}
batch_size: 1
dtype: float64
"""
COSTS = """
cores_per_node: 8
node: {latency: LATENCY, bandwidth: BANDWIDTH}
network: {latency: LATENCY, bandwidth: BANDWIDTH}
"""
SLOW_LINKS, FREE_LINKS = ("1e-3", "1e9"), ("1e-12", "1e15")


def plan_on_machine(folder, capsys, link, text=CHAIN):
    """Return the output of `plan` for four ranks of a machine, and the strategy that it writes."""
    (folder / "chain.yaml").write_text(text)
    (folder / "machine.yaml").write_text(COSTS.replace("LATENCY", link[0]).replace("BANDWIDTH", link[1]))
    files = ["--machine", str(folder / "machine.yaml"), "--to", str(folder / "strategy.yaml")]
    assert main(["plan", str(folder / "chain.yaml"), "-n", "4", *files]) == 0
    return capsys.readouterr().out, Strategy.load(folder / "strategy.yaml")


def test_schemes_for_data_with_a_shape_in_a_file(tmp_path, capsys):
    """Plan as for data with a known shape, and keep the model's own schemes in later plans."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for split, count in (("train", 8), ("test", 4)):
            file[f"{split}/images"] = np.zeros((count, 24, 24, 2), "f4")
            file[f"{split}/labels"] = np.arange(count) % 3
    synthetic = "!Synthetic {shape: [24, 24, 2], classes: 3, train: 8, test: 4}"
    plain = plan_on_machine(tmp_path, capsys, SLOW_LINKS)
    assert synthetic in CHAIN
    hdf5 = f"!HDF5Dataset {{path: {tmp_path / 'data.h5'}}}"
    assert plan_on_machine(tmp_path, capsys, SLOW_LINKS, CHAIN.replace(synthetic, hdf5)) == plain


def train(strategy, ranks):
    def job(transport):
        layers = [nd.ConvLayerDist(3, 3, padding=1), nd.ConvLayerDist(3, 3, padding=1, activation=nd.ReLU())]
        layers += [nd.BatchNormLayerDist(), nd.ConvLayerDist(3, 3), nd.FCLayerDist(3)]
        model = nd.ConvnetDist(layers, cost=nd.CrossEntropy(), optimizer=nd.SGD(learning_rate=0.1), strategy=strategy)
        data = nd.Synthetic((24, 24, 2), classes=3, train=8, test=4)
        factors = strategy.grid if strategy is not None else {}
        experiment = nd.FitExperiment(data, model, batch_size=1, epochs=1, dtype="float64", grid=factors)
        schemes = [type(layer.scheme).__name__ for layer in model.leaves]
        with nd.ProcessGrid(transport, **experiment.grid) as grid:
            return [record["train_loss"] for record in experiment.run(grid).history], schemes

    return nd.loopback.run(ranks, job)[0]


def test_slow_links_fuse_halos(tmp_path, capsys):
    """Choose among plain and fused halos; a replayed strategy gives the same losses."""
    text, strategy = plan_on_machine(tmp_path, capsys, SLOW_LINKS)
    assert {"conv1", "conv2"} <= strategy.schemes.keys()
    assert "planned schemes" in text
    assert f"scheme {strategy.schemes['conv1']}: conv1, conv2" in text
    assert Strategy.load(tmp_path / "strategy.yaml").to_yaml() == (tmp_path / "strategy.yaml").read_text()
    serial, fused = train(None, 1), train(strategy, 4)
    assert fused[1][0] != "Halo"
    assert fused[0] == pytest.approx(serial[0], rel=1e-10)


def test_free_links_keep_plain_halos(tmp_path, capsys):
    text, strategy = plan_on_machine(tmp_path, capsys, FREE_LINKS)
    assert "conv2" not in (strategy.schemes or {})
    assert "deep_halo" not in text
    assert "reason:" in text


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("schemes: {conv9: halo}", "schemes: layer 'conv9' does not exist in the model"),
        ("schemes: {conv1: telepathy}", "telepathy"),
        ("schemes: {conv1: 3}", "schemes.conv1: expected text"),
        ("schemes: [halo]", "schemes: expected a mapping, got a list"),
    ],
)
def test_invalid_schemes_name_the_line(entry, message, tmp_path, capsys):
    plan_on_machine(tmp_path, capsys, FREE_LINKS)
    lines = [line for line in (tmp_path / "strategy.yaml").read_text().splitlines() if not line.startswith("schemes")]
    index = next(number for number, line in enumerate(lines) if line.startswith("parameters"))
    (tmp_path / "strategy.yaml").write_text("\n".join([*lines[:index], entry, *lines[index:]]) + "\n")
    assert main(["check", str(tmp_path / "chain.yaml"), "-n", "4", "--strategy", str(tmp_path / "strategy.yaml")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"strategy.yaml:{index + 1}" in error
