"""Serial models of layers in AutoDist's scope: the numbers of one process, on virtual ranks and in a job."""

import contextlib
import sys

import numpy as np
import pytest
from cli_runs import call
from present import needs_mpirun

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


def layers(scope, function):
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
    step, found = function(model.train_batch), []
    for samples in (6, 6, 5):
        rng = np.random.default_rng(samples)
        x = rng.normal(size=(samples, 7, 6, 2))
        found.append(step(x, rng.integers(0, 5, samples)))
    found += [model.fprop(x), model.bprop(np.ones((5, 5)))]
    assert isinstance(model, nd.Convnet)
    assert str(model) == "Convnet"
    return [np.asarray(one) for one in found]


@pytest.mark.parametrize("strategy", ["PS", "AllReduce", "PartitionedPS", "Auto"])
def test_serial_models_of_layers(strategy):
    def on_grid(grid):
        d = nd.AutoDist(strategy=strategy, grid=grid)
        return layers(d.scope(), d.function)

    check(on_grid)


def test_a_scope_in_one_line():
    check(lambda grid: layers(nd.scope(None, "PS", grid), lambda step: step))


def check(on_grid):
    """Compare the numbers of a grid with those of one process."""

    def body(world):
        with nd.ProcessGrid(world, replicas=2, rows=2) as grid:
            return on_grid(grid)

    expected = layers(contextlib.nullcontext(), lambda step: step)
    for found in nd.loopback.run(4, body):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@needs_mpirun
@pytest.mark.long
def test_a_script_starts_itself_on_its_resources_and_prints_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = {}
    for ranks in (1, 2):
        cpus = list(range(ranks))
        (tmp_path / "resources.yaml").write_text(f"nodes: [{{address: localhost, cpus: {cpus}}}]")
        text = SCRIPT.replace('{"rows": 2}', f'{{"rows": {ranks}}}')
        (tmp_path / "script.py").write_text(text)
        code, out, err = call([sys.executable, "script.py", "a b", "--fail"], tmp_path)
        assert code == 3, err
        printed[ranks] = [line for line in out.splitlines() if line.startswith("['a b', '--fail']")]
    assert len(printed[1]) == 3
    assert printed[2] == [line.replace("] 1 ", "] 2 ") for line in printed[1]]
