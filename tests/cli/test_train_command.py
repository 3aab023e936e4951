"""Command `train MODEL.py`, with `evaluate`, `predict`, `check` and `zoo init`."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from availability import needs_mpirun
from cli_runs import build_command, build_mpirun_command, mpirun_environment, run_command
from model_definition import (
    DATA_OPTIONS,
    MODEL_DEFINITION,
    SERVER_OPTIONS,
    draw_records,
    write_model,
)

pytest.importorskip("torch")

import neondist as nd
from neondist.cli import main
from neondist.cli.arguments import create_parser
from neondist.cli.definition import create_experiment, load_definition
from neondist.cli.worker_options import resolve_worker_options
from neondist.services.checkpoint import read_configuration
from neondist.services.state import SyncPolicy
from neondist.terminal.console import counted


def read_records(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in Path(folder, name).read_text().splitlines()]


@pytest.mark.long
def test_train_evaluate_predict(project, capsys):
    processor = """
class PredictionOutputsProcessor:
    def process(self, predictions, worker_id):
        print("predicted", *predictions.argmax(1), worker_id)


def eval_metrics_fn():
    return {"right": lambda labels, predictions: (predictions.argmax(1) == labels).float().mean()}
"""
    file = write_model(project, MODEL_DEFINITION + processor, "processor")
    steps = "--evaluation-steps", "3", "--checkpoint-steps", "2", "--num-minibatches-per-task", "2"
    options = "--minibatch-size", "16", "--num-epochs", "3", "--checkpoint-dir", "run", "--output", "out"
    assert main(["train", file, *DATA_OPTIONS, *steps, *options]) == 0
    history = read_records("run")
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert history[-1]["validation_right"] == pytest.approx(1 - history[-1]["validation_error"])
    assert [record["step"] for record in read_records("run", "evaluations.jsonl")] == list(range(3, 13, 3))
    assert (project / "out/weights.safetensors").is_file()
    with nd.TaskQueue("run/tasks.sqlite", 64, 32, epochs=3) as queue:
        assert queue.counts() == {"todo": 0, "doing": 0, "done": 6, "failed": 0}
    capsys.readouterr()
    assert main(["evaluate", file, "--validation-data", "test.csv", "--checkpoint", "out"]) == 0
    assert json.loads(capsys.readouterr().out)["error"] == history[-1]["validation_error"]
    arguments = "--prediction-data", "test.csv", "--checkpoint", "run", "--minibatch-size", "16", "--output", "y.npy"
    assert main(["predict", file, *arguments]) == 0
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("predicted ")]
    assert [len(line) for line in lines] == [17, 17, 9]
    classes = np.load("y.npy").argmax(1)
    assert [int(digit) for line in lines for digit in line[:-1]] == classes.tolist()
    assert np.mean(classes != draw_records(40, seed=1)[:, 16]) == history[-1]["validation_error"]
    before = Path("y.npy").read_bytes()
    assert main(["predict", file, "--prediction-data", "train.csv", *arguments[2:]]) == 2
    assert "y.npy: exists; give another --output, or --overwrite to replace it" in capsys.readouterr().err
    assert Path("y.npy").read_bytes() == before
    assert main(["predict", file, "--prediction-data", "train.csv", *arguments[2:], "--overwrite"]) == 0
    assert len(np.load("y.npy")) == 64


@pytest.mark.parametrize(
    ("change", "dtype"),
    [("", np.float32), (".half()", np.float32), (".double()", np.float64)],
)
def test_float64_modules_train_in_float64(project, change, dtype):
    model = f"\n\ndef custom_model():\n    return CustomModel(){change}\n"
    file = write_model(project, MODEL_DEFINITION + model, "wide")
    assert main(["train", file, "--training-data", "train.csv", "--output", "run"]) == 0
    predict = "--prediction-data", "test.csv", "--checkpoint", "run", "--output", "y.npy"
    assert main(["predict", file, *predict]) == 0
    assert np.load("y.npy").dtype == dtype
    from safetensors.numpy import load_file

    assert {tensor.dtype for tensor in load_file("run/weights.safetensors").values()} == {np.dtype(dtype)}


INTEGER_FEATURES = """
import numpy as np
import torch
from torch import nn

FIRST = 2**24


class CustomModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 1, sparse=True)
        nn.init.constant_(self.table.weight, 1.0)

    def forward(self, ids):
        return (ids - FIRST).float() * self.table(ids % 9)[..., 0]


def loss(labels, predictions):
    return nn.functional.mse_loss(predictions, labels)


def optimizer(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr)


def feed(records, mode):
    numbers = np.arange(len(records))[:, None] % 4
    return FIRST + numbers if mode == "prediction" else (FIRST + numbers, 1.0 * numbers)
"""


@pytest.mark.long
def test_integer_features_reach_the_model(project, capsys):
    """The model predicts the labels exactly, so that its loss and its gradients are 0."""
    file = write_model(project, INTEGER_FEATURES, "ids")
    assert main(["train", file, *DATA_OPTIONS, "--output", "run"]) == 0
    assert read_records("run")[0]["train_loss"] == read_records("run")[0]["validation_loss"] == 0
    capsys.readouterr()
    assert main(["evaluate", file, "--validation-data", "test.csv", "--checkpoint", "run"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == 0
    predict = "--prediction-data", "test.csv", "--checkpoint", "run", "--output", "y.npy"
    assert main(["predict", file, *predict]) == 0
    assert np.load("y.npy")[:5, 0].tolist() == [0, 1, 2, 3, 0]

    def train(world):
        arguments = create_parser().parse_args(["train", file, *OPTIONS, "--num-workers", str(world.size)])
        experiment = create_experiment(load_definition(file), arguments, "train.csv", None)
        return experiment.run(experiment.open_grid(world), hooks=[]).history[0]["train_loss"]

    assert nd.loopback.run(2, train) == [0, 0]
    for bias, remedy in (("", "return them from feed"), (", self.table.weight[0]", "features, return float32")):
        output = f"nn.functional.linear(ids, self.table.weight[:1]{bias})"
        linear = INTEGER_FEATURES.replace("(ids - FIRST).float() * self.table(ids % 9)[..., 0]", output)
        name = f"linear{len(bias)}"
        assert main(["train", write_model(project, linear, name), *DATA_OPTIONS, "--output", name]) == 2
        assert remedy in capsys.readouterr().err


@pytest.mark.long
def test_outputs_are_written_batch_by_batch(project, capsys):
    """Memory holds the outputs of one batch; a failure in a later batch keeps the previous file."""
    wide = MODEL_DEFINITION.replace(".flatten(1))", ".flatten(1)).repeat(1, 50_000)")
    file, data = write_model(project, MODEL_DEFINITION, "narrow"), ["--prediction-data", "test.csv"]
    assert main(["train", file, "--training-data", "train.csv", "--output", "run"]) == 0
    predict = "predict", write_model(project, wide, "wide"), "--checkpoint", "run", "--minibatch-size", "4"
    tracemalloc.start()
    try:
        assert main([*predict, *data, "--output", "y.npy"]) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    outputs = np.load("y.npy")
    assert outputs.shape == (40, 100_000)
    np.testing.assert_array_equal(outputs, np.tile(outputs[:, :2], 50_000))
    assert peak < outputs.nbytes
    before = Path("y.npy").stat()
    with open("test.csv", "a") as records:
        records.write("x" + ",1" * 16 + "\n")
    capsys.readouterr()
    assert main([*predict, *data, "--output", "y.npy", "--overwrite"]) == 2
    assert "column 1: 'x' is not a number" in capsys.readouterr().err
    assert (Path("y.npy").stat().st_mtime_ns, [*project.glob("y.npy?*")]) == (before.st_mtime_ns, [])


def test_training_without_validation_data(project):
    assert main(["train", write_model(project), "--training-data", "train.csv", "--output", "run"]) == 0
    assert "validation_loss" not in read_records("run")[0]


@pytest.mark.long
def test_stopped_run_resumes_its_tasks(project):
    stop = """
import neondist as nd


class Stop(nd.Hook):
    def after_step(self, run):
        if run.step == 5:
            raise KeyboardInterrupt


def callbacks():
    return [Stop()]
