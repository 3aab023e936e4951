"""Invalid strategies in experiments and files: exit code 2, an error with file and line, and no run."""

import pytest
from cli_runs import run_in_process

import neondist as nd
from neondist import strategies

EXPERIMENT = """!FitExperiment
dataset: !Synthetic {{shape: [6, 6, 1], classes: 3, train: 12, test: 4}}
model: !MLPDist
  layers:
    - !FCLayerDist {{out_features: 8}}
    - !FCLayerDist {{out_features: 3}}
batch_size: 4
strategy: {strategy}
"""
SPECS = {"fc1/weights": (36, 8), "fc1/bias": (8,), "fc2/weights": (8, 3), "fc2/bias": (3,)}

PARTITION_AND_OWNERS = "partition:\n      axis: 0\n      sizes: [18, 18]\n    owners: [0, 1]"


def write_strategy(tmp_path, ranks=2, change=("", ""), **shapes):
    """Write a strategy for the experiment's model with changed shapes; None removes a parameter."""
    specs = [nd.ParameterSpec(name, shape) for name, shape in (SPECS | shapes).items() if shape is not None]
    path = tmp_path / "s.yaml"
    strategies.PartitionedPS().build(specs, ranks).save(path)
    path.write_text(path.read_text().replace(*change, 1))
    lines = path.read_text().splitlines()
    return path, lambda text: next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


def run_invalid(tmp_path, strategy, *arguments):
    (tmp_path / "e.yaml").write_text(EXPERIMENT.format(strategy=strategy))
    code, out, err = run_in_process(tmp_path, "run", "e.yaml", "-n", 2, "--output", "out", *arguments)
    assert (code, out) == (2, "")
    assert not (tmp_path / "out").exists()
    return err


@pytest.mark.parametrize(("strategy", "message"), [
    ("PSS", "strategy: unknown builder 'PSS'; did you mean 'PS'"),
    ("!PSS {}", "did you mean"),
    ("PS(stale=1)", "PS has no argument 'stale'"),
    ("!PS {stalenes: 1}", "did you mean 'staleness'"),
    ("!AllReduce {chunk_size: 0}", "strategy.chunk_size: expected an integer of at least 1"),
    ("!AllReduce {compressor: gzip}", "strategy.compressor: invalid value 'gzip'"),
    ("!AllReduce {compressor: topk(0)}", "a share in (0, 1]"),
    ("!AllReduce {compressor: topk(1.01)}", "a share in (0, 1]"),
    ("!AllReduce {compressor: powersgd}", "invalid value 'powersgd'"),
    ("\"AllReduce(compressor='topk(2)')\"", "a share in (0, 1]"),
    ("!PS {staleness: 1, sync: false}", "staleness: 1 needs sync=True"),
    ("missing.yaml", "missing.yaml: no such file"),
    ("3", "strategy: expected an object"),
])  # fmt: skip
def test_invalid_builders_name_the_line(tmp_path, strategy, message):
    err = run_invalid(tmp_path, strategy)
    assert err.startswith("error: e.yaml:8: ")
    assert message in err


@pytest.mark.parametrize(("changes", "entry", "message"), [
    ({"fc2/weights": (8, 4)}, "fc2/weights:", "'fc2/weights' has shape (8, 4), but (8, 3) in the model"),
    ({"fc2/bias": None}, "format:", "no entry for parameter 'fc2/bias'"),
    ({"fc3/bias": (3,)}, "fc3/bias:", "'fc3/bias' is not in the model"),
    ({"ranks": 4}, "format:", "has 4 owners, but the job has 2 ranks"),
    ({"change": ("compressor: null", "compressor: zip")}, "fc1/weights:", "'zip'"),
    ({"change": ("compressor: null", "compressor: fp16")}, "fc1/weights:", "fp16 requires kind: allreduce"),
    ({"change": ("owners: [0, 1]", "owners: [0, 9]")}, "fc1/weights:", "owner 9 does not exist"),
    ({"change": ("owners: [0, 1]", "owners: []")}, "fc1/weights:", "list at least one owner, or set kind: allreduce"),
    ({"change": (PARTITION_AND_OWNERS, "partition: null\n    owners: [1, 1]")}, "fc1/weights:", "lists an owner twice"),
    ({"change": ("replicas: 2", "replicas: 9999999999999")}, "format:", "expected an integer from 1 to 1048576"),
])  # fmt: skip
def test_invalid_files_name_their_line(tmp_path, changes, entry, message):
    path, line_of = write_strategy(tmp_path, **changes)
    start = 1 if entry == "format:" else line_of(entry)
    for strategy, arguments in ((path, ()), ("AllReduce", ("--strategy", path))):
        err = run_invalid(tmp_path, strategy, *arguments)
        assert message in err
        line = int(err.split(f"{path}:")[1].split(":")[0])
        assert 0 <= line - start <= 12  # of the entry or one of its fields


def test_scalars_cannot_be_partitioned(tmp_path):
    path, line_of = write_strategy(tmp_path, change=("shape: [36, 8]", "shape: []"))
    err = run_invalid(tmp_path, path)
    assert f"{path}:{line_of('partition:')}: parameters.fc1/weights.partition: a scalar cannot be partitioned" in err


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "2 ranks form a single replica; set grid.replicas, or use sync: true"),
    (("--set", "grid.replicas=2", "--restarts", 1), "--restarts: applies to a single MPI job"),
    (("--set", "grid.replicas=2", "--resume"), "has no checkpoint to resume from; leave out --resume"),
])  # fmt: skip
def test_servers_require_replicas(tmp_path, arguments, message):
    assert message in run_invalid(tmp_path, "!PS {staleness: 1}", *arguments)
