"""neondist run and check, as users call them."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from cli_runs import EXPERIMENT, call, here, losses, mpirun_env, needs_mpirun, neondist, own, start, under_mpirun
from processes import alive, finish

from neondist.cli import main
from neondist.cli.doctor import probe_mpi
from neondist.config import dump, load_experiment
from neondist.safe_path import command


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toy.yaml").write_text(EXPERIMENT)
    return tmp_path


def test_check_prints_the_plan_without_mpirun(folder):
    code, out, err = call(neondist("check", "toy.yaml", "-n", 6), folder, PATH="/nowhere")
    assert (code, err) == (0, "")
    for word in ("6 ranks", "ConvLayerDist", "FCLayerDist", "total"):
        assert word in out
    assert [path.name for path in folder.iterdir()] == ["toy.yaml"]


def test_run_writes_and_names_its_files(folder):
    code, out, err = call(neondist("run", "toy.yaml", "--set", "epochs=1"), folder)
    assert (code, err) == (0, "")
    files = out.partition("written:\n")[2].split()
    assert {"runs/toy/experiment.yaml", "runs/toy/metrics.jsonl", "runs/toy/checkpoint.h5"} <= set(files)
    empty = {name for name in files if not (folder / name).stat().st_size}
    assert empty == {"runs/toy/ledger.jsonl"}  # one rank sends nothing


@needs_mpirun
@pytest.mark.long
def test_files_that_lie_there_are_not_imported(folder, monkeypatch):
    for name in ("queue", "mpi4py", "numpy", "h5py", "neondist"):
        (folder / f"{name}.py").write_text("open('imported', 'w')\nraise SystemExit('imported from the folder')\n")
    monkeypatch.chdir(folder)
    code, _, err = call(command("neondist", "run", "toy.yaml", "-n", 2, "--set", "epochs=1"), folder)
    assert (code, own(err)) == (0, "")
    assert probe_mpi(120).error == ""
    assert not (folder / "imported").exists()


@needs_mpirun
@pytest.mark.long
def test_every_number_of_ranks_prints_the_same_losses(folder):
    outs = [here(folder, "run", "toy.yaml")[1], call(neondist("run", "toy.yaml", "-n", 3, "--overwrite"), folder)[1]]
    joined = call(under_mpirun(2, "run", "toy.yaml", "--overwrite"), folder, **mpirun_env())[1]
    found = [losses(out) for out in (*outs, joined)]
    assert len(found[0]) == 2
    assert all(one == found[0] for one in found)
    assert [out.count("written:") for out in (*outs, joined)] == [1, 1, 1]


def test_what_ran_can_be_run_again(folder):
    here(folder, "run", "toy.yaml", "--set", "epochs=1", "--output", "a")
    written = (folder / "a" / "experiment.yaml").read_text()
    import_module("neondist.train")  # registers FitExperiment
    again = load_experiment(folder / "a" / "experiment.yaml")
    assert dump(again) == written
    assert "epochs: 1" in written
    code, *_ = here(folder, "run", "a/experiment.yaml", "--output", "b")
    assert code == 0
    one, two = (json.loads((folder / name / "metrics.jsonl").read_text()) for name in "ab")
    assert (one["train_loss"], one["test_loss"]) == (two["train_loss"], two["test_loss"])


def test_the_serial_twins_give_the_same(folder):
    words = ["run", "toy.yaml", "--overwrite", "--set"]
    both = [here(folder, *words, f"dist_flag={flag}")[1] for flag in ("true", "false")]
    assert losses(both[0]) == losses(both[1]) != []
    assert "ConvnetDist on" in both[0]
    assert "Convnet on" in both[1]


def test_resume(folder):
    whole = losses(here(folder, "run", "toy.yaml")[1])
    here(folder, "run", "toy.yaml", "--set", "epochs=1", "--output", "r")
    code, out, _ = here(folder, "run", "toy.yaml", "--output", "r", "--resume")
    assert code == 0
    assert losses(out) == whole[1:]


@pytest.mark.long
def test_import_adds_classes(folder):
    (folder / "mine.py").write_text("import neondist as nd\nclass MySGD(nd.SGD):\n    'Mine.'\n")
    words = ["check", "toy.yaml", "--set", "model.optimizer=!MySGD {learning_rate: 0.1}"]
    assert call(neondist(*words), folder)[0] == 2
    assert call(neondist(*words, "--import", "mine.py"), folder)[0] == 0
    assert call(neondist(*words, "--import", "mine"), folder)[0] == 0


@needs_mpirun
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.long
def test_interrupting_ends_all_ranks(folder, number, code):
    """The ranks tell their process ids; epochs enough that they would run for minutes."""
    (folder / "tell.py").write_text("import os, pathlib\npathlib.Path(f'pid{os.getpid()}').touch()\n")
    process = start(neondist("run", "toy.yaml", "-n", 2, "--set", "epochs=100000", "--import", "tell.py"), folder)
    for line in process.stdout:
        if line.startswith("epoch 2/"):
            break
    process.send_signal(number)
    begin = time.perf_counter()
    process.stdout.close()
    finish(process, 60)
    assert process.returncode == code
    pids = [int(path.name[3:]) for path in folder.glob("pid*")]
    assert len(pids) == 3
    while any(alive(pid) for pid in pids):
        assert time.perf_counter() - begin < 60
        time.sleep(0.05)


def read_one_line(words, folder, **env):
    """Run with an output that nobody reads on after the first line; return the exit code and stderr."""
    process = start(words, folder, **env)
    assert process.stdout.readline()
    process.stdout.close()
    _, said = finish(process)
    return process.returncode, said


@pytest.mark.parametrize("ranks", [[], pytest.param(["-n", 2], marks=needs_mpirun)])
@pytest.mark.long
def test_a_run_goes_on_where_nobody_reads_on(folder, ranks):
    """As with `| head -1`: mpirun would end the job with SIGPIPE."""
    words = neondist("run", "toy.yaml", *ranks, "--set", "epochs=10")
    code, said = read_one_line(words, folder)
    assert (code, said) == (0, "")
    assert len((folder / "runs" / "toy" / "metrics.jsonl").read_text().splitlines()) == 10


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.long
def test_a_run_goes_on_where_its_output_finds_no_room(folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run(neondist("run", "toy.yaml"), cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_dozen_files_lie_between_the_command_and_a_kernel(folder, monkeypatch):
    """What somebody reads who follows a run: the stack of the first convolution, but for the check of arguments."""
    found, package = [], f"{Path(import_module('neondist').__file__).parent}/"

    def follow(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "conv_into" and not found:
            while frame is not None:
                found.append(frame.f_code.co_filename)
                frame = frame.f_back

    monkeypatch.chdir(folder)
    sys.setprofile(follow)
    try:
        assert main(["run", "toy.yaml", "--output", "out"]) == 0
    finally:
        sys.setprofile(None)
    files = [name.removeprefix(package) for name in dict.fromkeys(found[::-1]) if name.startswith(package)]
    assert (files[0], files[-1]) == ("cli/__init__.py", "backends/rows.py")
    assert len(set(files) - {"registry/arguments.py"}) <= 12