"""
    options = *DATA_OPTIONS, "--minibatch-size", "16", "--num-epochs", "2", "--checkpoint-steps", "3"
    assert main(["train", write_model(project, MODEL_DEFINITION + stop, "stop"), *options, "--output", "a"]) == 130
    assert main(["train", write_model(project), *options, "--output", "a", "--resume"]) == 0
    assert main(["train", write_model(project), *options, "--output", "b"]) == 0
    last = [read_records(folder)[-1] for folder in "ab"]
    assert last[0]["validation_loss"] == last[1]["validation_loss"]


OPTIONS = *DATA_OPTIONS, "--minibatch-size", "32", "--distribution-strategy", "AllreduceStrategy"


@needs_mpirun
@pytest.mark.long
def test_replicas_are_ranks_of_one_job(project):
    options = *OPTIONS, "--num-workers", "2", "--output", "many", "--force"
    code, _, err = run_command(
        build_command("train", write_model(project), *options), project, NEONDIST_TESTS_HIDE="matplotlib"
    )
    assert code == 0, err
    assert main(["train", write_model(project), *OPTIONS, "--output", "one"]) == 0
    losses = [read_records(folder)[0]["validation_loss"] for folder in ("one", "many")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@needs_mpirun
@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "announced", "resumed"),
    [
        (("2", "--restarts", "1"), "restart 1 of 1: rank 1 of 2", "; resuming from checkpoint.h5, on 2 ranks"),
        (("1:2",), "restart 1 of 10: rank 1 of 2", "; resuming from checkpoint.h5, on 1 rank"),
        (("1:2", "--hosts-from", "slots"), "generation 1: 2 ranks on localhost:2", "from checkpoint.h5, on 2 ranks"),
    ],
)
def test_killed_rank_is_restarted_from_the_newest_checkpoint(project, workers, announced, resumed):
    dying = """
