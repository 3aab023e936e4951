"""Command `sweep`: search spaces, trials, files, pruning and resumption."""

import errno
import json
import re
from types import SimpleNamespace

import pytest
from cli_runs import EXPERIMENT

from neondist.cli import main, sweep
from neondist.config import load_experiment
from neondist.errors import ConfigError

pytest.importorskip("optuna")
from optuna.storages._cached_storage import _CachedStorage

LEARNING_RATE_SPACE = "model.optimizer.learning_rate=1e-3..1e-1:log"


@pytest.fixture
def run_sweep(tmp_path, monkeypatch):
    """Return a function that sweeps with trials in this process, and returns the exit code."""
    (tmp_path / "file.yaml").write_text(EXPERIMENT.replace("batch_size", "metrics: [!Accuracy {}]\nbatch_size"))
    monkeypatch.chdir(tmp_path)

    def start_trial(words, log, env):
        code = main(words)
        log.write_text("error: the reason\n\n")
        return SimpleNamespace(poll=lambda: code, terminate=lambda: None)

    monkeypatch.setattr(sweep, "start_training", start_trial)
    monkeypatch.setattr(sweep, "_POLL_SECONDS", 0)
    return lambda *words: main(["sweep", "file.yaml", *words])


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("a.b=1e-4..1e-1:log", "FloatDistribution(high=0.1, log=True, low=0.0001, step=None)"),
        ("a.b = 0..0.5:0.25", "FloatDistribution(high=0.5, log=False, low=0.0, step=0.25)"),
        ("a.b=8..64:8", "IntDistribution(high=64, log=False, low=8, step=8)"),
        ("a.b=-1..2", "IntDistribution(high=2, log=False, low=-1, step=1)"),
        ("a.b=[!A {b: [1, 2]} , y, [3, 4]]", "CategoricalDistribution(choices=('!A {b: [1, 2]}', 'y', '[3, 4]'))"),
    ],
)  # fmt: skip
def test_spaces(text, distribution):
    assert sweep.parse_space(text)[0] == "a.b"
    assert str(sweep.parse_space(text)[1]) == distribution


@pytest.mark.parametrize("text", ["a", "a=1", "a=x..y", "a=2..1", "a=0..1.0:log", "a=[1", "a=[]", "a=1..2:x"])
def test_invalid_spaces(text):
    with pytest.raises(ConfigError, match=rf"--vary {re.escape(text)}: .*; write KEY=LOW..HIGH"):
        sweep.parse_space(text)


@pytest.mark.long
def test_best_trial_is_written(run_sweep, capsys, tmp_path):
    words = [
        "--vary",
        "model.layers.0.kernel_size=[3, 99]",
        LEARNING_RATE_SPACE,
        "--number",
        "accuracy",
        "--output",
        "here",
    ]
    assert run_sweep(*words, "--trials", "3") == 0
    out = capsys.readouterr().out
    results = {int(n): outcome for n, outcome in re.findall(r"^trial (\d): \S+, \S+: (.*)", out, re.M)}
    values = {
        n: max(json.loads(line)["accuracy"] for line in (tmp_path / f"here/trial_00{n}/metrics.jsonl").open())
        for n, outcome in results.items() if not outcome.startswith("failed")
    }  # fmt: skip
    failed = results.keys() - values
    assert len(results) == 3
    assert failed, "one of three trials has a kernel that is too large"
    assert all(results[n] == "failed: the reason" for n in failed)
    assert {n: float(results[n]) for n in values} == pytest.approx(values, rel=1e-5)
    best = max(values, key=values.get)
    text = (tmp_path / "here/best.yaml").read_text()
    assert text.startswith(f"# trial {best} of here: {values[best]:.6g}\n")
    assert text.endswith((tmp_path / f"here/trial_00{best}/experiment.yaml").read_text())
    load_experiment("here/best.yaml").validate(2)
    page = (tmp_path / "here/sweep.html").read_text()
    assert page.count("<figure>") == 2  # over the trials, and over the learning rates
    assert "<th>accuracy</th><th>kernel_<wbr>size</th><th>learning_<wbr>rate</th>" in page
    assert run_sweep(*words, "--trials", "3") == 0
    assert "epoch" not in capsys.readouterr().out, "a complete sweep trains nothing"
    assert run_sweep("--vary", LEARNING_RATE_SPACE, "--output", "here") == 2
    assert "here: contains a sweep started with another --vary and another --number;" in capsys.readouterr().err


