"""Commands `bench schemes`, `bench seams` and `run --virtual`, in this process."""

import json
import time

import pytest

import neondist as nd
from neondist.bench.schemes import summarise_by_scheme
from neondist.cli import main
from neondist.train import EpochRecord

EXPERIMENT_FILE = """\
!FitExperiment
dataset: !Synthetic {shape: [10, 9, 1], train: 12, test: 6, classes: 4}
model: !ConvnetDist
  layers:
    - !ConvLayerDist {out_channels: 2, kernel_size: 3, padding: 1, activation: !ReLU {}}
    - !MaxPoolingLayerDist {kernel_size: 2}
    - !FCLayerDist {out_features: 4}
batch_size: 4
backend: numpy
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID", "NEONDIST_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(EXPERIMENT_FILE)
    return tmp_path


def results(folder):
    return [json.loads(line) for line in (folder / "runs/small-schemes/results.jsonl").read_text().splitlines()]


def bench(*words):
    return main(["bench", "schemes", "small.yaml", "--virtual", "4", "--epochs", "1", *words])


@pytest.mark.long
def test_every_scheme_and_seed_has_a_result(folder, capsys):
    assert bench("--schemes", "halo,tower(fill=reflect), every(j=2, between=zeros)", "--seeds", "2") == 0
    rows = results(folder)
    assert [(row["scheme"], row["seed"]) for row in rows] == [
        (scheme, seed) for seed in (1, 2) for scheme in ("halo", "tower(fill=reflect)", "every(j=2, between=zeros)")
    ]
    traffic = {row["scheme"]: row["bytes_per_step"] for row in rows}
    assert traffic["halo"] > traffic["every(j=2, between=zeros)"] > traffic["tower(fill=reflect)"] == 0
    assert {row["exact"] for row in rows if row["scheme"] == "halo"} == {True}
    table = (folder / "runs/small-schemes/schemes.md").read_text()
    assert "`tower(fill=reflect)` | no |" in table
    output = capsys.readouterr()
    assert "schemes.md" in output.out
    assert "run 0 of 6, now halo, seed 1, " in output.err


@pytest.mark.long
def test_several_numbers_of_tiles_share_a_table(folder):
    assert bench("--schemes", "halo,tower", "--virtual", "1,4") == 0
    assert [(row["scheme"], row["ranks"]) for row in results(folder)] == [
        ("halo", 1), ("tower", 1), ("halo", 4), ("tower", 4)
    ]  # fmt: skip
    lines = (folder / "runs/small-schemes/schemes.md").read_text().splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| 1", "`halo`"], ["| 1", "`tower`"], ["| 4", "`halo`"], ["| 4", "`tower`"]
    ]  # fmt: skip
    assert (folder / "runs/small-schemes/tiles.png").stat().st_size > 1000


def test_times_do_not_include_the_start_of_the_first_run(folder, monkeypatch):
    forward, steps = nd.ConvLayer.forward, []

    def slow_first_forward(layer, ctx, view):
        if not steps:
            time.sleep(2)
        steps.append(ctx.step)
        return forward(layer, ctx, view)

    monkeypatch.setattr(nd.ConvLayer, "forward", slow_first_forward)
    assert bench("--schemes", "halo", "--virtual", "1") == 0
    (row,) = results(folder)
    assert row["seconds_per_epoch"] < 2
    count = len(steps)
    assert bench("--schemes", "halo", "--virtual", "1") == 0
    assert len(steps) == count  # all results exist


@pytest.mark.long
def test_bench_resumes(folder):
    bench("--schemes", "halo")
    file = folder / "runs/small-schemes/results.jsonl"
    first = file.read_text()
    file.write_text(first + '{"key": "unfinis')
    (record,) = [json.loads(first)]
    bench("--schemes", "halo,tower")
    assert file.read_text().count('"scheme": "halo"') == 1
    assert record["key"] in file.read_text()
    bench("--schemes", "halo", "--set", "batch_size=6")  # another experiment is another run
    assert file.read_text().count('"scheme": "halo"') == 2


@pytest.mark.long
def test_seams(folder, capsys):
    assert main(["bench", "seams", "small.yaml", "--virtual", "4", "--schemes", "tower,halo_oneway"]) == 0
    seams = json.loads((folder / "runs/small-seams/seams.json").read_text())
    assert seams["tower"]["conv1"]["output"][0] > 0 == max(seams["halo_oneway"]["conv1"]["output"])
    output, page = capsys.readouterr().out, (folder / "runs/small-seams/seams.md").read_text()
    assert "seams.json" in output
    assert page in output
    assert "| `tower` | conv1 | output | " in page


def test_pareto_front():
    def row(scheme, error, sent):
        return EpochRecord(
            scheme=scheme, seed=1, exact=True, grid=[1, 2, 2], test_error=error, test_loss=0.0,
            bytes_per_step=sent, seconds_per_epoch=1.0,
        )  # fmt: skip

    rows = [row("halo", 0.1, 100), row("tower", 0.3, 0), row("stale", 0.2, 100), row("quantised", 0.1, 25)]
    assert {r["scheme"]: r["front"] for r in summarise_by_scheme(rows)} == {
        "halo": False, "tower": True, "stale": False, "quantised": True
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["deep_halo", "overlap_tile"])
@pytest.mark.long
def test_seams_inside_a_segment(folder, capsys, monkeypatch, scheme):
    """Exclude cells of other tiles, which layers inside a segment hold."""
    monkeypatch.setattr("neondist.bench.seams.plot_seam_errors", lambda seams, file: False)
    layers = "!ConvLayerDist {out_channels: 2, kernel_size: 3, padding: 1, scheme: " + scheme + "}"
    text = EXPERIMENT_FILE.replace("  layers:\n", f"  layers:\n    - {layers}\n    - {layers}\n")
    (folder / "small.yaml").write_text(text)
    assert main(["bench", "seams", "small.yaml", "--virtual", "4", "--schemes", "tower"]) == 0, capsys.readouterr().err
    seams = json.loads((folder / "runs/small-seams/seams.json").read_text())["tower"]
    assert list(seams) == ["conv1", "conv2", "conv3", "max_pooling1", "fc1"]
    assert max(seams["conv1"]["output"]) < 1e-5 < seams["conv3"]["output"][0]


SCHEME_MODULE = """\
import neondist as nd

