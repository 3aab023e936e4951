"""Command `bench torch`: options, tables, and a model on ranks; times are not asserted."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench_reports import make_report  # noqa: E402

from neondist.bench.module_profile import classify_event  # noqa: E402
from neondist.bench.module_report import TIME_KINDS, module_markdown, module_table  # noqa: E402
from neondist.bench.module_step import default_shape, forward_flops, measure_module  # noqa: E402
from neondist.bench.public_models import MODELS  # noqa: E402
from neondist.bench.suite import bench_suite, geometric_means  # noqa: E402
from neondist.cli import main  # noqa: E402
from neondist.cli.bench import modules as command  # noqa: E402
from neondist.comm import SingleTransport  # noqa: E402
from neondist.errors import ConfigError, LaunchError  # noqa: E402
from neondist.terminal.progress_line import ProgressFile, SilentProgress, read_seconds_left  # noqa: E402

NETS = """\
from torch import nn


class Small(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def fails():
    raise ValueError("no weights here")


def number():
    return 3
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.setattr(
        command, "run_bench_for_json", lambda words, env, create_error: pytest.fail("started a process")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--models nowhere.py:Small", "--models nowhere.py: no such file"),
        ("--models nets.py:Smal", "nets.py has no 'Smal'; did you mean 'Small'?"),
        ("--models resnet", "--models resnet: unknown; expected efficientnet_b0, "),
        ("--models nets.py:Small -n 1000", "-n 1000: this machine has "),
        (
            "--models nets.py:Small --json nowhere/made.json",
            "made.json: its folder does not exist; create it, or choose another",
        ),
        ("--models nets.py:Small,nets.py:fails --variant eager", "--variant measures one model"),
        ("--models nets.py:Small --variant eager -n 2", "--variant eager runs in one process; leave out -n"),
        ("--models nets.py:fails --variant eager", "fails failed: ValueError: no weights here"),
        ("--models nets.py:number --variant eager", "the factory returned a int"),
        ("--models nets.py:Small --variant eager --input 1,4,8,8", "a training step for an input of 1×4×8×8 failed"),
    ],
)
def test_errors(words, message, nets, capsys):
    assert main(["bench", "torch", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--against eagre", "--models ,"])
def test_invalid_arguments(words):
    with pytest.raises(SystemExit) as end:
        main(["bench", "torch", *words.split()])
    assert end.value.code == 2


@pytest.mark.long
def test_measurements_in_this_process_and_on_ranks(tmp_path, monkeypatch):
    """Expect a breakdown of the step of both variants, without messages and sums in one process."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEONDIST_TESTS_HIDE", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["bench", "torch", "--models", "nets.py:Small", "--input", "1,3,16,12", "--steps", "1", "--profile"]
    details = {}
    for variant, options in {"eager": [], "ranks": ["-n", "2", "--force"]}.items():
        file = tmp_path / f"{variant}.json"
        assert main([*words, "--variant", variant, *options, "--json", str(file)]) == 0
        turn = json.loads(file.read_text())
        assert (turn["batch_size"], turn["sample_shape"]) == (1, [3, 16, 12])
        assert turn["seconds"] > 0 <= turn["peak_bytes"]  # 0 if this process has needed more before
        details[variant] = turn["details"]
        assert tuple(details[variant]["kinds"]) == TIME_KINDS
        assert sum(details[variant]["kinds"].values()) == pytest.approx(1)
        assert sum(details[variant]["operators"].values()) == pytest.approx(details[variant]["kinds"]["kernels"])
    assert min(details["ranks"]["kinds"].values()) > 0
    assert details["eager"]["kinds"]["messages"] == details["eager"]["kinds"]["sums"] == 0


def test_unsupported_modules_have_one_message(nets, tmp_path, capsys, monkeypatch):
    """Measure the others alone."""
    turns_run = []

    def run_turn(words, env, failure):
        turns_run.append((words[2], words[4], env["OMP_NUM_THREADS"]))
        assert "MALLOC_TRIM_THRESHOLD_" in env
        if words[2] == "nets.py:number":
            raise failure(2, "a warning\nerror: aten.nothing: has no rule\n")
        return {"seconds": 1.0, "peak_bytes": 8, "batch_size": 1, "sample_shape": [3, 8, 8]}

    monkeypatch.setattr(command, "run_bench_for_json", run_turn)
    monkeypatch.setattr(command.threads, "count_cores", lambda process=0: 4)
    words = ["--against", "eager", "--rounds", "2", "--input", "1,3,8,8", "-n", "2"]
    assert main(["bench", "torch", "--models", "nets.py:Small,nets.py:number", *words, "--json", "bench.json"]) == 2
    turns = [("nets.py:Small", "ranks", "2"), ("nets.py:Small", "eager", "4")]
    assert turns_run == [*turns, *turns, ("nets.py:number", "ranks", "2")]
    assert "nets.py:number, ranks, eager: aten.nothing: has no rule" in capsys.readouterr().out
    assert [row["network"] for row in json.loads((tmp_path / "bench.json").read_text())["networks"]] == [
        "nets.py:Small", "nets.py:number",
    ]  # fmt: skip
    assert main(["bench", "torch", "--models", "nets.py:number", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "turn 0 of 4, now checking nets.py:number, 0 s so far, at least 1 s left  "
    assert lines[-1] == "error: aten.nothing: has no rule"


class Event:
    def __init__(self, name, parent=None):
        self.name, self.cpu_parent = name, parent


def test_time_is_attributed_to_the_computing_operator():
    conv = Event("aten::conv2d")
    slow = Event("aten::_slow_conv2d_forward", Event("aten::convolution", conv))
    assert classify_event(Event("aten::addmm", slow)) == ("kernels", "aten::_slow_conv2d_forward")
    assert classify_event(conv) == ("kernels", "aten::conv2d")
    assert classify_event(Event("aten::copy_", Event("aten::contiguous", conv))) == ("copies", "aten::contiguous")
    node = Event("autograd::engine::evaluate_function: ViewBackward")
    assert classify_event(node)[0] == "other"
    assert classify_event(Event("_Convolution", node)) == ("kernels", "neondist::convolution")
    assert classify_event(Event("aten::constant_pad_nd", Event("_Convolution", node)))[0] == "copies"
    assert classify_event(Event("aten::add_", Event("neondist::halo", node)))[0] == "copies"
    assert classify_event(Event("neondist::wait", Event("neondist::reduce", node)))[0] == "messages"


def test_forward_flops_of_a_module():
    nn = torch.nn
    assert forward_flops(lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 8, 10)) == 2 * 2 * 80 * 27 * 4
    assert forward_flops(lambda: nn.Conv2d(3, 4, 3), (2, 4, 8, 10)) == 0  # the turn has the error


def test_progress_of_a_measurement(tmp_path):
    """Count the steps after the first one, and the profiled one."""
    file = ProgressFile(tmp_path / "end")
    measure_module("eager", lambda: torch.nn.Conv2d(1, 1, 1), (1, 1, 4, 4), SingleTransport(), 2, progress=file)
    assert file.done_parts == file.total_parts > 2
    assert read_seconds_left(tmp_path / "end") == 0


def test_default_input_shapes():
    nn = torch.nn
    assert default_shape(nn.Sequential(nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Conv2d(4, 2, 1))) == (1, 5, 224, 224)
    assert default_shape(nn.Conv3d(2, 4, 3)) == (1, 2, 64, 64, 64)
    with pytest.raises(ConfigError, match="Linear has no convolution to infer the input shape from; give --input"):
        default_shape(nn.Linear(3, 4))


def measure(network, variant, first):
    if network == "b":
        raise LaunchError("ended")
    kinds = dict.fromkeys(TIME_KINDS, 0.2)
    details = {"first_seconds": 3.0} | ({"kinds": kinds, "operators": {"mm": 0.1}} if variant != "compile" else {})
    seconds = {"ranks": 1.0, "eager": 4.0, "compile": 2.0}[variant]
    return {
        "seconds": seconds, "peak_bytes": 3 if variant == "ranks" else 4, "details": details, "batch_size": 1,
        "sample_shape": [3, 8, 8],
    }  # fmt: skip


def test_tables():
    from rich.console import Console

    variants = ["ranks", "eager", "compile"]
    rows = list(bench_suite(["a", "b"], variants, measure, 2, SilentProgress(), Path("missing")))
    report = make_report(rows, variants, 2, geometric_means(rows, {"CNN": ["a"]}))
    page = module_markdown(report)
    assert "| a | 1×3×8×8 | 1 s | 4 s | 2 s* | 0.50 (0.50 to 0.50) | 3 B | 4 B | 0.75 | 3 s | 3 s | 3 s |" in page
    assert "| a | a rank | 200 ms | 200 ms | 200 ms | 200 ms | 200 ms | mm 100 ms |" in page
    assert "* geometric mean, CNN: 2 × 1 ÷ best = 0.50, memory ÷ eager = 0.75" in page
    assert "* b, ranks, eager, compile: ended" in page
    legend = " * marks PyTorch's faster variant. ÷ best: step time divided by that of this variant in the same round"
    assert legend in page
    for variants, has_ratio in ((["ranks", "eager"], True), (["ranks"], False)):
        rows = list(bench_suite(["a"], variants, measure, 2, SilentProgress(), Path("missing")))
        page = module_markdown(make_report(rows, variants, 2, {}))
        assert "marks PyTorch" not in page
        assert ("÷ best: step time divided by PyTorch's in the same round" in page) == has_ratio
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(module_table(report))
    assert "b, ranks, eager, compile: ended" in console.export_text()


def test_names_of_models():
    assert tuple(command.MODEL_NAMES_HELP.split(", ")) == tuple(MODELS)
    assert len({model.family for model in MODELS.values()}) == 6
