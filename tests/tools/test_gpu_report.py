"""tools/gpu_report.py in miniature on a simulated device, whose timings are meaningless."""

import importlib.util
import re
from functools import cache, partial
from pathlib import Path

import pytest
from device import Device

import neondist as nd
from neondist.bench.networks import BenchmarkNetwork
from neondist.comm import loopback

pytest.importorskip("torch")
TOOL = Path(__file__).parents[2] / "tools" / "gpu_report.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("gpu_report", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_miniature_report(tool, monkeypatch, tmp_path):
    halos, modules = partial(tool.run_halo, shape=(2, 8, 8, 3), steps=1), partial(tool.train_module, device="cpu")
    jobs = {"losses": tool.train_layers, "modules": modules, "halos": halos}

    @cache
    def run_on_ranks(job, ranks):
        return loopback.run(ranks, lambda comm: jobs[job](nd.ProcessGrid(comm), Device().backend))[0]

    def layers():
        return [nd.ConvLayerDist(4, 3), nd.ActivationLayerDist(nd.ReLU()), nd.FCLayerDist(3)]

    monkeypatch.setitem(tool.NETWORKS, "small", BenchmarkNetwork(2, (8, 8, 3), layers, 3))

    def measure(network, precision, compiles):
        assert compiles
        return tool.measure_network(tool.NETWORKS[network], precision, card, False, rounds=1)

    card = tool.Card("a strict device", Device().backend, "cpu", run_on_ranks, measure)
    text = "\n".join(tool.report(card, ["small"], 600, precisions=("float32", "no such")))
    differences = re.findall(r"^\| ([24]) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    assert [ranks for ranks, *_ in differences] == ["2", "4"]
    assert all(float(worst) < 1e-10 for _, *values in differences for worst in values)
    assert re.search(r"halo of an array of shape 2 × 8 × 8 × 3 between 2 ranks .*\n.* as long as a copy on the", text)
    assert re.search(r"\| small, float32 \| [\d.]+ \| [\d.]+ \| not run \(time limit\) \| not run \| [\d.]+ \|", text)
    assert re.search(r"\| small, no such \| not run \(.*precision", text)
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
    tool.write(page, text)
    assert page.read_text() == f"before\n{tool.BEGIN}\n{text}\n{tool.END}\nafter\n"
    report = "\n".join(tool.report(card, ["small"], -1, precisions=("float32",)))
    assert "| small, float32 | not run (time limit)" in report


def test_crashed_measurement_costs_one_row(tool, monkeypatch, tmp_path):
    """Measure a network without torch.compile if that crashes."""
    script = tmp_path / "step.py"
    script.write_text(
        "import json, os, sys\n"
        "if '--compile' in sys.argv or 'never' in sys.argv: os._exit(3)\n"
        "json.dump({'ours': 1.0}, open(sys.argv[-1], 'w'))\n"
    )
    monkeypatch.setattr(tool, "__file__", str(script))
    crash = "the process ended with exit code 3"
    assert tool.measure_in_process("small", "float32", True) == {"ours": 1.0, "compiled": crash}
    assert tool.measure_in_process("small", "float32", False) == {"ours": 1.0}
    assert tool.measure_in_process("never", "float32", True)["ours"] == crash


def test_missing_gpu_is_reported(tool, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_report.py"])
    monkeypatch.setattr(nd, "available", lambda: [nd.backends.BackendAvailability("cupy", False, "no GPU is visible")])
    assert tool.main() == 0
    assert capsys.readouterr().out == "no report: no GPU is visible\n"
