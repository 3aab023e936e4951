"""Serial models of layers in an AutoDist scope: the results of one process, on virtual ranks and in a job."""

import contextlib
import sys

import numpy as np
import pytest
from availability import needs_mpirun
from cli_runs import run_command

import neondist as nd

SCRIPT = """
import sys
import numpy as np
import neondist as nd

d = nd.AutoDist("resources.yaml", "PartitionedPS", grid={"rows": 2})
with d.scope():
    model = nd.Convnet([nd.ConvLayer(3, 3, padding=1), nd.FCLayer(5)], dtype="float64")
model.build((7, 6, 2), 6)

@d.function
def train_step(x, y):
    return model.train_batch(x, y)

rng = np.random.default_rng(0)
for step in range(3):
    print(sys.argv[1:], d.grid.size, f"{train_step(rng.normal(size=(6, 7, 6, 2)), rng.integers(0, 5, 6)):.9f}")
if "--fail" in sys.argv:
    sys.exit(3)
"""


def train_layers(scope, function):
    """Return losses, outputs and gradients of a serial model of layers."""
    with scope:
        model = nd.Convnet(
            [
                nd.ConvLayer(3, 3, padding=1, activation=nd.ReLU()),
                nd.BatchNormLayer(),
                [nd.DropoutLayer(0.2)],
                nd.FCLayer(5),
            ],
            optimizer=nd.Adam(0.01),
            dtype="float64",
        )
        model.build((7, 6, 2), 6)
    step, results = function(model.train_batch), []
    for samples in (6, 6, 5):
        rng = np.random.default_rng(samples)
        x = rng.normal(size=(samples, 7, 6, 2))
        results.append(step(x, rng.integers(0, 5, samples)))
    results += [model.fprop(x), model.bprop(np.ones((5, 5)))]
    assert isinstance(model, nd.Convnet)
    assert model.display_name == "Convnet"
    return [np.asarray(array) for array in results]


@pytest.mark.parametrize("strategy", ["PS", "AllReduce", "PartitionedPS", "Auto"])
def test_serial_models_of_layers(strategy):
    def train_on_grid(grid):
        d = nd.AutoDist(strategy=strategy, grid=grid)
        return train_layers(d.scope(), d.function)

    check_against_one_process(train_on_grid)


def test_scope_function():
    check_against_one_process(lambda grid: train_layers(nd.scope(None, "PS", grid), lambda step: step))


def check_against_one_process(train_on_grid):
    """Compare the results on a grid with those of one process."""

    def body(world):
        with nd.ProcessGrid(world, replicas=2, rows=2) as grid:
            return train_on_grid(grid)

    expected = train_layers(contextlib.nullcontext(), lambda step: step)
    for results in nd.loopback.run(4, body):
        for actual, reference in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, reference, rtol=1e-9, atol=1e-12)


@needs_mpirun
@pytest.mark.long
def test_script_launches_its_ranks_and_prints_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = {}
    for ranks in (1, 2):
        cpus = list(range(ranks))
        (tmp_path / "resources.yaml").write_text(f"nodes: [{{address: localhost, cpus: {cpus}}}]")
        text = SCRIPT.replace('{"rows": 2}', f'{{"rows": {ranks}}}')
        (tmp_path / "script.py").write_text(text)
        code, out, err = run_command([sys.executable, "script.py", "a b", "--fail"], tmp_path)
        assert code == 3, err
        printed[ranks] = [line for line in out.splitlines() if line.startswith("['a b', '--fail']")]
    assert len(printed[1]) == 3
    assert printed[2] == [line.replace("] 1 ", "] 2 ") for line in printed[1]]


def test_strategy_is_the_one_built_for_a_model_of_layers():
    def body(world):
        with nd.ProcessGrid(world, replicas=2, rows=1, cols=1) as grid:
            d = nd.AutoDist(strategy="PSLoadBalancing", grid=grid)
            with d.scope():
                model = nd.MLP([nd.FCLayer(3)])
                requested = d.strategy
                model.build((4,), batch_size=2)
            return requested, d.strategy

    for requested, built in nd.loopback.run(2, body):
        assert isinstance(requested, nd.strategies.PSLoadBalancing)
        assert built.parameters["fc1/weights"].kind == "server"
