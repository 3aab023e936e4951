"""PyTorch modules in experiment files: equal results on any number of ranks, and one message per mistake."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from availability import needs_mpirun
from cli_runs import build_command, run_command, strip_progress_lines

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from torch import nn  # noqa: E402
from torch_runs import share_captures  # noqa: E402

import neondist as nd  # noqa: E402
import neondist.torch as ndt  # noqa: E402
from neondist.cli import main  # noqa: E402
from neondist.comm import loopback  # noqa: E402
from neondist.config import dump, load_experiment  # noqa: E402
from neondist.torch.training.experiment import TorchModel  # noqa: E402
from neondist.torch.training.losses_and_optimizers import TorchLoss, TorchOptimizer  # noqa: E402

NETS = """\
from os import getenv

import numpy as np
import torch
from torch import nn

def classifier(width=4, dropout=0.2):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(dropout), nn.MaxPool2d(2),
        nn.Conv2d(width, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )

def segmenter():
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 3, 1))

def number():
    return 3

def spectrum():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.rfft2(x).abs().mean((2, 3))
    return nn.Sequential(Spectrum(), nn.Linear(1, 3))

def feed(images, labels):
    x = torch.from_numpy(np.moveaxis(images, -1, 1).copy())
    return x, None if labels is None else torch.from_numpy(labels)

def label_extent(images, labels):
    # two channels, and the intensity range of each cell as its label
    x, _ = feed(images, labels)
    return torch.cat([x, x.square()], 1), None if labels is None else (x[:, 0] > 0).long() + (x[:, 0] > 1).long()

def not_moved(images, labels):
    return torch.from_numpy(images), torch.from_numpy(labels)

def as_arrays(images, labels):
    return feed(images, labels)[0], labels

def alone(images, labels):
    return feed(images, labels)[0]

def floats(images, labels):
    return feed(images, labels)[0], torch.from_numpy(labels).double()

def wrong_somewhere(images, labels):
    if images.shape[1] == 6:
        raise OSError("no such lens")
    return feed(images, labels)

def cross_entropy(y, labels, factor=1.0):
    return factor * nn.functional.cross_entropy(y, labels)
"""
CLASSIFIER = """\
!FitExperiment
dataset: !Synthetic {shape: [13, 11, 1], classes: 3, train: 22, test: 12, validation: 0.2}
model: !TorchModel
  factory: nets:classifier
  arguments: {width: 5}
  loss: !TorchLoss {name: CrossEntropyLoss, arguments: {label_smoothing: 0.1, weight: [1.0, 2, 0.5]}}
  optimizer: !TorchOptimizer
    name: Adam
    arguments: {lr: 0.02}
    schedule: !CosineDecay {epochs: 3}
batch_size: 8
epochs: 2
dtype: float64
seed: 1
"""
SEGMENTER = """\
!FitExperiment
dataset: !Synthetic {shape: [9, 11, 1], classes: 3, train: 12, test: 6}
model: !TorchModel
  factory: nets:segmenter
  shape: [2, 9, 11]
  loss: !TorchLoss {name: 'nets:cross_entropy', arguments: {factor: 2.0}}
  optimizer: !TorchOptimizer {arguments: {lr: 0.3, momentum: 0.9, dampening: 0.1}}
  feed: nets:label_extent
batch_size: 6
epochs: 2
dtype: float64
"""
FILES = {"classifier": CLASSIFIER, "segmenter": SEGMENTER}
CAPTURED_PROGRAMS = {}
"""captured programs of the few networks"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with share_captures(CAPTURED_PROGRAMS):
        yield tmp_path
    sys.modules.pop("nets", None)


def run(name, output, *arguments):
    assert main(["run", f"{name}.yaml", "--import", "nets.py", "--output", output, *map(str, arguments)]) == 0
    return read_metrics(output)


def read_metrics(output):
    lines = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [{key: n for key, n in line.items() if re.search("loss|error|^epoch|step", key)} for line in lines]


def check_close(actual, expected):
    assert len(actual) == len(expected)
    for actual_record, expected_record in zip(actual, expected, strict=True):
        assert actual_record == pytest.approx(expected_record, rel=1e-9)


