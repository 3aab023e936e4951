"""Coordinated stop of all ranks of a session, and the files that each role writes."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.comm import loopback
from neondist.errors import RemoteError
from neondist.train import Hook


class StepRecorder(Hook):
    """Record calls, and stop this rank alone after a step."""

    def __init__(self, stop_at=None):
        self.steps, self.ends, self.stop_at = [], [], stop_at

    def after_step(self, run):
        self.steps.append(run.step)
        if run.step == self.stop_at:
            run.stop = nd.train.Stop("this rank alone", exit_code=0)

    def after_run(self, run):
        self.ends.append("after_run")

    def on_stop(self, run):
        self.ends.append("on_stop")

    def on_error(self, run, error):
        self.ends.append(type(error).__name__)


X, Y = np.ones((2, 3, 2, 1)), np.array([[0.0, 1.0]] * 2)


def build_model(grid):
    model = nd.MLPDist([nd.FCLayerDist(2)], cost=nd.MSE())
    model.build((3, 2, 1), 2, grid)
    return model


def create_session(grid, model=None, folder=None, hooks=(), task=None, **options):
    options = {"log_step_count_steps": None, **options}
    return nd.DistributedSession(task or nd.TaskSpecDef(), model or build_model(grid), folder, hooks, **options)


STOP_KINDS = "request", "hook", "time"


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from(STOP_KINDS)), max_size=4))
def test_all_ranks_stop_after_the_same_step(requests):
    """Requests of any ranks, of any kind and before any step."""
    expected = min([step for _, step, _ in requests], default=7)

    def body(world):
        grid = nd.ProcessGrid(world)
        own_requests = {step: kind for rank, step, kind in requests if rank == world.rank}
        hooks = [StepRecorder(step) for step, kind in own_requests.items() if kind == "hook"]
        for step, kind in own_requests.items():
            if kind == "time":
                hooks.append(nd.StopAtTimeHook(step, clock=itertools.count(-1).__next__))
        hooks.append(nd.StopAtStepHook(7))
        session = create_session(grid, hooks=hooks)
        with session:
            while not session.should_stop():
                if own_requests.get(session.global_step + 1) == "request":
                    session.request_stop()
                session.run(make_step(session))
        return session.global_step

    assert loopback.run(3, body) == [expected] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_between_steps(ranks):
    def body(world):
        session, loops = create_session(nd.ProcessGrid(world)), 0
        with session:
            while not session.should_stop():
                session.run(make_step(session))
                if session.global_step >= 3:
                    session.request_stop()
                loops += 1
        return session.global_step, loops

    steps = 3 if ranks == 1 else 4  # several ranks agree after a step
    assert loopback.run(ranks, body) == [(steps, steps)] * ranks


def test_chief_hook_stops_all_ranks():
    def body(world):
        session = create_session(nd.ProcessGrid(world), chief_only_hooks=[hook := StepRecorder(3)])
        with session:
            while not session.should_stop():
                session.run(make_step(session))
        return session.global_step, hook.steps, hook.ends

    assert loopback.run(2, body) == [(3, [1, 2, 3], ["on_stop"]), (3, [], [])]


def test_session_without_a_model_counts_steps(tmp_path):
    for last in (3, 5):
        hook = StepRecorder()
        with nd.DistributedSession(
            nd.TaskSpecDef(), checkpoint_dir=tmp_path, hooks=[hook, nd.StopAtStepHook(last)]
        ) as session:
            results = [session.run(lambda: 2 * session.global_step) for _ in iter(session.should_stop, True)]
        assert (results, hook.steps) == (([0, 2, 4], [1, 2, 3]) if last == 3 else ([6, 8], [4, 5]))


def test_worker_reads_but_writes_nothing(tmp_path):
    grid = nd.ProcessGrid.serial()
    master, worker = (nd.TaskSpecDef(kind, 0, worker_hosts="b:1", master="a:1") for kind in ("master", "worker"))
    with pytest.warns(UserWarning, match="trains alone"), create_session(grid, None, tmp_path, task=master) as session:
        session.run(make_step(session))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"checkpoint.h5", "checkpoint-00000000.h5", "checkpoint-00000001.h5", "complete.json"} <= before.keys()
    chief = StepRecorder()
    with pytest.warns(UserWarning, match="worker 0 of a job of 2 trains alone"):
        session = create_session(grid, None, tmp_path, task=worker, chief_only_hooks=[chief])
    with session:
        assert session.global_step == 1
        session.run(make_step(session))
    assert chief.steps == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def make_step(session):
    model = session.state.model
    return lambda: model.train_batch(model.scatter(X), Y)


def test_failed_step_is_not_saved(tmp_path):
    hook = StepRecorder()

    def run_failing_step():
        with create_session(nd.ProcessGrid.serial(), None, tmp_path, [hook]) as session:
            session.run(make_step(session))
            session.run(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run_failing_step()
    assert hook.ends == ["ZeroDivisionError"]
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["checkpoint-00000000.h5", "checkpoint.h5"]
    assert not (tmp_path / "complete.json").exists()
    with create_session(nd.ProcessGrid.serial(), None, tmp_path) as session:  # the lock is free
        assert session.global_step == 0


def test_summaries_and_log_lines(tmp_path, capsys):
    for last in (4, 7):
        with create_session(
            nd.ProcessGrid.serial(),
            None,
            tmp_path,
            [nd.StopAtStepHook(last)],
            save_summaries_steps=2,
            log_step_count_steps=3,
            save_checkpoint_steps=3,
        ) as session:
            for _ in iter(session.should_stop, True):
                session.run(make_step(session))
    steps = [int(step) for step in re.findall(r'"step": (\d+)', (tmp_path / "summaries.jsonl").read_text())]
    assert steps == [2, 4, 6]
    assert re.findall(r"step (\d+): loss [\d.]+, [\d.,]+ steps/s", capsys.readouterr().out) == ["3", "7"]
    saved_steps = sorted(int(path.stem[11:]) for path in tmp_path.glob("checkpoint-*.h5"))
    assert saved_steps == [0, 3, 4, 6, 7]


def test_initial_checkpoint_is_loaded_once(tmp_path):
    grid = nd.ProcessGrid.serial()
    with create_session(grid, first := build_model(grid), tmp_path / "first", [nd.StopAtStepHook(2)]) as session:
        for _ in iter(session.should_stop, True):
            session.run(make_step(session))
    load = nd.LoadCheckpoint(tmp_path / "first" / "checkpoint.h5")
    for last, expected in ((1, first.state()), (2, None)):
        model = build_model(grid)
        with create_session(grid, model, tmp_path / "second", [load, nd.StopAtStepHook(last)]) as session:
            initial = model.state()
            session.run(make_step(session))
        assert expected is None or all((initial[name] == expected[name]).all() for name in expected)
    assert any((initial[name] != first.state()[name]).any() for name in initial)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"model": object()}, "model: expected a neondist model.*got object"),
    ({"model": nd.MLPDist([nd.FCLayerDist(2)])}, "not built"),
    ({"save_checkpoint_steps": 0}, "save_checkpoint_steps"),
    ({"task_spec": nd.TaskSpecDef("ps", 0, ps_hosts="a:1")}, "create_server"),
    ({"task_spec": nd.TaskSpecDef("evaluator")}, "checkpoint_dir"),
    ({"hooks": nd.StopAtStepHook(1)}, "hooks"),
])  # fmt: skip
def test_invalid_arguments(arguments, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.DistributedSession(**arguments)


def test_invalid_use(tmp_path):
    session = create_session(nd.ProcessGrid.serial())
    with pytest.raises(nd.NotReadyError, match=r"with nd\.DistributedSession"):
        session.should_stop()
    with (
        pytest.raises(nd.NotReadyError, match=r"session\.batches"),
        create_session(nd.ProcessGrid.serial(), hooks=[nd.train.ProgressBar()]),
    ):
        pass


def test_session_hooks_stop_experiments(tmp_path):
    dataset = nd.Synthetic((4, 4, 1), train=12, test=2)

    def body(world):
        experiment = nd.FitExperiment(dataset, nd.MLPDist([nd.FCLayerDist(4)]), batch_size=2, epochs=2)
        result = experiment.run(nd.ProcessGrid(world), tmp_path / "run", overwrite=True, hooks=[hooks.pop()(world)])
        return experiment.model.step, result.stop.exit_code

    hooks = [lambda world: nd.StopAtStepHook(5)] * 2
    assert loopback.run(2, body) == [(5, 0)] * 2
    assert (tmp_path / "run" / "complete.json").exists()
    # the time is up on rank 1 in step 3; all ranks stop after step 4
    hooks = [lambda world: nd.StopAtTimeHook(3 if world.rank else 100, clock=itertools.count(-1).__next__)] * 2
    assert loopback.run(2, body) == [(4, 0)] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the exit of the timer's thread
def test_ended_session_aborts_ranks_that_are_still_running(capfd):
    def body(world):
        other = world.split(0, world.rank)
        with nd.ProcessGrid(world) as grid, create_session(grid, stop_grace_period_secs=0.05):
            if grid.rank == 1:
                other.bcast(None)  # never sent

    with pytest.raises(RemoteError, match="another virtual rank failed"):
        loopback.run(2, body)
    text = "rank 0 of 2: the session ended at step 0, but other ranks are still running after stop_grace_period_secs;"
    assert f"{text} aborting the job. Leave the loop on all ranks after the same step" in capfd.readouterr().err
