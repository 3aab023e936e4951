"""Strategy builders: rules, balance, determinism, files and error messages."""

import re
import string
import tempfile

import numpy as np
import pytest
from builders import STRATEGY_BUILDERS
from hypothesis import given
from hypothesis import strategies as st

import neondist as nd
import yaml
from neondist import strategies
from neondist.config import load_experiment
from neondist.registry import registered_classes
from neondist.strategies import ParameterSpec, ParameterStrategy, Strategy
from neondist.strategies.partition import part_sizes, smallest_divisor, smallest_non_divisor

names = st.text(string.ascii_letters + string.digits + "/._: '#[]{}é\"-", min_size=1, max_size=12)
specs = st.lists(
    st.builds(
        ParameterSpec,
        names,
        st.lists(st.integers(1, 40), max_size=4).map(tuple),
        st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda spec: spec.name,
)


def test_all_builders_are_covered():
    builders = registered_classes(strategies.StrategyBuilder)
    own = {name for name, cls in builders.items() if cls.__module__.startswith("neondist.")}
    assert {text.partition("(")[0] for text in STRATEGY_BUILDERS} == own - {"AutoStrategy"}


@given(specs, st.integers(1, 7), st.sampled_from(sorted(STRATEGY_BUILDERS)))
def test_parts_cover_parameters_and_files_round_trip(parameters, ranks, text):
    strategy = strategies.as_builder(text).build(parameters, ranks)
    assert list(strategy.parameters) == [spec.name for spec in parameters]
    for spec in parameters:
        assignment = strategy.parameters[spec.name]
        assert all(0 <= owner < ranks for owner in assignment.owners)
        if assignment.partition is not None:
            axis, sizes = assignment.partition
            assert sum(sizes) == spec.shape[axis]
            assert min(sizes) > 0
            assert len(sizes) == len(assignment.owners) > 1
        assert sum(part_sizes(spec, assignment.partition)) == spec.nbytes
        assert spec.shape or assignment.partition is None
    with tempfile.TemporaryDirectory() as folder:
        strategy.save(f"{folder}/strategy.yaml")
        loaded = Strategy.load(f"{folder}/strategy.yaml")
    assert loaded == strategy == strategies.as_builder(strategy.builder).build(parameters, ranks)
    assert loaded.digest == strategy.digest
    assert all(spec.name in str(strategy) for spec in parameters)
    strategy.check_parameters_match(parameters)


@pytest.mark.parametrize(
    ("n", "divisor", "other"),
    [(1, 1, 1), (2, 2, 2), (3, 3, 2), (4, 2, 3), (6, 2, 4), (7, 7, 2), (12, 2, 5), (35, 5, 2)],
)
def test_number_of_parts(n, divisor, other):
    assert (smallest_divisor(n), smallest_non_divisor(n)) == (divisor, other)


@given(st.integers(2, 500))
def test_number_of_parts_by_definition(n):
    assert smallest_divisor(n) == min(i for i in range(2, n + 1) if n % i == 0)
    assert smallest_non_divisor(n) == min([i for i in range(2, n) if n % i] or [n])


def assign(builder, *shapes, ranks=2, sparse=()):
    parameters = [ParameterSpec(f"p{index}", shape, sparse=index in sparse) for index, shape in enumerate(shapes)]
    return list(builder.build(parameters, ranks).parameters.values())


def test_builder_rules():
    assert [assignment.group for assignment in assign(strategies.AllReduce(2), (1,), (1,), (1,))] == [0, 0, 1]
    assert [assignment.owners for assignment in assign(strategies.PS(), (9,), (9,))] == [[0], [0]]
    assert [assignment.owners for assignment in assign(strategies.PSLoadBalancing(), (1,), (9,), (4,), (3,))] == [
        [1],
        [0],
        [1],
        [1],
    ]
    assert [assignment.partition for assignment in assign(strategies.PartitionedPS(), (6, 2), (7,), ())] == [
        (0, [3, 3]),
        (0, [1] * 7),
        None,
    ]
    assert assign(strategies.UnevenPartitionedPS(), (8, 2))[0].partition == (0, [3, 3, 2])
    dense, rows = assign(strategies.Parallax(), (5, 2), (5, 2), sparse={1})
    assert (dense.kind, rows.kind, rows.owners) == ("allreduce", "server", [0])
    assert assign(strategies.ShardedOptimizer(), (5,), ranks=3)[0].owners == [0, 1, 2]
    axes = {assign(strategies.RandomAxisPartitionAR(seed=seed), (4, 1, 6))[0].partition[0] for seed in range(20)}
    assert axes == {0, 2}
    assert assign(strategies.RandomAxisPartitionAR(seed=5), (4, 6), sparse={0})[0].partition[0] == 0


def list_resnet_50_shapes():
    """Return the shapes of ResNet-50's parameters, norms and biases included."""
    shapes, channels = [(7, 7, 3, 64), (64,), (64,)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convs = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            for conv in [*convs, *([(1, 1, channels, 4 * width)] if block == 0 else [])]:
                shapes += [conv, conv[-1:], conv[-1:]]
            channels = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def list_vgg_16_shapes():
    """Return the shapes of VGG-16's parameters, three quarters of which are in the first dense layer."""
    shapes, channels = [], 3
    for width, convs in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convs):
            shapes += [(3, 3, channels, width), (width,)]
            channels = width
    for shape in ((25088, 4096), (4096, 4096), (4096, 1000)):
        shapes += [shape, shape[-1:]]
    return shapes


@pytest.mark.parametrize(("shapes", "builder", "ranks"), [
    *((list_resnet_50_shapes(), builder, ranks) for ranks in (2, 4, 8) for builder in (
        strategies.PSLoadBalancing(), strategies.PartitionedPS(), strategies.UnevenPartitionedPS(),
        strategies.PartitionedAllReduce(), strategies.ShardedOptimizer(),
    )),
    (list_vgg_16_shapes(), strategies.PartitionedPS(), 2), (list_vgg_16_shapes(), strategies.UnevenPartitionedPS(), 4),
    (list_vgg_16_shapes(), strategies.ShardedOptimizer(), 4), (list_vgg_16_shapes(), strategies.ShardedOptimizer(), 8),
])  # fmt: skip
def test_owners_are_balanced(shapes, builder, ranks):
    parameters = [ParameterSpec(f"p{index}", shape) for index, shape in enumerate(shapes)]
    loads = builder.build(parameters, ranks).bytes_per_owner
    assert max(loads) <= 1.2 * sum(loads) / ranks


def test_greedy_balance_bound():
    """The largest parameter bounds the greedy balance."""
    parameters = [ParameterSpec(f"p{index}", shape) for index, shape in enumerate(list_vgg_16_shapes())]
    for ranks in (2, 4, 8):
        loads = strategies.PSLoadBalancing().build(parameters, ranks).bytes_per_owner
        assert max(loads) == max(spec.nbytes for spec in parameters)  # alone on its owner


@pytest.mark.parametrize(("make", "message"), [
    (lambda: strategies.AllReduce(chunk_size=0), "chunk_size"),
    (lambda: strategies.AllReduce(compressor="gzip"), "gzip"),
    (lambda: strategies.AllReduce(compressor="topk(0)"), "(0, 1]"),
    (lambda: strategies.AllReduce(compressor="topk(1.5)"), "(0, 1]"),
    (lambda: strategies.AllReduce(compressor="topk(nan)"), "(0, 1]"),
    (lambda: strategies.AllReduce(compressor="powersgd(0)"), "powersgd"),
    (lambda: strategies.PS(sync=False, staleness=1), "staleness"),
    (lambda: strategies.as_builder("PSS"), "did you mean 'PS'"),
    (lambda: strategies.as_builder("PS(stale=1)"), "no argument 'stale'"),
    (lambda: strategies.as_builder("PS(2)"), "names and values"),
    (lambda: strategies.as_builder("PS(staleness=__import__('os'))"), "names and values"),
    (lambda: strategies.as_builder("PS(**{'staleness': 1})"), "names and values"),
    (lambda: strategies.PS().build([ParameterSpec("a", (2,))] * 2, 2), "'a': given twice"),
    (lambda: strategies.PS().build([], 0), "replicas"),
    (lambda: ParameterSpec("a", (2, -1)), "shape"),
    (lambda: ParameterSpec("a", (2.5, 3)), "shape"),
    (lambda: ParameterSpec("a", 3), "shape"),
    (lambda: ParameterSpec("a", (2,), "float33"), "float33"),
    (lambda: ParameterSpec("", (2,)), "name"),
    (lambda: ParameterSpec("a", (2,), "object"), "unknown dtype 'object'"),
    (lambda: ParameterSpec("a", (2,), sparse="yes"), "'a': sparse: expected true or false, got the text 'yes'"),
    (lambda: strategies.PS().build(["a"], 2), "parameters: expected a list"),
    (lambda: strategies.PS().build(3, 2), "parameters: expected a list"),
    (lambda: strategies.ParameterStrategy("server", owners=[0.5]), "owners.0: expected an integer"),
    (lambda: nd.Strategy("PS", 2, "2", {}, {}), "Strategy: servers: expected an integer"),
    (lambda: nd.Strategy.load(3), "load: path: expected"),
    (lambda: nd.ResourceSpec(None), "ResourceSpec: resources: expected"),
])  # fmt: skip
def test_invalid_arguments(make, message):
    with pytest.raises(nd.ConfigError) as error:
        make()
    assert message in str(error.value)


def write_strategy(tmp_path, **changes):
    """Write a strategy of one parameter with changed fields."""
    path = tmp_path / "s.yaml"
    strategies.PartitionedPS().build([ParameterSpec("w", (4, 2))], 2).save(path)
    content = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        (content if name in content else content["parameters"]["w"])[name] = value
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize(("changes", "field", "message"), [
    ({"format": 2}, "format", "expected 1"),
    ({"replicas": 0}, "replicas", "from 1 to"),
    ({"builder": 1}, "builder", "expected text"),
    ({"kind": "gossip"}, "kind", "'allreduce' or 'server'"),
    ({"owners": [0, 7]}, "owners", "owner 7"),
    ({"owners": [0]}, "owners", "1 owner for 2 parts"),
    ({"partition": {"axis": 2, "sizes": [4]}}, "axis", "expected 0 to 1"),
    ({"partition": {"axis": 0, "sizes": [3]}}, "sizes", "add up to 3"),
    ({"shape": []}, "partition", "scalar"),
    ({"compressor": "zip"}, "w", "zip"),
    ({"compressor": "topk(1.5)"}, "w", "(0, 1]"),
    ({"compressor": "fp16"}, "compressor", "requires kind: allreduce"),
    ({"compressor": "fp16", "kind": "allreduce"}, "compressor", "owners: []"),
    ({"sync": "yes!"}, "sync", "true or false"),
    ({"staleness": -1}, "staleness", "at least 0"),
    ({"staleness": 2, "sync": False}, "staleness", "sync: true"),
    ({"extra": 1}, "extra", "unknown field"),
])  # fmt: skip
def test_invalid_files_name_the_line_and_field(tmp_path, changes, field, message):
    path = write_strategy(tmp_path, **changes)
    with pytest.raises(nd.ConfigError) as error:
        Strategy.load(path)
    match = re.fullmatch(rf"{re.escape(str(path))}:(\d+): (?:parameters\.w\.)?(\S+): (.*)", str(error.value))
    assert match, str(error.value)
    line = path.read_text().splitlines()[int(match[1]) - 1]
    assert line.strip().startswith(f"{field}:")
    assert message in match[3]


def test_another_model_names_the_first_difference():
    strategy = strategies.AllReduce().build([ParameterSpec("a", (2,)), ParameterSpec("b", (3,))], 2)
    for other, message in (
        ([ParameterSpec("a", (2,)), ParameterSpec("b", (4,))], "'b' has shape (3,), but (4,)"),
        ([ParameterSpec("a", (2,)), ParameterSpec("c", (3,))], "no entry for parameter 'c'"),
        ([ParameterSpec("a", (2,))], "'b' is not in the model"),
        ([ParameterSpec("a", (2,), "float64"), ParameterSpec("b", (3,))], "dtype float32, but float64"),
    ):
        with pytest.raises(nd.ConfigError) as error:
            strategy.check_parameters_match(other)
        assert message in str(error.value)


def test_builders_are_yaml_tags(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("!PS\nstaleness: 2\n")
    assert load_experiment(path, top="StrategyBuilder").staleness == 2
    path.write_text("!PS\nstaleness: 2\nsync: false\n")
    with pytest.raises(nd.ConfigError, match=r"s\.yaml:2: staleness: 2 needs sync=True"):
        load_experiment(path, top="StrategyBuilder")


class _UserBuilder(strategies.StrategyBuilder):
    """Builder of a user, which returns what a test gives."""

    def __init__(self, assigned: object = None) -> None:
        self.assigned = assigned

    def assign(self, specs, replicas, servers):
        return self.assigned


def server(*arguments, **fields):
    return {"w": ParameterStrategy("server", *arguments, **fields)}


@pytest.mark.parametrize(("assigned", "message"), [
    (None, "_UserBuilder.assign: expected a mapping, got None"),
    ({}, "strategy: parameters: no entry for parameter 'w'; add one"),
    ({"w": {"kind": "server"}}, "Strategy: parameters.w: expected ParameterStrategy, got a mapping"),
    (server((0, [2, 1]), [0, 1]), "parameters.w.partition.sizes: add up to 3; expected 4, the axis's extent"),
    (server((0, [5, -1]), [0, 1]), "parameters.w.partition.sizes: -1 is negative"),
    (server((2, [4]), [0]), "parameters.w.partition.axis: is 2; expected 0 to 1"),
    (server((0, [2, 2]), [0]), "parameters.w.owners: 1 owner for 2 parts; give one owner for each part"),
    (server(None, [2]), "parameters.w.owners: owner 2 does not exist; owners are 0 to 1"),
    (server(None, [-1]), "parameters.w.owners: owner -1 does not exist; owners are 0 to 1"),
    (server(None, [1, 1]), "parameters.w.owners: lists an owner twice"),
    (server(), "parameters.w.owners: is empty; list at least one owner, or set kind: allreduce"),
    (server(None, [0], compressor="fp16"), "parameters.w.compressor: fp16 requires kind: allreduce"),
    (server(None, [0], sync=False, staleness=1), "parameters.w.staleness: 1 needs sync: true"),
])  # fmt: skip
def test_mistakes_of_custom_builders(assigned, message):
    """Parts that do not add up to a parameter would never be updated."""
    with pytest.raises(nd.ConfigError, match=re.escape(message)):
        _UserBuilder(assigned).build([nd.ParameterSpec("w", (4, 3))], 2)


def test_custom_builder_with_numpy_integers(tmp_path):
    sizes = np.bincount(np.array([0, 1, 1, 1]))
    builder = _UserBuilder(server((sizes[0] - 1, list(sizes)), list(sizes - 1)))
    strategy = builder.build([nd.ParameterSpec("w", (4, 3))], 3)
    strategy.save(tmp_path / "strategy.yaml")
    loaded = nd.Strategy.load(tmp_path / "strategy.yaml")
    assert loaded == strategy
    assert loaded.parameters["w"].partition == (0, [1, 3])
