"""Equal training runs on all grids of virtual ranks."""

import json

import numpy as np
import pytest
from toy_training import Recorder, make_experiment
from training_records import read_metrics

from neondist.comm import ProcessGrid, loopback
from neondist.costs import SumSquared
from neondist.data import Synthetic
from neondist.errors import DataError, OutputError
from neondist.layers import AvgPoolingLayerDist, ConvLayerDist, FCLayerDist
from neondist.metrics import LogLoss, TopK
from neondist.models import ConvnetDist
from neondist.optim import Adam
from neondist.train import FitExperiment, Hook

UNCOMPARED_FIELDS = ("seconds", "samples_per_second", "bytes_sent", "bytes_summed")


def select_values(history):
    return [[value for name, value in record.items() if name not in UNCOMPARED_FIELDS] for record in history]


def train(ranks, grid=None, make=make_experiment, **options):
    """Train on virtual ranks; return every rank's history and weights."""

    def body(transport):
        experiment = make(grid=grid)
        history = experiment.run(experiment.open_grid(transport), hooks=[], **options).history
        return history, experiment.model.state()

    return loopback.run(ranks, body)


GRIDS = [
    (1, None), (2, None), (3, None), (4, None), (4, {"rows": 1}), (6, {"rows": 2}), (9, None),
    (2, {"replicas": 2}), (4, {"replicas": 2}), (6, {"replicas": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "grid"), GRIDS)
@pytest.mark.long
def test_training_is_the_same_on_every_grid(ranks, grid):
    def make(**fields):
        return make_experiment(optimizer=Adam(0.01, weight_decay=0.01), metrics=[TopK(2), LogLoss()], **fields)

    (expected, weights), *_ = train(1, make=make)
    for history, state in train(ranks, grid, make=make):
        np.testing.assert_allclose(select_values(history), select_values(expected), rtol=1e-10)
        for name, array in state.items():
            np.testing.assert_allclose(array, weights[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("ranks", "grid"), GRIDS)
@pytest.mark.long
def test_last_batch_smaller_than_the_replicas(ranks, grid):
    def make(**fields):
        return make_experiment(1, dataset=lambda: Synthetic((13, 11, 2), classes=4, train=11, test=1), **fields)

    (expected, _), *_ = train(1, make=make)
    for history, _ in train(ranks, grid, make=make):
        np.testing.assert_allclose(select_values(history), select_values(expected), rtol=1e-10)


def test_sum_squared_on_every_grid():
    def make(**fields):
        layers = [ConvLayerDist(3, 3), AvgPoolingLayerDist(2), FCLayerDist(4)]
        model = ConvnetDist(layers, cost=SumSquared(), dtype="float64")
        data = Synthetic((9, 8, 1), classes=4, train=20, test=5)
        return FitExperiment(data, model, batch_size=8, **fields)

    (expected, _), *_ = train(1, make=make)
    np.testing.assert_allclose(select_values(train(4, make=make)[0][0]), select_values(expected), rtol=1e-10)


def test_bytes_sent_include_all_ranks():
    assert [history[0]["bytes_sent"] for history, _ in train(1)] == [0]
    sent = {history[0]["bytes_sent"] for history, _ in train(4)}
    assert len(sent) == 1
    assert sent.pop() > 0


@pytest.mark.long
def test_checkpoint_of_four_ranks_resumes_on_three(tmp_path):
    (expected, weights), *_ = train(1, make=lambda **f: make_experiment(3, **f))
    train(4, make=lambda **f: make_experiment(1, **f), output=tmp_path)
    for history, state in train(3, make=lambda **f: make_experiment(3, **f), output=tmp_path, resume=True):
        np.testing.assert_allclose(select_values(history), select_values(expected), rtol=1e-10)
        for name, array in state.items():
            np.testing.assert_allclose(array, weights[name], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(select_values(read_metrics(tmp_path)), select_values(expected), rtol=1e-10)


def test_only_rank_0_writes_and_all_list_the_files(tmp_path):
    def body(transport):
        experiment = make_experiment(1)
        grid = ProcessGrid(transport)
        return [path.name for path in experiment.run(grid, tmp_path, yaml_text="text\n", hooks=[]).files]

    names = loopback.run(3, body)
    assert names[0] == names[1] == names[2]
    assert names[0][:5] == ["experiment.yaml", "environment.json", "strategy.yaml", "metrics.jsonl", "checkpoint.h5"]
    assert json.loads((tmp_path / "environment.json").read_text())["ranks"] == 3


def collect_errors(ranks, action):
    """Call an action on every virtual rank; return the error of each rank, or None."""

    def body(transport):
        try:
            action(transport)
        except Exception as error:
            return error
        return None

    return loopback.run(ranks, body)


def test_all_ranks_raise_if_the_output_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("in the way")
    errors = collect_errors(3, lambda t: make_experiment(1).run(ProcessGrid(t), tmp_path / "file" / "out", hooks=[]))
    assert [type(error) for error in errors] == [OutputError] * 3
    assert "out: the folder cannot be created (Not a directory)" in str(errors[2])


def test_all_ranks_raise_if_there_is_nothing_to_resume(tmp_path):
    errors = collect_errors(
        3, lambda t: make_experiment(1).run(ProcessGrid(t), tmp_path / "none", resume=True, hooks=[])
    )
    assert [type(error) for error in errors] == [DataError] * 3


def test_all_ranks_raise_if_the_checkpoint_is_not_writable(tmp_path):
    class BlockCheckpoint(Hook):
        def after_step(self, run):
            if run.is_first_rank and run.step == 5:
                before.append((tmp_path / "checkpoint.h5").read_bytes())
                (tmp_path / "checkpoint.h5.partial").mkdir()

    before = []
    errors = collect_errors(2, lambda t: make_experiment(1).run(ProcessGrid(t), tmp_path, hooks=[BlockCheckpoint()]))
    assert [type(error) for error in errors] == [OutputError] * 2
    assert "checkpoint.h5: the checkpoint cannot be written (Is a directory)" in str(errors[1])
    assert (tmp_path / "checkpoint.h5").read_bytes() == before[0]


def test_hooks_are_called_on_every_rank():
    def body(transport):
        hook = Recorder()
        make_experiment(1).run(ProcessGrid(transport), hooks=[hook])
        return hook.calls

    calls = loopback.run(3, body)
    assert calls[0] == calls[1] == calls[2]