@pytest.mark.long
def test_interrupted_sweep_resumes(run_sweep, capsys, monkeypatch):
    words = ["--vary", LEARNING_RATE_SPACE, "--trials", "2", "--output"]
    assert run_sweep(*words, "full") == 0
    start, calls = sweep.start_training, []

    def interrupted_start(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return start(*arguments)

    monkeypatch.setattr(sweep, "start_training", interrupted_start)
    assert run_sweep(*words, "parts") == 130
    assert run_sweep(*words, "parts") == 0
    expected, resumed = (
        re.findall("^trial.*", part, re.M) for part in capsys.readouterr().out.split("full/sweep.html")
    )
    assert expected == resumed
    assert len(expected) == 2


@pytest.mark.long
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["create_new_trial", "set_trial_param", "set_trial_state_values"])
@pytest.mark.parametrize("space", ["model.layers.0.out_channels=1..2", "model.optimizer.momentum=0..0.9"])
def test_sweep_killed_while_sampling_resumes(run_sweep, capsys, monkeypatch, method, space):
    """Kill the sweep after every other call that writes to the database."""
    monkeypatch.setattr(sweep, "start_training", FakeTrial)
    spaces = "model.optimizer.learning_rate=[0.1, 0.2]", space
    words = ["--vary", spaces[0], "--vary", spaces[1], "--trials", "4", "--output"]
    assert run_sweep(*words, "full") == 0
    expected = capsys.readouterr().out.splitlines()[-9:-3]
    write, calls = getattr(_CachedStorage, method), []

    def interrupted_write(*arguments, **options):
        result = write(*arguments, **options)
        calls.append(arguments)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(_CachedStorage, method, interrupted_write)
        while run_sweep(*words, "parts") == 130:
            assert len(calls) < 50
    assert run_sweep(*words, "parts") == 0
    assert len(calls) > 1
    assert capsys.readouterr().out.splitlines()[-9:-3] == expected


