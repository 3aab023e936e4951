"""Builders of strategies: rules, balance, determinism, files and messages."""

import re
import string
import tempfile

import pytest
from builders import BUILDERS
from hypothesis import given
from hypothesis import strategies as st

import neondist as nd
import yaml
from neondist import strategies
from neondist.config import load_experiment
from neondist.registry import registered
from neondist.strategies import ParameterSpec, Strategy
from neondist.strategies.partition import part_bytes, smallest_divisor, smallest_non_divisor

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


def test_every_builder_is_tried_here():
    assert {text.partition("(")[0] for text in BUILDERS} == set(registered(strategies.StrategyBuilder))


@given(specs, st.integers(1, 7), st.sampled_from(sorted(BUILDERS)))
def test_parts_cover_each_parameter_and_files_keep_everything(parameters, ranks, text):
    built = strategies.as_builder(text).build(parameters, ranks)
    assert list(built.parameters) == [spec.name for spec in parameters]
    for spec in parameters:
        one = built.parameters[spec.name]
        assert all(0 <= owner < ranks for owner in one.owners)
        if one.partition is not None:
            axis, sizes = one.partition
            assert sum(sizes) == spec.shape[axis]
            assert min(sizes) > 0
            assert len(sizes) == len(one.owners) > 1
        assert sum(part_bytes(spec, one.partition)) == spec.nbytes
        assert spec.shape or one.partition is None
    with tempfile.TemporaryDirectory() as folder:
        built.save(f"{folder}/strategy.yaml")
        loaded = Strategy.load(f"{folder}/strategy.yaml")
    assert loaded == built == strategies.as_builder(built.builder).build(parameters, ranks)
    assert loaded.digest == built.digest
    assert all(spec.name in str(built) for spec in parameters)
    built.check_model(parameters)


@pytest.mark.parametrize(
    ("n", "divisor", "other"),
    [(1, 1, 1), (2, 2, 2), (3, 3, 2), (4, 2, 3), (6, 2, 4), (7, 7, 2), (12, 2, 5), (35, 5, 2)],
)
def test_numbers_of_parts(n, divisor, other):
    assert (smallest_divisor(n), smallest_non_divisor(n)) == (divisor, other)


@given(st.integers(2, 500))
def test_numbers_of_parts_by_definition(n):
    assert smallest_divisor(n) == min(i for i in range(2, n + 1) if n % i == 0)
    assert smallest_non_divisor(n) == min([i for i in range(2, n) if n % i] or [n])


def kinds(builder, *shapes, ranks=2, sparse=()):
    parameters = [ParameterSpec(f"p{at}", shape, sparse=at in sparse) for at, shape in enumerate(shapes)]
    return list(builder.build(parameters, ranks).parameters.values())


def test_rules_of_each_builder():
    assert [one.group for one in kinds(strategies.AllReduce(2), (1,), (1,), (1,))] == [0, 0, 1]
    assert [one.owners for one in kinds(strategies.PS(), (9,), (9,))] == [[0], [0]]
    assert [one.owners for one in kinds(strategies.PSLoadBalancing(), (1,), (9,), (4,), (3,))] == [[1], [0], [1], [1]]
    assert [one.partition for one in kinds(strategies.PartitionedPS(), (6, 2), (7,), ())] == [
        (0, [3, 3]),
        (0, [1] * 7),
        None,
    ]
    assert kinds(strategies.UnevenPartitionedPS(), (8, 2))[0].partition == (0, [3, 3, 2])
    dense, rows = kinds(strategies.Parallax(), (5, 2), (5, 2), sparse={1})
    assert (dense.kind, rows.kind, rows.owners) == ("allreduce", "server", [0])
    assert kinds(strategies.ShardedOptimizer(), (5,), ranks=3)[0].owners == [0, 1, 2]
    axes = {kinds(strategies.RandomAxisPartitionAR(seed=seed), (4, 1, 6))[0].partition[0] for seed in range(20)}
    assert axes == {0, 2}
    assert kinds(strategies.RandomAxisPartitionAR(seed=5), (4, 6), sparse={0})[0].partition[0] == 0


def resnet_50():
    """Return the shapes of ResNet-50's parameters, norms and biases included."""
    found, channels = [(7, 7, 3, 64), (64,), (64,)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convs = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            for conv in [*convs, *([(1, 1, channels, 4 * width)] if block == 0 else [])]:
                found += [conv, conv[-1:], conv[-1:]]
            channels = 4 * width
    return [*found, (2048, 1000), (1000,)]


def vgg_16():
    """Return the shapes of VGG-16's parameters, of which the first dense layer has three quarters."""
    found, channels = [], 3
    for width, convs in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convs):
            found += [(3, 3, channels, width), (width,)]
            channels = width
    for shape in ((25088, 4096), (4096, 4096), (4096, 1000)):
        found += [shape, shape[-1:]]
    return found


