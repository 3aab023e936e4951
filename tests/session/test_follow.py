"""An evaluator sees each checkpoint once, in the order of steps, and ends with the job."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.cli import main
from neondist.comm import SingleTransport, loopback
from neondist.session.follow import Follower
from neondist.train import evaluate_checkpoint


def session(folder, last=6, every=2):
    """Train to a step in a folder, as the job that is followed."""
    model = experiment().model
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


def experiment(**fields):
    model = nd.MLPDist([nd.FCLayerDist(4)], optimizer=nd.SGD(0.5), seed=2)
    return nd.FitExperiment(nd.Synthetic((4, 4, 1), train=12, test=3), model, batch_size=4, epochs=2, **fields)


def train(folder, last=6, every=2):
    job, model, dataset = session(folder, last, every)
    with job:
        for x, y in job.batches(dataset, 4):
            job.run(model.train_batch, x, y)


EVENTS = st.lists(st.sampled_from(["step", "step", "look"]), max_size=40)


@settings(max_examples=8, deadline=None)
@given(events=EVENTS, every=st.integers(1, 3))
def test_each_checkpoint_once_in_order(tmp_path_factory, events, every):
    """The evaluator looks at any time; it misses only what was removed before it looked."""
    folder = tmp_path_factory.mktemp("followed")
    job, model, dataset = session(folder, 100, every)
    seen, there = [], set()

    def look():
        there.update(int(path.stem[11:]) for path in folder.glob("checkpoint-*.h5"))
        while (found := follower.next()) is not None:
            follower.visit(found, lambda file, progress: seen.append(progress.step))

    follower = Follower(folder, SingleTransport(), every=1.0, max_time=0.0)  # nothing is waited for
    look()
    with job:
        batches = job.batches(dataset, 4)
        for event in events:
            if event == "look":
                look()
            else:
                job.run(model.train_batch, *next(batches))
        batches.close()
        job.request_stop()
    look()
    assert seen == sorted(set(seen)) == sorted(there)
    assert seen[-1] == job.global_step


def test_a_job_is_followed_while_it_runs(tmp_path):
    """The wait between two looks is where the job goes on."""
    job, model, dataset = session(tmp_path, 6, 2)
    with job:
        batches = job.batches(dataset, 4)

        def go_on(seconds):
            assert seconds == 5.0
            if not job.should_stop():
                job.run(model.train_batch, *next(batches))
            else:
                job.__exit__(None, None, None)

        follower, seen = Follower(tmp_path, SingleTransport(), every=5.0, sleep=go_on), []
        while (found := follower.next()) is not None:
            assert follower.visit(found, lambda file, progress: seen.append(progress.step))
        assert seen == [0, 2, 4, 6]
        batches.close()


def test_what_was_removed_is_skipped(tmp_path, capsys):
    train(tmp_path)
    follower, seen = Follower(tmp_path, SingleTransport()), []
    first = follower.next()
    first.path.unlink()
    assert not follower.visit(first, lambda file, progress: None)
    assert "checkpoint-00000000.h5 was removed before evaluation" in capsys.readouterr().out
    damaged = follower.next()
    damaged.path.write_bytes(damaged.path.read_bytes()[:-1])
    with pytest.raises(nd.DataError, match="damaged"):
        follower.visit(damaged, lambda file, progress: seen.append(progress))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_records_are_those_of_each_checkpoint(tmp_path, ranks, capsys):
    pytest.importorskip("tensorboardX")
    train(tmp_path)

    def body(world):
        following = experiment(loggers=[nd.TensorBoard()], metrics=[nd.Accuracy()])
        return nd.session.follow_checkpoints(following, tmp_path, nd.ProcessGrid(world), tmp_path / "found")

    found = loopback.run(ranks, body)
    records = lines(tmp_path / "found" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 2, 4, 6] == [record["step"] for record in found[-1]]
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in printed if line.startswith("{")] == records
    for record in records:
        path = tmp_path / f"checkpoint-{record['step']:08d}.h5"
        alone = evaluate_checkpoint(experiment(), path, nd.ProcessGrid.serial())
        assert record["test_loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert record["test_error"] == alone["error"]
    assert list((tmp_path / "found" / "tensorboard").iterdir())
    train(tmp_path, 8)
    with (tmp_path / "found" / "metrics.jsonl").open("a") as log:
        log.write('{"epoch": 9')  # an evaluator was killed while it wrote
    assert [[record["step"] for record in one] for one in loopback.run(ranks, body)] == [[8]] * ranks
    assert [record["step"] for record in lines(tmp_path / "found" / "metrics.jsonl")] == [0, 2, 4, 6, 8]


def test_the_role_of_an_evaluator(tmp_path, capsys):
    train(tmp_path)
    _, model, dataset = session(tmp_path)
    hook = nd.StopAtStepHook(4)
    with nd.DistributedSession(nd.TaskSpecDef("evaluator"), model, tmp_path, [hook]) as evaluator:
        steps = []
        while not evaluator.should_stop():
            numbers = evaluator.run(nd.train.evaluate, model, dataset.test, 4)
            steps.append((evaluator.global_step, numbers["loss"]))
    assert [step for step, _ in steps] == [0, 2, 4]
    records = lines(tmp_path / "evaluation" / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == steps
    with nd.DistributedSession(nd.TaskSpecDef("evaluator"), model, tmp_path) as evaluator:
        assert not evaluator.should_stop()
        assert evaluator.run(lambda: 0.25) == 0.25
        assert evaluator.should_stop()
        with pytest.raises(nd.NotReadyError, match="the job is complete"):
            evaluator.run(lambda: 0.25)
        with pytest.raises(nd.ConfigError, match="batches"):
            evaluator.batches(dataset, 4)
    assert lines(tmp_path / "evaluation" / "metrics.jsonl")[-1] | {"seconds": 0} == {
        "epoch": 1, "step": 6, "loss": 0.25, "seconds": 0,
    }  # fmt: skip


FILE = """
!FitExperiment
dataset: !Synthetic {shape: [4, 4, 1], train: 12, test: 3}
model: !MLPDist
  layers: [!FCLayerDist {out_features: 4}]
batch_size: 4
"""


def command(*words):
    return main(["evaluate", *map(str, words)])


def test_the_command(tmp_path, capsys):
    (tmp_path / "e.yaml").write_text(FILE)
    train(tmp_path / "run")
    capsys.readouterr()
    assert command(tmp_path / "e.yaml", "--follow", tmp_path / "run", "--every", "30s") == 0
    steps = [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()]
    assert steps == [0, 2, 4, 6]
    assert command(tmp_path / "e.yaml", "--follow", tmp_path / "none", "--max-time", "0.01") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("options", "message"), [
    ([], "give either --checkpoint FILE, or --follow DIR"),
    (["--checkpoint", "a", "--follow", "b"], "give either"),
    (["--follow", "a", "--split", "test"], "--split applies to a single checkpoint"),
    (["--checkpoint", "a", "--max-time", "3"], "--max-time requires --follow"),
])  # fmt: skip
def test_wrong_options_are_named(tmp_path, capsys, options, message):
    (tmp_path / "e.yaml").write_text(FILE)
    assert command(tmp_path / "e.yaml", *options) == 2
    assert message in capsys.readouterr().err
