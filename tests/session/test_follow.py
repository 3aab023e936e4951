"""Continuous evaluation: each checkpoint once, in the order of steps, until the job is complete."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_records import read_metrics

import neondist as nd
from neondist.cli import main
from neondist.comm import SingleTransport, loopback
from neondist.session.checkpoint_follower import CheckpointFollower
from neondist.train import evaluate_checkpoint


def create_session(folder, last=6, every=2):
    """Return a session that trains in a folder up to a step, with its model and data set."""
    model = make_experiment().model
    dataset = nd.Synthetic((4, 4, 1), train=12, test=3)
    grid = nd.ProcessGrid.serial()
    dataset.open(grid)
    model.build(dataset.sample_shape, 4, grid)
    job = nd.DistributedSession(
        nd.TaskSpecDef(),
        model,
        folder,
        [nd.StopAtStepHook(last)],
        save_checkpoint_steps=every,
        log_step_count_steps=None,
    )
    return job, model, dataset


def make_experiment(**fields):
    model = nd.MLPDist([nd.FCLayerDist(4)], optimizer=nd.SGD(0.5), seed=2)
    return nd.FitExperiment(nd.Synthetic((4, 4, 1), train=12, test=3), model, batch_size=4, epochs=2, **fields)


def train(folder, last=6, every=2):
    job, model, dataset = create_session(folder, last, every)
    with job:
        for x, y in job.batches(dataset, 4):
            job.run(model.train_batch, x, y)


EVENTS = st.lists(st.sampled_from(["step", "step", "poll"]), max_size=40)


@settings(max_examples=8, deadline=None)
@given(events=EVENTS, every=st.integers(1, 3))
def test_checkpoints_are_visited_once_in_order(tmp_path_factory, events, every):
    """Polls at arbitrary times visit all checkpoints that exist then."""
    folder = tmp_path_factory.mktemp("followed")
    job, model, dataset = create_session(folder, 100, every)
    steps, existing = [], set()

    def poll():
        existing.update(int(path.stem[11:]) for path in folder.glob("checkpoint-*.h5"))
        while (pending := follower.wait_for_next()) is not None:
            follower.process(pending, lambda file, progress: steps.append(progress.step))

    follower = CheckpointFollower(folder, SingleTransport(), interval=1.0, max_time=0.0)  # never waits
    poll()
    with job:
        batches = job.batches(dataset, 4)
        for event in events:
            if event == "poll":
                poll()
            else:
                job.run(model.train_batch, *next(batches))
        batches.close()
        job.request_stop()
    poll()
    assert steps == sorted(set(steps)) == sorted(existing)
    assert steps[-1] == job.global_step


def test_running_job_is_followed(tmp_path):
    """The job continues while the follower sleeps between two polls."""
    job, model, dataset = create_session(tmp_path, 6, 2)
    with job:
        batches = job.batches(dataset, 4)

        def continue_job(seconds):
            assert seconds == 5.0
            if not job.should_stop():
                job.run(model.train_batch, *next(batches))
            else:
                job.__exit__(None, None, None)

        follower, steps = CheckpointFollower(tmp_path, SingleTransport(), interval=5.0, sleep=continue_job), []
        while (pending := follower.wait_for_next()) is not None:
            assert follower.process(pending, lambda file, progress: steps.append(progress.step))
        assert steps == [0, 2, 4, 6]
        batches.close()


def test_removed_checkpoint_is_skipped(tmp_path, capsys):
    train(tmp_path)
    follower = CheckpointFollower(tmp_path, SingleTransport())
    first = follower.wait_for_next()
    first.path.unlink()
    assert not follower.process(first, lambda file, progress: None)
    assert "checkpoint-00000000.h5 was removed before evaluation" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:700], lambda data: b"", lambda data: data[::-1]]
)
def test_damaged_checkpoint_is_skipped(tmp_path, capsys, ranks, damage):
    """Report it once, evaluate the next ones, and evaluate it if it is complete in time."""
    train(tmp_path)
    first, second = (tmp_path / f"checkpoint-{step:08d}.h5" for step in (0, 2))
    intact = first.read_bytes()
    for path in (first, second):
        path.write_bytes(damage(path.read_bytes()))

    def follow(world):
        follower, steps, versions = CheckpointFollower(tmp_path, world), [], [damage(intact)[:100], intact]
        while (pending := follower.wait_for_next()) is not None:
            follower.process(pending, lambda file, progress: steps.append(progress.step))
            if world.rank == 0 and versions:
                first.write_bytes(versions.pop(0))
        return steps

    assert loopback.run(ranks, follow) == [[0, 4, 6]] * ranks
    lines = [line for line in capsys.readouterr().err.splitlines() if "waiting for the next checkpoint: " in line]
    assert [path.name in line for path, line in zip((first, second), lines, strict=True)] == [True, True]


def test_checkpoint_of_another_model_is_rejected(tmp_path):
    train(tmp_path)
    experiment = make_experiment()
    experiment.model = nd.MLPDist([nd.FCLayerDist(5)], optimizer=nd.SGD(0.5))
    with pytest.raises(nd.DataError):
        nd.session.follow_checkpoints(experiment, tmp_path, nd.ProcessGrid.serial(), tmp_path / "out")


@pytest.mark.parametrize("ranks", [1, 2])
def test_records_match_checkpoints(tmp_path, ranks, capsys):
    pytest.importorskip("tensorboardX")
    train(tmp_path)

    def body(world):
        experiment = make_experiment(loggers=[nd.TensorBoard()], metrics=[nd.Accuracy()])
        return nd.session.follow_checkpoints(experiment, tmp_path, nd.ProcessGrid(world), tmp_path / "out")

    records_by_rank = loopback.run(ranks, body)
    records = read_metrics(tmp_path / "out")
    assert [record["step"] for record in records] == [0, 2, 4, 6] == [record["step"] for record in records_by_rank[-1]]
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in printed if line.startswith("{")] == records
    for record in records:
        path = tmp_path / f"checkpoint-{record['step']:08d}.h5"
        expected = evaluate_checkpoint(make_experiment(), path, nd.ProcessGrid.serial())
        assert record["test_loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert record["test_error"] == expected["error"]
    assert list((tmp_path / "out" / "tensorboard").iterdir())
    train(tmp_path, 8)
    with (tmp_path / "out" / "metrics.jsonl").open("a") as log:
        log.write('{"epoch": 9')  # an evaluator killed during a write
    assert [[record["step"] for record in rank_records] for rank_records in loopback.run(ranks, body)] == [[8]] * ranks
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [0, 2, 4, 6, 8]


def test_evaluator_role(tmp_path, capsys):
    train(tmp_path)
    _, model, dataset = create_session(tmp_path)
    hook = nd.StopAtStepHook(4)
    with nd.DistributedSession(nd.TaskSpecDef("evaluator"), model, tmp_path, [hook]) as evaluator:
        steps = []
        while not evaluator.should_stop():
            results = evaluator.run(nd.train.evaluate, model, dataset.test, 4)
            steps.append((evaluator.global_step, results["loss"]))
    assert [step for step, _ in steps] == [0, 2, 4]
    records = read_metrics(tmp_path / "evaluation")
    assert [(record["step"], record["loss"]) for record in records] == steps
    with nd.DistributedSession(nd.TaskSpecDef("evaluator"), model, tmp_path) as evaluator:
        assert not evaluator.should_stop()
        for wrong, message in (
            ({"step": 1}, "'step', which each record has"),
            (None, "returns NoneType as 'loss'"),
            ({"a": "b"}, "returns str as 'a'"),
        ):
            with pytest.raises(nd.ConfigError, match=message):
                evaluator.run(lambda wrong=wrong: wrong)
        assert evaluator.run(lambda: 0.25) == 0.25
        assert evaluator.should_stop()
        with pytest.raises(nd.NotReadyError, match="no checkpoint is left to evaluate, or the session was stopped"):
            evaluator.run(lambda: 0.25)
        with pytest.raises(nd.ConfigError, match="batches"):
            evaluator.batches(dataset, 4)
    assert read_metrics(tmp_path / "evaluation")[-1] | {"seconds": 0} == {
        "epoch": 1, "step": 6, "loss": 0.25, "seconds": 0,
    }  # fmt: skip


def follow(run, output=None):
    records = nd.session.follow_checkpoints(make_experiment(), run, nd.ProcessGrid.serial(), output)
    return [record["step"] for record in records]


def test_output_folder_in_use(tmp_path, monkeypatch):
    """Two evaluations would both append to metrics.jsonl, and each rewrites it at its start."""
    train(tmp_path)
    monkeypatch.setattr("neondist.io.lock.LOCK_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr("neondist.io.lock._describe_lock_holder", lambda path: "another evaluation")
    evaluator = nd.DistributedSession(nd.TaskSpecDef("evaluator"), create_session(tmp_path)[1], tmp_path)
    with evaluator, pytest.raises(nd.OutputError, match="evaluation: in use by another run"):
        follow(tmp_path)
    assert follow(tmp_path) == [0, 2, 4, 6]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"epoch": 1, "step": 3}\n')
    with pytest.raises(nd.ConfigError, match=r"evaluations would extend metrics\.jsonl of a run"):
        follow(tmp_path, tmp_path)
    assert metrics.read_text().count("\n") == 1


@pytest.mark.parametrize("named", [True, False])
def test_run_started_over(tmp_path, capsys, named):
    """Report it, unless --overwrite has removed the evaluations of the earlier run."""
    make_experiment(checkpoint={"keep": 5}).run(output=tmp_path)
    assert follow(tmp_path) == [0, 3, 6]
    capsys.readouterr()
    for path in [*tmp_path.glob("checkpoint-*[36].h5"), tmp_path / "checkpoint.h5"]:
        path.unlink()
    first = tmp_path / "checkpoint-00000000.h5"
    first.rename(first if named else tmp_path / "checkpoint.h5")
    assert follow(tmp_path) == []
    assert "newest checkpoint is of step 0, but evaluations continue after step 6" in capsys.readouterr().err
    make_experiment(checkpoint={"keep": 5}).run(output=tmp_path, overwrite=True)
    assert follow(tmp_path) == [0, 3, 6]


FILE = """
!FitExperiment
dataset: !Synthetic {shape: [4, 4, 1], train: 12, test: 3}
model: !MLPDist
  layers: [!FCLayerDist {out_features: 4}]