@pytest.mark.parametrize(("shapes", "builder", "ranks"), [
    *((resnet_50(), builder, ranks) for ranks in (2, 4, 8) for builder in (
        strategies.PSLoadBalancing(), strategies.PartitionedPS(), strategies.UnevenPartitionedPS(),
        strategies.PartitionedAllReduce(), strategies.ShardedOptimizer(),
    )),
    (vgg_16(), strategies.PartitionedPS(), 2), (vgg_16(), strategies.UnevenPartitionedPS(), 4),
    (vgg_16(), strategies.ShardedOptimizer(), 4), (vgg_16(), strategies.ShardedOptimizer(), 8),
])  # fmt: skip
def test_owners_hold_about_as_much(shapes, builder, ranks):
    parameters = [ParameterSpec(f"p{at}", shape) for at, shape in enumerate(shapes)]
    loads = builder.build(parameters, ranks).loads
    assert max(loads) <= 1.2 * sum(loads) / ranks


def test_no_owner_has_more_than_the_largest_part_above_the_mean():
    """The bound of the greedy rule, where one parameter outweighs all others."""
    parameters = [ParameterSpec(f"p{at}", shape) for at, shape in enumerate(vgg_16())]
    for ranks in (2, 4, 8):
        loads = strategies.PSLoadBalancing().build(parameters, ranks).loads
        assert max(loads) == max(spec.nbytes for spec in parameters)  # it is alone on its owner


@pytest.mark.parametrize(("make", "says"), [
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
    (lambda: ParameterSpec("a", (2,), "float33"), "float33"),
    (lambda: ParameterSpec("", (2,)), "name"),
])  # fmt: skip
def test_bad_arguments(make, says):
    with pytest.raises(nd.ConfigError) as error:
        make()
    assert says in str(error.value)


def saved(tmp_path, **changes):
    """Write a strategy of one parameter, fields of which are changed."""
    path = tmp_path / "s.yaml"
    strategies.PartitionedPS().build([ParameterSpec("w", (4, 2))], 2).save(path)
    content = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        (content if name in content else content["parameters"]["w"])[name] = value
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize(("changes", "field", "says"), [
    ({"format": 2}, "format", "expected 1"),
    ({"replicas": 0}, "replicas", "at least 1"),
    ({"builder": 1}, "builder", "expected text"),
    ({"kind": "gossip"}, "kind", "allreduce or server"),
    ({"owners": [0, 7]}, "owners", "owner 7"),
    ({"owners": [0]}, "owners", "1 owners for 2"),
    ({"partition": {"axis": 2, "sizes": [4]}}, "axis", "has 2 axes"),
    ({"partition": {"axis": 0, "sizes": [3]}}, "sizes", "add up to 3"),
    ({"shape": []}, "partition", "scalar"),
    ({"compressor": "zip"}, "w", "zip"),
    ({"compressor": "topk(1.5)"}, "w", "(0, 1]"),
    ({"compressor": "fp16"}, "compressor", "needs kind: allreduce"),
    ({"compressor": "fp16", "kind": "allreduce"}, "compressor", "owners: []"),
    ({"sync": "yes!"}, "sync", "true or false"),
    ({"staleness": -1}, "staleness", "at least 0"),
    ({"staleness": 2, "sync": False}, "staleness", "sync: true"),
    ({"extra": 1}, "extra", "unknown field"),
])  # fmt: skip
def test_bad_files_name_file_line_and_field(tmp_path, changes, field, says):
    path = saved(tmp_path, **changes)
    with pytest.raises(nd.ConfigError) as error:
        Strategy.load(path)
    found = re.fullmatch(rf"{re.escape(str(path))}:(\d+): (?:parameters\.w\.)?(\S+): (.*)", str(error.value))
    assert found, str(error.value)
    line = path.read_text().splitlines()[int(found[1]) - 1]
    assert line.strip().startswith(f"{field}:")
    assert says in found[3]


def test_a_strategy_for_another_model_names_the_first_difference():
    built = strategies.AllReduce().build([ParameterSpec("a", (2,)), ParameterSpec("b", (3,))], 2)
    for other, says in (
        ([ParameterSpec("a", (2,)), ParameterSpec("b", (4,))], "'b' has shape (3,), but (4,)"),
        ([ParameterSpec("a", (2,)), ParameterSpec("c", (3,))], "no entry for parameter 'c'"),
        ([ParameterSpec("a", (2,))], "'b' does not exist"),
        ([ParameterSpec("a", (2,), "float64"), ParameterSpec("b", (3,))], "dtype float32, but float64"),
    ):
        with pytest.raises(nd.ConfigError) as error:
            built.check_model(other)
        assert says in str(error.value)


def test_builders_are_tags_of_yaml_files(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("!PS\nstaleness: 2\n")
    assert load_experiment(path, top="StrategyBuilder").staleness == 2
    path.write_text("!PS\nstaleness: 2\nsync: false\n")
    with pytest.raises(nd.ConfigError, match=r"s\.yaml:2: staleness: 2 needs sync=True"):
        load_experiment(path, top="StrategyBuilder")