import os, pathlib, signal
import neondist as nd
class Dies(nd.train.Hook):
    def after_step(self, run):
        if run.step == 6 and run.grid.rank == 1 and pathlib.Path("die").exists():
            pathlib.Path("die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
def callbacks():
    return [Dies()]
"""
    options = "--training-data", "train.csv", "--num-epochs", "4", "--checkpoint-steps", "1"
    options += "--distribution-strategy", "AllreduceStrategy"
    words = build_command(
        "train", write_model(project, MODEL_DEFINITION + dying), *options, "--minibatch-size", "16", "--force"
    )
    hidden = {"NEONDIST_TESTS_HIDE": "matplotlib"}
    (project / "die").touch()
    (project / "slots").write_text("localhost:2\n")
    code, out, err = run_command([*words, "--num-workers", *workers, "--output", "run"], project, **hidden)
    assert code == 0, err
    assert announced in out
    assert resumed in out
    assert run_command([*words, "--num-workers", "2", "--output", "other"], project, **hidden)[0] == 0
    losses = [[record["train_loss"] for record in read_records(folder)] for folder in ("run", "other")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.long
def test_tiled_replicas_match_one_process(project):
    definition = load_definition(write_model(project))

    def train(world):
        size = {1: (), 4: ("--num-workers", "2", "--tiles", "2x1")}[world.size]
        arguments = create_parser().parse_args(["train", write_model(project), *OPTIONS, *size])
        experiment = create_experiment(definition, arguments, "train.csv", "test.csv")
        return experiment.run(experiment.open_grid(world), hooks=[]).history[0]["validation_loss"]

    serial, parallel = nd.loopback.run(1, train), nd.loopback.run(4, train)
    np.testing.assert_allclose(parallel, serial * 4, rtol=1e-4)


@needs_mpirun
@pytest.mark.long
@pytest.mark.parametrize("size", [("--num-workers", "2"), ("--tiles", "2x1"), None])
def test_evaluation_and_prediction_on_a_grid_match_one_process(project, capsys, size):
    """The last batch has one record, and thus none for one of two replicas; without a size, mpirun starts the ranks."""
    processor = """
class PredictionOutputsProcessor:
    def process(self, predictions, worker_id):
        print("processed", len(predictions), worker_id)
"""
    text = MODEL_DEFINITION.replace("2 * 4 * 4, 2)", "2 * 4 * 4, 2)\n        self.double()")
    file = write_model(project, text + processor)
    assert main(["train", file, "--training-data", "train.csv", "--output", "run"]) == 0
    options = "--checkpoint", "run", "--minibatch-size", "13"
    hidden = mpirun_environment() | {"NEONDIST_TESTS_HIDE": "matplotlib"}
    evaluate = "evaluate", file, "--validation-data", "test.csv", *options
    predict = "predict", file, "--prediction-data", "test.csv", *options, "--output"
    capsys.readouterr()
    assert main(evaluate) == 0
    results = json.loads(capsys.readouterr().out)
    assert main([*predict, "one.npy"]) == 0

    def build(*words):
        return build_command(*words, *size, "--force") if size else build_mpirun_command(2, *words)

    code, out, err = run_command(build(*evaluate), project, **hidden)
    assert code == 0, err
    found = json.loads(out)
    assert found.pop("split") == results.pop("split")
    assert found == pytest.approx(results, rel=1e-12)
    code, out, err = run_command(build(*predict, "many.npy"), project, **hidden)
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("processed")]
    assert lines == [f"processed {count} 0" for count in (13, 13, 13, 1)]
    np.testing.assert_allclose(np.load("many.npy"), np.load("one.npy"), rtol=1e-12, atol=1e-14)


@pytest.mark.long
def test_servers_average_the_requested_gradients(project):
    words = (
        "train",
        write_model(project),
        *DATA_OPTIONS,
        "--minibatch-size",
        "16",
        "--num-epochs",
        "2",
        *SERVER_OPTIONS,
        "--num-ps",
        "1",
    )
    mode = "--grads-to-wait", "2", "--sync-version-tolerance", "1", "--num-minibatches-per-task", "1"
    code, out, err = run_command(
        build_command(*words, *mode, "--output", "run"), project, NEONDIST_TESTS_HIDE="matplotlib"
    )
    assert code == 0, err
    assert "applied: 64 records in each of 2 epochs, each once" in out, err
    folder = next((project / "run/servers").glob("checkpoint-*"))
    assert read_configuration(folder, 0, 1).fields["policy"] == SyncPolicy(True, 2, 1).to_json()
    records = [*read_records("run"), *read_records("run/worker-1")]
    for epoch in (1, 2):  # each worker counts its own records
        trained = [one["samples_per_second"] * one["seconds"] for one in records if one["epoch"] == epoch]
        assert sum(trained) == pytest.approx(64)


@needs_mpirun
@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "servers"), [(["--use-async"], 1), (["--num-ps", "2"], 2), (["--num-ps", "1", "--tiles", "2x1"], 1)]
)
def test_servers_of_a_single_worker_match_one_process(project, options, servers):
    words = "train", write_model(project), *DATA_OPTIONS, "--minibatch-size", "16", "--num-epochs", "2"
    assert main([*words, "--output", "local"]) == 0
    strategy = "--distribution-strategy", "ParameterServerStrategy"
    code, out, err = run_command(
        build_command(*words, *strategy, *options, "--output", "run", "--force"),
        project,
        NEONDIST_TESTS_HIDE="matplotlib",
    )
    assert code == 0, err
    assert "applied: 64 records in each of 2 epochs, each once" in out, err
    assert len(list(next((project / "run/servers").glob("checkpoint-*")).iterdir())) == servers
    losses = [[record["validation_loss"] for record in read_records(folder)] for folder in ("local", "run")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.long
def test_run_is_resumed_with_and_without_servers(project):
    """Resume with one server, with two, and after a run without servers; expect the losses of one process."""
    file = write_model(project, MODEL_DEFINITION.replace("torch.optim.SGD(", "torch.optim.Adam("), "adam")
    words = "train", file, *DATA_OPTIONS, "--minibatch-size", "16", "--output"
    assert main([*words, "local", "--num-epochs", "4"]) == 0
    strategy = "--distribution-strategy", "ParameterServerStrategy"
    for epochs, options in enumerate([["--num-ps", "1"], ["--num-ps", "2"], [], ["--num-ps", "1"]], 1):
        resumed = ["--num-epochs", str(epochs), "--resume", "auto", *(strategy if options else ()), *options]
        code, out, err = run_command(build_command(*words, "run", *resumed), project, NEONDIST_TESTS_HIDE="matplotlib")
        assert code == 0, err
        assert (f"applied: 64 records in each of {counted(epochs, 'epoch')}, each once" in out) is bool(options), err
    losses = [[record["validation_loss"] for record in read_records(folder)] for folder in ("local", "run")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ([], None),
        (["--grads-to-wait", "1"], None),
        (["--grads-to-wait", "2"], SyncPolicy(True, 2)),
        (["--num-ps", "1"], SyncPolicy(True, 1)),
        (["--sync-version-tolerance", "4"], SyncPolicy(True, 1, 4)),
        (["--use-async"], SyncPolicy(False, 1)),
        (["--use-async", "--lr-staleness-modulation"], SyncPolicy(False, 1, 0, None, True)),
        (["--num-workers", "1:2"], SyncPolicy(True, 2)),
        (["--num-workers", "1:2", "--grads-to-wait", "1"], SyncPolicy(True, 1)),
        (["--num-workers", "2:2", "--use-async"], SyncPolicy(False, 1)),
        (["--num-workers", "1"], None),
        (["--num-workers", "1", "--num-ps", "1"], SyncPolicy(True, 1)),
        (["--num-workers", "1:1", "--use-async"], SyncPolicy(False, 1)),
    ],
)
def test_sync_policies(project, options, policy):
    (project / "slots").write_text("localhost:2\n")
    slots = ["--hosts-from", "slots"] if any(":" in option for option in options) else []
    arguments = create_parser().parse_args(
        ["train", write_model(project), "--training-data", "train.csv", *SERVER_OPTIONS, *options, *slots]
    )
    resolve_worker_options(arguments)
    assert arguments.sync_policy == policy


def test_elasticdl_conventions(project):
    """Accept dataset_fn with three arguments, and optimizer(lr) that returns a function of the parameters."""
    text = MODEL_DEFINITION.replace("def feed(records, mode)", "def dataset_fn(records, mode, _)")
    text = text.replace("optimizer(parameters, lr=0.1)", "optimizer(lr=0.1)")
    text = text.replace(
        "return torch.optim.SGD(parameters, lr)", "return lambda parameters: torch.optim.SGD(parameters, lr)"
    )
    assert main(["check", write_model(project, text, "elasticdl"), "--training-data", "train.csv"]) == 0


def test_custom_names(project, capsys):
    text = (
        MODEL_DEFINITION.replace("def loss(", "def cost(")
        .replace("def feed(", "def parse(")
        .replace("CustomModel", "Net")
    )
    text = text.replace("def optimizer(", "def sgd(") + "\n\ndef make():\n    return Net()\n"
    file = write_model(project, text, "named")
    names = "--loss", "cost", "--feed", "parse", "--optimizer", "sgd", "--model-def", "named.make"
    assert main(["check", file, "--training-data", "train.csv", *names]) == 0
    assert main(["check", file, *names[:-1], "build"]) == 2
    assert "has no build, given as custom_model; the file defines Net, cost, make, parse" in capsys.readouterr().err


def test_zoo_init_writes_a_valid_project(project, capsys):
    assert main(["zoo", "init", "zoo"]) == 0
    assert main(["check", "zoo/model.py"]) == 0
    assert main(["zoo", "init", "zoo"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_zoo_init_writes_the_example(project, request):
    assert main(["zoo", "init", "zoo"]) == 0
    example = (request.config.rootpath / "examples/mnist_definition.py").read_text()
    assert (project / "zoo/model.py").read_text() == example.replace("examples/mnist_definition.py", "model.py")


def test_records_of_a_data_set(project):
    text = "!Synthetic {shape: [4, 4, 1], train: 5, test: 3, classes: 2}"
    for file in ("a.csv", "a.recordio"):
        assert main(["data", "records", text, "--to", file]) == 0
    from neondist.data.records import open_records

    a, b = (np.stack(reader.read(range(5))) for reader in map(open_records, ("a.csv", "a.recordio")))
    np.testing.assert_array_equal(a, b)
    assert a.shape == (5, 17)


def test_splits_of_a_data_set(project):
    text = "!Synthetic {shape: [4, 4, 1], train: 5, test: 3, classes: 2}"
    file, words = write_model(project), ["--training-data", text, "--validation-data", text]
    experiment = create_experiment(
        load_definition(file), create_parser().parse_args(["train", file, *words]), text, text
    )
    experiment.dataset.open(nd.ProcessGrid.serial())
    assert (len(experiment.dataset.train), len(experiment.dataset.validation)) == (5, 3)