print("imported")


class OddHalo(nd.schemes.Halo):
    pass
"""


def test_user_scheme_on_virtual_ranks(folder, capsys):
    """Import its module once: each thread would otherwise define a different class of the same name."""
    (folder / "odd_halo.py").write_text(SCHEME_MODULE)
    words = ["--import", "odd_halo.py", "--set", "model.scheme=odd_halo", "--virtual", "3", "--output", "out"]
    assert main(["run", "small.yaml", *words]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.count("imported") == 1
    assert main(["evaluate", "small.yaml", *words[:-4], "--checkpoint", "out/checkpoint.h5"]) == 0


def test_virtual_ranks_match_one_process(folder):
    for name, words in {"serial": [], "parallel": ["--virtual", "6"]}.items():
        assert main(["run", "small.yaml", "--set", "dtype=float64", *words, "--output", name]) == 0
    serial, parallel = (json.loads((folder / name / "metrics.jsonl").read_text()) for name in ("serial", "parallel"))
    assert parallel["test_loss"] == pytest.approx(serial["test_loss"], rel=1e-10)
    assert parallel["bytes_sent"] > serial["bytes_sent"] == 0
    assert (folder / "parallel/ledger.jsonl").read_text().count("\n") > 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "schemes", "small.yaml", "--virtual", "2", "--schemes", "halo,towr"], "did you mean 'tower'"),
        (["bench", "schemes", "small.yaml", "--virtual", "2", "--schemes", ","], "--schemes: no scheme is given"),
        (
            ["bench", "schemes", "small.yaml", "--virtual", "1,3", "--set", "grid.rows=1", "grid.cols=1"],
            "match 3 ranks",
        ),
        (["bench", "seams", "small.yaml", "--virtual", "2", "--schemes", "deep_halo"], "specify approximate schemes"),
        (["run", "small.yaml", "--virtual", "2", "-n", "2"], "--virtual runs all ranks in this process"),
        (["run", "small.yaml", "--virtual", "5", "--set", "grid.rows=2"], "does not match 5 ranks"),
    ],
)
def test_errors_are_reported_once(words, message, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.count(message) == 1