def check_ledger(output):
    """Compare the bytes of the last epoch in the metrics with the ledger."""
    line = json.loads(Path(output, "metrics.jsonl").read_text().splitlines()[-1])
    ledger = [json.loads(line) for line in Path(output, "ledger.jsonl").read_text().splitlines()]
    records = [record for record in ledger if record["epoch"] == line["epoch"] and record["pass"] == "training"]
    assert line["bytes_sent"] == sum(record["bytes"] for record in records if record["kind"] == "halo") > 0
    assert line["bytes_summed"] == sum(record["bytes"] for record in records if record["kind"] != "halo") > 0


@pytest.mark.long
def test_results_are_equal_on_any_number_of_ranks(folder):
    expected = run("classifier", "one")
    keys = {"epoch", "step", "train_loss", *(f"{a}_{b}" for a in ("validation", "test") for b in ("loss", "error"))}
    assert expected[0].keys() == keys
    interrupted = run("classifier", "some", "--virtual", 3, "--set", "epochs=1", "checkpoint={every_steps: 2, keep: 9}")
    check_close(interrupted, expected[:1])
    os.replace("some/checkpoint-00000002.h5", "some/checkpoint.h5")  # written in the middle of the epoch
    check_close(run("classifier", "some", "--resume", "--virtual", 2), expected)
    check_ledger("some")
    reloaded = load_experiment("one/experiment.yaml", modules=["nets"])
    assert dump(reloaded) == Path("one/experiment.yaml").read_text()
    weights = [safetensors.load_file(f"{output}/weights.safetensors") for output in ("one", "some")]
    # Adam follows rounding noise in the bias before batch norm
    torch.testing.assert_close(*weights, rtol=1e-8, atol=1e-8)
    ndt.load_weights(sys.modules["nets"].classifier(5), "one/weights.safetensors")


def test_cell_metrics_on_any_grid(folder):
    expected = run("segmenter", "one")
    assert 0 < expected[-1]["test_error"] < 1
    check_close(run("segmenter", "four", "--virtual", 4, "--set", "grid.replicas=2"), expected)


def test_evaluation_and_prediction_from_a_checkpoint(folder, capsys):
    expected = run("segmenter", "one")[-1]
    capsys.readouterr()
    arguments = ["segmenter.yaml", "--import", "nets.py", "--checkpoint", "one/checkpoint.h5"]
    assert main(["evaluate", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["loss"], result["error"]) == pytest.approx((expected["test_loss"], expected["test_error"]))
    np.save("images.npy", np.random.default_rng(0).random((3, 9, 11, 1)))
    assert main(["predict", *arguments, "--input", "images.npy", "--output", "y.npy"]) == 0
    assert np.load("y.npy").shape == (3, 9, 11, 3)


def test_initial_weights_from_a_file(folder):
    names = {"weight": torch.ones(3, 1, 1, 1).double(), "bias": torch.zeros(3)}
    safetensors.save_file(names, "first.safetensors")

    def body(world):
        model = ndt.TorchModel(lambda: nn.Conv2d(1, 3, 1), weights="first.safetensors", dtype="float64")
        experiment = nd.FitExperiment(nd.Synthetic([6, 5, 1], classes=3), model)
        with experiment.open_grid(world) as grid:
            model.build((6, 5, 1), 2, grid)
            return model.fprop(np.full((2, *model.input.own.shape, 1), 4.0))

    for y in loopback.run(2, body):
        assert y.shape == (2, 3, 5, 3)
        assert (y == 4).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounding_of_parameters_is_reported_once(capsys, dtype):
    def body(world):
        model = ndt.TorchModel(lambda: nn.Conv2d(1, 3, 1).double(), dtype=dtype)
        model.build((6, 5, 1), 2, nd.ProcessGrid(world))

    with share_captures():
        loopback.run(2, body)
    warning = (
        "warning: 2 float64 parameters, first 'weight', rounded to float32; set dtype: float64 to keep all digits\n"
    )
    assert capsys.readouterr().err == ("" if dtype == "float64" else warning)


@pytest.mark.parametrize(("name", "arguments"), [("SGD", {"momentum": 0.9}), ("AdamW", {})])
def test_one_cycle_momentum_matches_pytorch(name, arguments):
    rule = ndt.TorchOptimizer(name, {"lr": 0.1, **arguments}, nd.OneCycle(12, rise=3 / 12, momentum=(0.85, 0.95)))
    model = ndt.TorchModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), optimizer=rule, dtype="float64")
    with share_captures():
        model.build((3, 3, 1), 4, nd.ProcessGrid.serial())
    other = copy.deepcopy(model.module)
    optimizer = getattr(torch.optim, name)(other.parameters(), lr=0.1, **arguments)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=13, pct_start=4 / 13)
    x, labels = np.random.default_rng(0).normal(size=(4, 3, 3, 1)), np.array([0, 1, 1, 0])
    rule.check_schedule_covers(12)
    for step in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(torch.from_numpy(x)), torch.from_numpy(labels)).backward()
        optimizer.step()
        schedule.step()
        model.learning_rate_scale, model.scheduled_momentum = rule.rate_factor_at(step), rule.momentum_at(step)
        model.train_batch(x, labels)
    for actual, expected in zip(model.module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)