def test_small_space_is_exhausted(run_sweep, capsys):
    assert run_sweep("--vary", "model.layers.0.out_channels=1..2", "epochs=[1]", "--output", "x") == 0
    trials = re.findall("^trial .: (.*):", capsys.readouterr().out, re.M)
    assert sorted(trials) == [f"model.layers.0.out_channels={n}, epochs=1" for n in (1, 2)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first_count", [1, 2, 3])
def test_small_space_is_exhausted_after_fewer_trials(run_sweep, capsys, monkeypatch, first_count):
    monkeypatch.setattr(sweep, "start_training", FakeTrial)
    spaces = "model.layers.0.out_channels=1..2", "model.optimizer.learning_rate=0.1..0.3:0.1"
    words = ["--vary", *spaces, "--output", "x", "--trials"]
    assert run_sweep(*words, str(first_count)) == 0
    assert run_sweep(*words, "20") == 0
    trials = re.findall("^trial .: (.*, .*):", capsys.readouterr().out, re.M)
    assert len(set(trials)) == 6


def test_values_are_printed_as_text(run_sweep, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "start_training", FakeTrial)
    assert run_sweep("--vary", "strategy=[\"AllReduce(compressor='fp16')\"]", "--output", "x") == 0
    assert " \"AllReduce(compressor='fp16')\" " in capsys.readouterr().out.splitlines()[-5]
    assert "&quot;AllReduce" in (tmp_path / "x/sweep.html").read_text()


class FakeTrial:
    """Process of a trial with decreasing losses: it trains one epoch per poll, and one more when terminated."""

    running, peak, terminated = 0, 0, []

    def __init__(self, words, log, env):
        self.folder, self.epoch, self.code = log.with_suffix(""), 0, None
        self.number = int(self.folder.name[-3:])
        self.folder.mkdir(exist_ok=True)
        (self.folder / "experiment.yaml").write_text("!FitExperiment {}")
        FakeTrial.running += 1
        FakeTrial.peak = max(FakeTrial.peak, FakeTrial.running)

    def poll(self):
        if self.code is None:
            self.epoch += 1
            record = {"epoch": self.epoch, "step": 1, "train_loss": 1, "test_loss": self.number - self.epoch / 10}
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        if self.epoch == 4 or self.code is not None:
            FakeTrial.running -= 1
            return self.code or 0
        return None

    def terminate(self):
        FakeTrial.terminated.append(self.number)
        self.code = 75


def test_concurrent_trials_are_pruned(run_sweep, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "start_training", FakeTrial)
    words = ["--vary", LEARNING_RATE_SPACE, "--trials", "7", "--jobs", "3", "--prune", "median", "--output", "here"]
    assert run_sweep(*words) == 0
    out = capsys.readouterr().out
    assert FakeTrial.peak == 3
    assert FakeTrial.terminated == [5, 6]  # pruning begins after five complete trials
    assert re.findall(r"^trial (\d): \S+: pruned after epoch (.)", out, re.M) == [("5", "4"), ("6", "1")]
    assert (tmp_path / "here/best.yaml").read_text().startswith("# trial 0 of here: -0.4\n")
    assert "pruned after epoch 1" in (tmp_path / "here/sweep.html").read_text()


def test_stopped_sweep_ends_its_trials_and_resumes(run_sweep, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "start_training", FakeTrial)
    monkeypatch.setattr(FakeTrial, "terminated", [])
    words = ["--vary", LEARNING_RATE_SPACE, "--trials", "4", "--jobs", "2", "--output", "here"]
    with monkeypatch.context() as patch:
        patch.setattr(FakeTrial, "poll", lambda self: 75 if self.number == 1 else self.code)
        assert run_sweep(*words) == 75
    assert FakeTrial.terminated == [0]
    assert run_sweep(*words) == 0
    out = capsys.readouterr().out
    assert re.findall(r"stopped during trial (\d)", out) == ["1", "0"]
    assert sorted(re.findall(r"^trial (\d): \S+: -?\d", out, re.M)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("problem", [
    "cannot be written to (Read-only file system)", "the folder cannot be created (No space left on device)",
    "the checkpoint cannot be written (it needs 98 kB, but 4.1 kB are free)", "",
])  # fmt: skip
@pytest.mark.parametrize("failing", [0, 2])
def test_trial_that_cannot_write_ends_the_sweep_and_resumes(run_sweep, capsys, monkeypatch, failing, problem):
    """Expect one message; without a `problem` in the log, which is on the full disk too, test whether it is full."""
    words = ["--vary", LEARNING_RATE_SPACE, "--trials", "4", "--jobs", "2", "--output"]
    monkeypatch.setattr(sweep, "start_training", FakeTrial)
    assert run_sweep(*words, "full") == 0
    expected = sorted(re.findall("^trial .*", capsys.readouterr().out, re.M))

    class FailingTrial(FakeTrial):
        def __init__(self, words, log, env):
            super().__init__(words, log, env)
            if self.number == failing:
                self.code = 2
                log.write_text(f"epoch 1\nerror: here: {problem}; choose another path\n" if problem else "epoch 1\n")

    def raise_disk_full(dir):
        raise OSError(errno.ENOSPC, "")

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "start_training", FailingTrial)
        if not problem:
            patch.setattr(sweep, "TemporaryFile", raise_disk_full)
        assert run_sweep(*words, "here") == 2
    out, err = capsys.readouterr()
    reason = problem or "cannot be written to (No space left on device)"
    remedy = "free disk space or check permissions, then repeat the command to continue"
    assert err.splitlines()[-1] == f"error: trial {failing}: here: {reason}; {remedy}"
    monkeypatch.setattr(FakeTrial, "poll", lambda self, poll=FakeTrial.poll: 1 if self.number == 3 else poll(self))
    assert run_sweep(*words, "here") == 0  # trial 3 fails for another reason
    results = sorted(re.findall("^trial .*", out + capsys.readouterr().out, re.M))
    assert results[:3] == expected[:3]
    assert results[3].endswith("failed: no output")


def test_message_of_an_earlier_attempt_is_ignored(run_sweep, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "start_training", FakeTrial)
    monkeypatch.setattr(FakeTrial, "poll", lambda self, poll=FakeTrial.poll: 1 if self.number == 1 else poll(self))
    (tmp_path / "here").mkdir()
    (tmp_path / "here/trial_001.log").write_text("error: here: cannot be written (Disk quota exceeded); free space\n")
    assert run_sweep("--vary", LEARNING_RATE_SPACE, "--trials", "2", "--output", "here") == 0
    assert "trial 1: " in capsys.readouterr().out


def test_errors_before_training(run_sweep, capsys, tmp_path):
    for words, message in {
        ("model.optimizer.rate=0..1",): "--set model.optimizer.rate=1: model.optimizer.rate: SGD has no field 'rate'",
        ("epochs=1..2", "--vary", "epochs=[3]"): "--vary epochs: given twice; give all values",
        ("epochs=0..2",): "--set epochs=0: epochs",
        (
            LEARNING_RATE_SPACE,
            "--number",
            "acuracy",
        ): "number: 'acuracy' is not in any record; did you mean 'accuracy'?",
    }.items():
        assert run_sweep("--vary", *words, "--output", "x") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert (
        run_sweep("--vary", "model.layers.0.kernel_size=[3]", "--set", "model.layers.0.stride=50", "--output", "x") == 2
    )
    (tmp_path / "x").mkdir(exist_ok=True)
    (tmp_path / "x" / "sweep.db").write_text("no data base" * 100)
    capsys.readouterr()
    assert run_sweep("--vary", LEARNING_RATE_SPACE, "--output", "x") == 2
    assert re.match(
        r"error: x/sweep\.db: cannot be used \(.*\); free disk space .* another folder", capsys.readouterr().err
    )


@pytest.mark.long
def test_trials_are_processes(tmp_path, capsys):
    (tmp_path / "file.yaml").write_text(EXPERIMENT)
    path, folder = str(tmp_path / "file.yaml"), str(tmp_path / "here")
    assert main(["sweep", path, "--vary", "epochs=[1]", "--output", folder]) == 0
    assert re.search("^trial 0: epochs=1: [0-9.]+$", capsys.readouterr().out, re.M)
    assert "epoch 1/1" in (tmp_path / "here" / "trial_000.log").read_text()
