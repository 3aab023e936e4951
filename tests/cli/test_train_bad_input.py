"""Bad definitions, records and options of the command `train MODEL.py`."""

import re

import numpy as np
import pytest
from model_definition import (
    ALLREDUCE_OPTIONS,
    DATA_OPTIONS,
    ELASTIC_OPTIONS,
    MODEL_DEFINITION,
    SERVER_OPTIONS,
    draw_records,
    write_csv,
    write_model,
)

pytest.importorskip("torch")

from neondist.cli import main
from neondist.cli.definition import is_definition_without_program


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MODEL_DEFINITION.replace("def loss", "def cost"),
            "has no loss; the file defines CustomModel, cost, feed, optimizer",
        ),
        (
            MODEL_DEFINITION.replace("def feed", "def food").replace("def optimizer", "def o"),
            "has no optimizer and no feed",
        ),
        (MODEL_DEFINITION.replace("(nn.Module)", ""), "has no model"),
        (
            MODEL_DEFINITION.replace("features, values[:, 16]", "features, values[1:, 16]"),
            "labels: got 1 for 2 records",
        ),
        (MODEL_DEFINITION.replace("def loss(", "def loss(("), "SyntaxError"),
        (
            MODEL_DEFINITION.replace("def loss(labels, ", "def loss("),
            "loss(labels, predictions) cannot be called: too many positional arguments",
        ),
        (MODEL_DEFINITION.replace("(parameters, lr=0.1)", "(lr=0.1)").replace("SGD(parameters", "SGD([]"), "optimizer"),
        (
            MODEL_DEFINITION.replace("torch.optim.SGD(parameters, lr)", "3"),
            "optimizer must return a torch.optim.Optimizer, got int",
        ),
        (MODEL_DEFINITION.replace("4 * 4", "5"), "out"),
        (
            f"{MODEL_DEFINITION}\ndef custom_data_reader(source): return 3\n",
            "custom_data_reader returned a int; return an object with __len__ and __getitem__",
        ),
        (
            f"{MODEL_DEFINITION}\ndef custom_model(): return 3\n",
            "custom_model returned a int; return a torch.nn.Module",
        ),
        (f"{MODEL_DEFINITION}\ndef custom_model(n): return 3\n", "custom_model failed: TypeError"),
        *(
            (
                MODEL_DEFINITION.replace("nn.functional.cross_entropy(predictions, labels)", value),
                f"loss returned {text}",
            )
            for value, text in (
                (
                    "nn.functional.cross_entropy(predictions, labels, reduction='none')",
                    "a tensor of shape (2,); return",
                ),
                ("nn.functional.cross_entropy(predictions, labels)[None]", "a tensor of shape (1,); return a scalar"),
                ("nn.functional.cross_entropy(predictions, labels).detach()", "a tensor without a gradient"),
                ("nn.functional.cross_entropy(predictions, labels).item()", "a float; return a scalar tensor"),
                ("[predictions.mean()]", "a list; return"),
                ("None", "a NoneType"),
            )
        ),
    ],
)
def test_bad_definitions(project, capsys, text, message):
    file = write_model(project, text, f"bad{abs(hash(text))}")
    assert main(["train", file, *DATA_OPTIONS, "--output", "run"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert file in error or "out" in error
    assert not (project / "run").exists()


@pytest.mark.parametrize("value", ["3", "[3]", "CustomModel"])
def test_bad_callbacks(project, capsys, value):
    file = write_model(project, f"{MODEL_DEFINITION}\ndef callbacks(): return {value}\n", f"hooks{len(value)}")
    assert main(["train", file, *DATA_OPTIONS, "--output", "run"]) == 2
    message = "callbacks must return a list of nd.Hook objects"
    assert re.search(rf"{re.escape(file)}:\d+: {message}", capsys.readouterr().err)


def test_bad_validation_records(project, capsys):
    """Report them before training."""
    lines = (project / "test.csv").read_text().splitlines()
    (project / "test.csv").write_text("\n".join([*lines[:30], "1,2", *lines[30:]]))
    file = write_model(project)
    assert main(["train", file, *DATA_OPTIONS, "--output", "run"]) == 2
    error = capsys.readouterr().err
    assert "test.csv:31: has 2 columns, expected 17; correct the row" in error
    assert error.count("--skip-bad-records") == 1
    assert not (project / "run").exists()
    assert main(["train", file, *DATA_OPTIONS, "--output", "run", "--skip-bad-records"]) == 0


def test_nonfinite_steps(project, capsys):
    """Stop, or skip the step if that is requested."""
    text = MODEL_DEFINITION.replace(
        "    return nn.functional.cross_entropy(predictions, labels)",
        "    return nn.functional.cross_entropy(predictions, labels) * (predictions.detach().sum() * 0 + np.inf)",
    )
    file = write_model(project, text, "infinite")
    assert main(["train", file, "--training-data", "train.csv", "--output", "run"]) == 2
    assert "first non-finite value: the loss; lower the learning rate, check the data, or set nonfinite to skip" in (
        capsys.readouterr().err
    )
    words = "--training-data", "train.csv", "--output", "run", "--overwrite", "--nonfinite", "skip"
    assert main(["train", file, *words]) == 0


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (3, np.nan, r"(input of train.csv:40 is not finite)"),
        (3, -np.inf, r"(input of train.csv:40 is not finite)"),
        (16, np.nan, r"(target of train.csv:40 is not finite)"),
        (3, -3e38, r"(largest in this batch: 3e+38, input of train.csv:40)"),
    ],
)
def test_nonfinite_records_are_located(project, capsys, column, value, message):
    records = draw_records(64)
    records[39, column] = value
    write_csv(project / "train.csv", records)
    text = MODEL_DEFINITION.replace("values[:, 16].astype(np.int64)", "values[:, 16]").replace(
        "nn.functional.cross_entropy(predictions, labels)", "nn.functional.mse_loss(predictions[:, 0], labels)"
    )
    words = "--training-data", "train.csv", "--output", "run", "--minibatch-size", "16"
    assert main(["train", write_model(project, text, "regression"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_bad_records(project, capsys):
    text = (project / "train.csv").read_text().splitlines()
    text[9] = "1,2,3"
    (project / "train.csv").write_text("\n".join(text))
    assert main(["train", write_model(project), *DATA_OPTIONS, "--output", "run"]) == 2
    assert "train.csv:10: has 3 columns, expected 17" in capsys.readouterr().err
    assert (
        main(["train", write_model(project), *DATA_OPTIONS, "--output", "run", "--skip-bad-records", "--overwrite"])
        == 0
    )
    output = capsys.readouterr()
    assert "1 bad record skipped" in output.out + output.err
    assert "63 training" in output.out + output.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-workers", "2"], "Local has one worker"),
        (["--use-async"], "--use-async applies to ParameterServerStrategy"),
        (["--lr-staleness-modulation"], "applies to ParameterServerStrategy"),
        (["--grads-to-wait", "2"], "--grads-to-wait applies to ParameterServerStrategy"),
        ([*SERVER_OPTIONS, "--lr-staleness-modulation"], "add --use-async, or leave out --lr-staleness-modulation"),
        ([*SERVER_OPTIONS, "--use-async", "--sync-version-tolerance", "1"], "applies to synchronous updates"),
        ([*SERVER_OPTIONS, "--grads-to-wait", "3"], "the job has only 2 workers; give at most 2"),
        (["--evaluation-steps", "3"], "needs --validation-data"),
        (["--num-workers", "1:2"], "Local has one worker and one tile; use AllreduceStrategy"),
        (["--hosts-from", "slots"], "--hosts-from and --wait apply to several workers; use AllreduceStrategy"),
        (["--restarts", "2"], "--restarts applies to AllreduceStrategy; leave it out"),
        ([*SERVER_OPTIONS, "--use-async", "--restarts", "2"], "killed workers and servers are always"),
        (
            [*ELASTIC_OPTIONS, "1:3", "--hosts-from", "slots"],
            "slots lists 2 slots, too few for 3 workers; give at most 2",
        ),
        (
            [*ELASTIC_OPTIONS, "1:2", "--tiles", "2x1", "--hosts-from", "slots"],
            "too few for 2 workers with 2 tiles each",
        ),
        (
            [*ELASTIC_OPTIONS, "1:2", "--tiles", "2x1", "--hosts-from", "elsewhere"],
            "4 slots, too few for 2 workers with 2 tiles each",
        ),
        ([*ELASTIC_OPTIONS, "1:2", "--hosts-from", "nodes.yaml"], "its SSH settings apply to neondist launch"),
        ([*ELASTIC_OPTIONS, "1:2", "--hosts-from", "empty"], "lists 0 slots, too few for 2 workers; list more slots"),
        ([*ELASTIC_OPTIONS, "1:2", "--hosts-from", "absent"], "absent: no such file"),
        ([*ELASTIC_OPTIONS, "1:99999"], "this machine has"),
        ([*SERVER_OPTIONS, "--wait", "1m"], "--wait: applies to hosts that may change"),
        ([*ALLREDUCE_OPTIONS, "3", "--hosts-from", "slots"], "slots: has 2 slots for at least 3 ranks; reduce"),
        ([*ALLREDUCE_OPTIONS, "2:3", "--tiles", "2x1", "--hosts-from", "slots"], "2 slots for at least 4 ranks"),
        ([*ALLREDUCE_OPTIONS, "2", "--wait", "1m"], "--wait: applies to hosts that may change; give --hosts-from"),
    ],
)
def test_conflicting_options(project, capsys, options, message):
    (project / "slots").write_text("localhost:2\n")
    (project / "elsewhere").write_text("localhost:1\nfar:3\n")
    (project / "empty").touch()
    (project / "nodes.yaml").write_text("{nodes: [{address: far, chief: true, ssh_config: a}], ssh: {a: {}}}")
    assert main(["train", write_model(project), "--training-data", "train.csv", *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("error:") == 1


@pytest.mark.parametrize("number", ["4:1", "0:2", "0", "1:", ":2", "one", "1:2:3", "-1", "1.5", "1:9999999", "²"])
def test_invalid_numbers_of_workers(capsys, number):
    with pytest.raises(SystemExit) as error:
        main(["train", "model.py", "--training-data", "train.csv", f"--num-workers={number}"])
    assert error.value.code == 2
    assert (
        f"'{number}' is not a number of workers; expected 1 or more, or MIN:MAX, such as 1:4" in capsys.readouterr().err
    )


RESOURCES = "{nodes: [{address: localhost, cpus: [0]}]}"
NOT_A_SCRIPT = "is a model-definition file without a main program, so running it would train nothing; train it with"


@pytest.mark.parametrize(("words", "message"), [
    (["launch", "nodes.yaml"], NOT_A_SCRIPT), (["run"], NOT_A_SCRIPT),
    (["submit", "--slurm"], "is a Python file, not a YAML experiment; give a FILE.yaml with its model"),
    (["submit", "--mpijob"], "is a Python file"), (["plan", "-n", "2"], "is a Python file"),
])  # fmt: skip
def test_definition_instead_of_script_or_experiment(project, capsys, words, message):
    (project / "nodes.yaml").write_text(RESOURCES)
    file = write_model(project)
    assert main([words[0], *words[1:], file]) == 2
    err = capsys.readouterr().err
    assert f"{file}: {message}" in err
    assert err.count("neondist train MODEL.py") == err.count("error:") == 1


@pytest.mark.parametrize(("addition", "is_definition"), [
    ("", True), ("torch.manual_seed(0)\nN: int = 3\nM = N + 1\nDEVICE = torch.device('cpu')", True),
    ("if __name__ == '__main__':\n    train()", False), ("if __name__ == '__main__':\n    import other", False),
    ("print(loss)", False), ("history = fit(optimizer)", False), ("app = App()\napp.run()", False),
    ("model = CustomModel()", False), ("for epoch in range(3):\n    pass", False),
    ("import runpy\nrunpy(__file__)", False), ("def", False), ("\0", False),
])  # fmt: skip
def test_scripts_are_not_taken_for_definitions(tmp_path, addition, is_definition):
    for text, expected in (
        (MODEL_DEFINITION, is_definition),
        (MODEL_DEFINITION.replace("def loss", "def cost"), False),
    ):
        (tmp_path / "m.py").write_text(f"{text}\n{addition}\n")
        assert is_definition_without_program(str(tmp_path / "m.py")) == expected