def test_one_cycle_requires_a_momentum():
    with pytest.raises(nd.ConfigError, match="momentum: TorchOptimizer has no momentum to schedule"):
        ndt.TorchOptimizer("Adagrad", {"lr": 0.1}, nd.OneCycle(3, momentum=(0.85, 0.95))).check_schedule_covers(3)


class AveragedWeights(nn.Module):
    """Convolution that keeps an average of its weights in a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.average = nn.Parameter(torch.zeros(2, 1, 1, 1), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.conv.weight, alpha=0.1)
        return self.conv(x) + self.average.sum()


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_non_finite_losses(folder, nonfinite):
    def body(world):
        model = ndt.TorchModel(
            lambda: nn.Sequential(AveragedWeights(), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        )
        experiment = nd.FitExperiment(nd.Synthetic([6, 5, 1], classes=2), model, batch_size=2, nonfinite=nonfinite)
        with experiment.open_grid(world) as grid:
            model.build((6, 5, 1), 2, grid)
            x, labels = np.ones((2, *model.input.own.shape, 1), "float32"), np.array([0, 1])
            assert np.isfinite(model.train_batch(x, labels))
            before = [t.clone() for t in model.module.state_dict().values()]
            if not grid.rank:
                x[0, 0, 0] = np.inf
            if nonfinite == "stop":
                with pytest.raises(
                    nd.UserError, match="step 2: first non-finite value: the loss on ranks 0, 1; lower the"
                ):
                    model.train_batch(x, labels)
            else:
                assert np.isnan(model.train_batch(x, labels))
                assert (model.step, model.steps_without_optimizer) == (2, 1)
            assert all(map(torch.equal, before, model.module.state_dict().values()))

    loopback.run(2, body, timeout=60.0)


def test_check_plans_for_more_ranks(folder, capsys):
    assert main(["check", "classifier.yaml", "--import", "nets.py", "-n", "6"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("TorchModel (float64) on 6 ranks (1 replica, 3 rows, 2 cols), Synthetic 13×11×1, batches")
    assert re.search(r"^0 +halo +8×5×13×11 +", output, re.M)
    assert re.search(r"^total +[\d.]+ kB +", output, re.M)
    assert "gradient reduction: " in output


@pytest.mark.long
def test_recompute_scheme_and_strips_fields(folder, capsys):
    expected = run("classifier", "one", "--set", "epochs=1")
    with_tower = run("classifier", "again", "--virtual", 2, "--set", "epochs=1", "recompute=true", "model.scheme=tower")
    assert with_tower[0]["train_loss"] != pytest.approx(expected[0]["train_loss"], rel=1e-9)
    for fields in (["recompute=true"], ["strips=3", "model.scheme=deep_halo(layers=3)"]):
        check_close(run("classifier", f"same {fields[0]}", "--virtual", 2, "--set", "epochs=1", *fields), expected)
    capsys.readouterr()
    arguments = ["classifier.yaml", "--import", "nets.py", "-n", "2", "--set"]
    halos = []
    for scheme in ("halo", "tower", "{'': halo, '0': tower}"):
        assert main(["check", *arguments, f"model.scheme={scheme}"]) == 0
        halos.append(re.findall(r"^(\S+) +halo ", capsys.readouterr().out, re.M))
    assert halos[0][0] == "0"
    assert main(["check", *arguments, "model.scheme=deep_halo(layers=3)"]) == 0
    assert "segments: 1, with 3 windows and the operators after them" in capsys.readouterr().out
    assert halos[1] == []
    assert halos[2] == [name for name in halos[0] if name != "0"]


@pytest.mark.long
def test_overlapping_tiles(folder, capsys):
    """Images are read with the overlap of tiles, and labels that `feed` computes are cropped to tiles."""
    for name, scheme in (("classifier", "overlap_tile(statistics=global)"), ("segmenter", "{'0': overlap_tile}")):
        arguments = "--set", "epochs=1", f"model.scheme={scheme}"
        expected = run(name, f"{name} one", "--set", "epochs=1")
        check_close(run(name, f"{name} four", "--virtual", 4, *arguments), expected)
        ledger = [json.loads(line) for line in Path(f"{name} four", "ledger.jsonl").read_text().splitlines()]
        assert not [record for record in ledger if record["kind"] == "halo"]
        capsys.readouterr()


MISTAKES = {
    "module": ("model.factory=os:system", r"factory: 'os:system': no module 'os' is imported; add --import os .*"),
    "factory": ("model.factory=nets:clasifier", r"factory: .* no function 'clasifier'; did you mean 'classifier'\?"),
    "other module": (
        "model.factory=nets:getenv",
        r"factory: 'nets:getenv' is defined in os; name a function defined in nets",
    ),
    "no colon": ("model.factory=build", r"factory: expected a function \(MODULE:NAME\), got the text 'build'"),
    "no module": ("model=!TorchModel {factory: 'nets:number'}", r"factory: returned a int; .* a torch\.nn\.Module"),
    "width": ("model.arguments={widht: 3}", r"arguments: classifier has no argument 'widht'; did you mean 'width'\?"),
    "fails": ("model.arguments={width: -1}", r"arguments: classifier failed: RuntimeError: .* negative dimension.*"),
    "loss": ("model.loss.name=CrossEntropy", r"loss\.name: .*; did you mean 'CrossEntropyLoss'\?.*"),
    "smooth": (
        "model.loss.arguments={label_smooth: 1}",
        r"loss\.arguments: CrossEntropyLoss has no argument 'label_smooth'; did you mean 'label_smoothing'\?",
    ),
    "optimizer": ("model.optimizer.name=Adm", r"optimizer\.name: 'Adm' is not in torch\.optim; did you mean 'Adam'.*"),
    "closure": ("model.optimizer.name=LBFGS", r"optimizer\.name: LBFGS computes the loss itself in every step; use .*"),
    "rate": ("model.optimizer.arguments={lr: -3}", r"optimizer\.arguments: Adam failed: ValueError: Invalid learn.*"),
    "weights": ("model.weights=no.safetensors", r"weights: no\.safetensors: no such file; check the path"),
    "shape": (
        "model.shape=[1, 3, 4]",
        r"shape: \[1, 3, 4\] does not have the spatial extents of the data set's images.*",
    ),
    "gather_at": (
        "model.gather_at=[head]",
        r"gather_at: the module has no submodule named 'head'; see named_modules\(\)",
    ),
    "feed": ("model.feed=nets:not_moved", r"feed: features are .* expected .* of shape \(8, 1, 13, 11\) \(samples.*"),
    "labels": ("model.feed=nets:as_arrays", r"feed: returns labels of type ndarray; return a torch\.Tensor"),
    "no labels": ("model.feed=nets:alone", r"feed: must return \(features, labels\), got Tensor"),
    "backend": ("backend=numpy", r"(.*: )?backend: 'numpy', but a TorchModel computes with PyTorch; leave it out"),
    "accumulate": (
        "accumulate=2",
        r"accumulate: applies to neondist layers, which a TorchModel does not have;"
        r" leave it out",
    ),
    "criterion": ("model.feed=nets:floats", r"model: targets: labels must be integers from 0 to 2, not float64"),
    "scheme": ("model.scheme={'9': tower}", r"scheme: the module has no submodule named '9'.*"),
    "tag": ("model=!TorchModle {}", r"model: unknown tag !TorchModle; did you mean 'TorchModel'\?"),
}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "model.loss=!TorchLoss {name: MSELoss}",
            r"model\.loss: criterion cannot be .* \(8, 3\), \(8,\): .*",
        ),
        (
            "model.loss=!TorchLoss {name: nets:loss_of_values}",
            r"model\.loss: .*nets\.py:\d+: criterion cannot be captured .*",
        ),
        (
            "model.loss=!TorchLoss {name: nets:loss_per_sample}",
            r"model\.loss: criterion: returned a tensor of shape \(8,\) .*",
        ),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_check_captures_the_loss(folder, capsys, setting, message, ranks):
    with Path("nets.py").open("a") as file:
        file.write(
            "\n\ndef loss_of_values(y, t):\n    return y.mean() if y.sum() > 0 else y.sum()\n"
            "\n\ndef loss_per_sample(y, t):\n    return y.mean(1) * t\n"
        )
    arguments = ["classifier.yaml", "--import", "nets.py", "-n", str(ranks)]
    assert main(["check", *arguments]) == 0
    assert main(["check", *arguments, "--set", setting]) == 2
    error = strip_progress_lines(capsys.readouterr().err)
    assert re.fullmatch(rf"error: (--set {re.escape(setting)}|classifier\.yaml:\d+): {message}\n", error), error


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.long
def test_mistakes_are_located(folder, capsys, name):
    setting, message = MISTAKES[name]
    arguments = ["classifier.yaml", "--import", "nets.py", "--set", setting, "epochs=1"]
    assert main(["run", *arguments, "--output", "out"]) == 2
    error = strip_progress_lines(capsys.readouterr().err)
    assert re.fullmatch(rf"error: (--set {re.escape(setting)}|classifier\.yaml:\d+): (model\.)?{message}\n", error), (
        error
    )


@pytest.mark.parametrize(
    ("arguments", "option", "remedy"),
    [
        (["step", "--against", "torch"], "--against torch", "leave it out"),
        (["step", "--roofline"], "--roofline", "leave it out"),
        (["schemes"], "bench", "use bench step, scaling or model"),
    ],
)
def test_benchmarks_that_require_layers(folder, capsys, arguments, option, remedy):
    assert main(["bench", *arguments, "classifier.yaml", "--import", "nets.py"]) == 2
    output = capsys.readouterr().err
    assert f"{option}: applies to neondist layers, which TorchModel classifier does not have; {remedy}\n" in output


@pytest.mark.long
def test_debug_halo_preserves_results(folder):
    options = ("--virtual", 2, "--debug-halo", "--set", "epochs=1")
    check_close(run("classifier", "watched", *options), run("classifier", "plain", "--set", "epochs=1"))


@needs_mpirun
def test_failing_feed_on_one_rank_ends_all(folder, capsys):
    arguments = ["run", "classifier.yaml", "--import", "nets.py", "--virtual", "2"]
    assert main([*arguments, "--set", "model.feed=nets:wrong_somewhere", "epochs=1"]) == 2
    place = "--set model.feed=nets:wrong_somewhere: model.feed"
    error = strip_progress_lines(capsys.readouterr().err)
    assert error == f"error: {place}: wrong_somewhere failed: OSError: no such lens\n"


def test_without_torch(folder):
    code, _, error = run_command(build_command("check", "classifier.yaml"), folder)
    assert code == 2
    assert error == "error: classifier.yaml:3: model: neondist.torch needs PyTorch: pip install 'neondist[torch]'\n"


def test_neondist_does_not_import_torch():
    code = "import sys, neondist, neondist.config, neondist.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "NEONDIST_TESTS_HIDE": ""}, check=True)


def test_ignored_cells_have_no_metric():
    from neondist.torch.training.module_outputs import metric_targets

    y, labels = np.zeros((2, 3, 4)), torch.tensor([[0, 3, 255], [255, 1, 2]])
    assert nd.torch.TorchLoss("CrossEntropyLoss", {"ignore_index": 255}).ignore_index == 255
    np.testing.assert_array_equal(metric_targets(y, labels, 255), labels.numpy())
    assert np.isnan(metric_targets(y, labels, -100)).all()


class Flattening(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.output = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 3)

    def forward(self, x):
        y = self.convolution(x)
        return self.output(y.view(x.size(0), -1))  # fails if PyTorch chooses channels-last


def test_one_channel_is_not_taken_for_channels_last():
    optimizer = TorchOptimizer(lambda parameters: torch.optim.SGD(parameters, 0.1))
    model = TorchModel(Flattening, loss=TorchLoss(nn.functional.cross_entropy), optimizer=optimizer)
    data = nd.Synthetic(shape=(8, 8, 1), classes=3, train=16, test=8)
    nd.FitExperiment(data, model, batch_size=8).run(nd.ProcessGrid())
    module = ndt.distribute(Flattening(), (2, 1, 8, 8))
    assert module(torch.from_numpy(np.moveaxis(np.ones((2, 8, 8, 1), "float32"), -1, 1))).shape == (2, 3)