batch_size: 4
"""


def run_evaluate(*arguments):
    return main(["evaluate", *map(str, arguments)])


def test_evaluate_command(tmp_path, capsys):
    (tmp_path / "e.yaml").write_text(FILE)
    train(tmp_path / "run")
    capsys.readouterr()
    assert run_evaluate(tmp_path / "e.yaml", "--follow", tmp_path / "run", "--every", "30s") == 0
    steps = [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()]
    assert steps == [0, 2, 4, 6]
    assert run_evaluate(tmp_path / "e.yaml", "--follow", tmp_path / "none", "--max-time", "0.01") == 0
    output = capsys.readouterr()
    assert (output.out, output.err.count(f"waiting for the first checkpoint in {tmp_path / 'none'}")) == ("", 1)


@pytest.mark.parametrize(("options", "message"), [
    ([], "give either --checkpoint FILE, or --follow DIR"),
    (["--checkpoint", "a", "--follow", "b"], "give either"),
    (["--follow", "a", "--split", "test"], "--split applies to a single checkpoint"),
    (["--checkpoint", "a", "--max-time", "3"], "--max-time requires --follow"),
])  # fmt: skip
def test_invalid_options(tmp_path, capsys, options, message):
    (tmp_path / "e.yaml").write_text(FILE)
    assert run_evaluate(tmp_path / "e.yaml", *options) == 2
    assert message in capsys.readouterr().err
