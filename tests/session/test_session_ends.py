"""All ranks of a session stop after the same step, whoever asks; and roles decide who writes."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.comm import loopback
from neondist.train import Hook


class Steps(Hook):
    """Counts calls, and stops its rank alone where it is told to."""

    def __init__(self, stop_at=None):
        self.steps, self.ends, self.stop_at = [], [], stop_at

    def after_step(self, run):
        self.steps.append(run.step)
        if run.step == self.stop_at:
            run.stop = nd.train.Stop("this rank alone", code=0)

    def after_run(self, run):
        self.ends.append("after_run")

    def on_stop(self, run):
        self.ends.append("on_stop")

    def on_error(self, run, error):
        self.ends.append(type(error).__name__)


X, Y = np.ones((2, 3, 2, 1)), np.array([[0.0, 1.0]] * 2)


def model_on(grid):
    model = nd.MLPDist([nd.FCLayerDist(2)], cost=nd.MSE())
    model.build((3, 2, 1), 2, grid)
    return model


def session_on(grid, model=None, folder=None, hooks=(), task=None, **more):
    more = {"log_step_count_steps": None, **more}
    return nd.DistributedSession(task or nd.TaskSpecDef(), model or model_on(grid), folder, hooks, **more)


WAYS = "request", "hook", "time"


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from(["request", "hook", "time"])), max_size=4)
)
def test_all_ranks_stop_after_the_same_step(asked):
    """Whichever ranks ask, in whichever way and before whichever step."""
    expected = min([at for _, at, _ in asked], default=7)

    def body(world):
        grid = nd.ProcessGrid(world)
        mine = {at: how for rank, at, how in asked if rank == world.rank}
        hooks = [Steps(at) for at, how in mine.items() if how == "hook"]
        for at, how in mine.items():
            if how == "time":
                hooks.append(nd.StopAtTimeHook(at, clock=itertools.count(-1).__next__))
        hooks.append(nd.StopAtStepHook(7))
        session = session_on(grid, hooks=hooks)
        with session:
            while not session.should_stop():
                if mine.get(session.global_step + 1) == "request":
                    session.request_stop()
                session.run(model_step(session))
        return session.global_step

    assert loopback.run(3, body) == [expected] * 3


def test_a_hook_of_the_chief_stops_all():
    def body(world):
        session = session_on(nd.ProcessGrid(world), chief_only_hooks=[hook := Steps(3)])
        with session:
            while not session.should_stop():
                session.run(model_step(session))
        return session.global_step, hook.steps, hook.ends

    assert loopback.run(2, body) == [(3, [1, 2, 3], ["on_stop"]), (3, [], [])]


def test_a_session_without_a_model_counts_steps(tmp_path):
    for last in (3, 5):
        hook = Steps()
        with nd.DistributedSession(
            nd.TaskSpecDef(), checkpoint_dir=tmp_path, hooks=[hook, nd.StopAtStepHook(last)]
        ) as session:
            found = [session.run(lambda: 2 * session.global_step) for _ in iter(session.should_stop, True)]
        assert (found, hook.steps) == (([0, 2, 4], [1, 2, 3]) if last == 3 else ([6, 8], [4, 5]))


def test_a_worker_of_another_master_reads_and_writes_nothing(tmp_path):
    grid = nd.ProcessGrid.serial()
    master, worker = (nd.TaskSpecDef(kind, 0, worker_hosts="b:1", master="a:1") for kind in ("master", "worker"))
    with pytest.warns(UserWarning, match="trains alone"), session_on(grid, None, tmp_path, task=master) as session:
        session.run(model_step(session))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"checkpoint.h5", "checkpoint-00000000.h5", "checkpoint-00000001.h5", "complete.json"} <= before.keys()
    chief = Steps()
    with pytest.warns(UserWarning, match="worker 0 of a job of 2 trains alone"):
        session = session_on(grid, None, tmp_path, task=worker, chief_only_hooks=[chief])
    with session:
        assert session.global_step == 1
        session.run(model_step(session))
    assert chief.steps == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def model_step(session):
    model = session.state.model
    return lambda: model.train_batch(model.scatter(X), Y)


def test_a_failed_step_is_not_written(tmp_path):
    hook = Steps()

    def failing():
        with session_on(nd.ProcessGrid.serial(), None, tmp_path, [hook]) as session:
            session.run(model_step(session))
            session.run(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        failing()
    assert hook.ends == ["ZeroDivisionError"]
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["checkpoint-00000000.h5", "checkpoint.h5"]
    assert not (tmp_path / "complete.json").exists()
    with session_on(nd.ProcessGrid.serial(), None, tmp_path) as session:  # the lock is free
        assert session.global_step == 0


def test_summaries_and_lines(tmp_path, capsys):
    for last in (4, 7):
        with session_on(
            nd.ProcessGrid.serial(),
            None,
            tmp_path,
            [nd.StopAtStepHook(last)],
            save_summaries_steps=2,
            log_step_count_steps=3,
            save_checkpoint_steps=3,
        ) as session:
            for _ in iter(session.should_stop, True):
                session.run(model_step(session))
    steps = [int(found) for found in re.findall(r'"step": (\d+)', (tmp_path / "summaries.jsonl").read_text())]
    assert steps == [2, 4, 6]
    assert re.findall(r"step (\d+): loss [\d.]+, [\d.,]+ steps/s", capsys.readouterr().out) == ["3", "7"]
    kept = sorted(int(path.stem[11:]) for path in tmp_path.glob("checkpoint-*.h5"))
    assert kept == [0, 3, 4, 6, 7]


def test_weights_of_another_checkpoint_are_taken_once(tmp_path):
    grid = nd.ProcessGrid.serial()
    with session_on(grid, first := model_on(grid), tmp_path / "first", [nd.StopAtStepHook(2)]) as session:
        for _ in iter(session.should_stop, True):
            session.run(model_step(session))
    load = nd.LoadCheckpoint(tmp_path / "first" / "checkpoint.h5")
    for last, expected in ((1, first.state()), (2, None)):
        model = model_on(grid)
        with session_on(grid, model, tmp_path / "second", [load, nd.StopAtStepHook(last)]) as session:
            begun = model.state()
            session.run(model_step(session))
        assert expected is None or all((begun[name] == expected[name]).all() for name in expected)
    assert any((begun[name] != first.state()[name]).any() for name in begun)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"model": object()}, "model: expected a neondist model.*got object"),
    ({"model": nd.MLPDist([nd.FCLayerDist(2)])}, "not built"),
    ({"save_checkpoint_steps": 0}, "save_checkpoint_steps"),
    ({"task_spec": nd.TaskSpecDef("ps", 0, ps_hosts="a:1")}, "create_server"),
    ({"task_spec": nd.TaskSpecDef("evaluator")}, "checkpoint_dir"),
    ({"hooks": nd.StopAtStepHook(1)}, "hooks"),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.DistributedSession(**arguments)


def test_wrong_use_is_named(tmp_path):
    session = session_on(nd.ProcessGrid.serial())
    with pytest.raises(nd.NotReadyError, match=r"with nd\.DistributedSession"):
        session.should_stop()
    with (
        pytest.raises(nd.NotReadyError, match=r"session\.batches"),
        session_on(nd.ProcessGrid.serial(), hooks=[nd.train.ProgressBar()]),
    ):
        pass


def test_experiments_stop_by_the_hooks_of_sessions(tmp_path):
    dataset = nd.Synthetic((4, 4, 1), train=12, test=2)

    def body(world):
        experiment = nd.FitExperiment(dataset, nd.MLPDist([nd.FCLayerDist(4)]), batch_size=2, epochs=2)
        result = experiment.run(nd.ProcessGrid(world), tmp_path / "run", overwrite=True, hooks=[hooks.pop()(world)])
        return experiment.model.step, result.stop.code

    hooks = [lambda world: nd.StopAtStepHook(5)] * 2
    assert loopback.run(2, body) == [(5, 0)] * 2
    assert (tmp_path / "run" / "complete.json").exists()
    # rank 1 finds the time over in step 3, and all hear of it in step 4
    hooks = [lambda world: nd.StopAtTimeHook(3 if world.rank else 100, clock=itertools.count(-1).__next__)] * 2
    assert loopback.run(2, body) == [(4, 0)] * 2
