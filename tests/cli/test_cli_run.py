"""Commands `run` and `check`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from availability import needs_mpirun
from cli_runs import (
    build_command,
    build_mpirun_command,
    mpirun_environment,
    parse_losses,
    run_command,
    run_in_process,
    start_command,
    strip_mpirun_notices,
    strip_progress_lines,
)
from processes import communicate, is_alive

from neondist.cli import main
from neondist.cli.doctor import probe_mpi
from neondist.config import dump, load_experiment
from neondist.safe_path import python_command


def test_check_prints_the_plan_without_mpirun(folder):
    command = build_command("check", "toy.yaml", "-n", 6, "--measure-memory")
    code, out, err = run_command(command, folder, PATH="/nowhere")
    assert (code, err) == (0, "")
    for word in ("6 ranks", "ConvLayerDist", "FCLayerDist", "total"):
        assert word in out
    (peak,) = re.findall(r"^measured peak: ([\d.]+) MB for the whole process", out, re.MULTILINE)
    assert 20 < float(peak) < 500
    assert [path.name for path in folder.iterdir()] == ["toy.yaml"]


def test_run_lists_the_files_it_writes(folder):
    code, out, err = run_command(build_command("run", "toy.yaml", "--set", "epochs=1"), folder)
    assert (code, err) == (0, "")
    files = out.partition("written:\n")[2].split()
    assert {"runs/toy/experiment.yaml", "runs/toy/metrics.jsonl", "runs/toy/checkpoint.h5"} <= set(files)
    empty = {name for name in files if not (folder / name).stat().st_size}
    assert empty == {"runs/toy/ledger.jsonl"}  # one rank sends nothing


@needs_mpirun
@pytest.mark.long
def test_modules_in_the_working_directory_are_not_imported(folder, monkeypatch):
    for name in ("queue", "mpi4py", "numpy", "h5py", "neondist"):
        (folder / f"{name}.py").write_text("open('imported', 'w')\nraise SystemExit('imported from the folder')\n")
    monkeypatch.chdir(folder)
    code, _, err = run_command(python_command("neondist", "run", "toy.yaml", "-n", 2, "--set", "epochs=1"), folder)
    assert (code, strip_mpirun_notices(err)) == (0, "")
    assert probe_mpi(120).error == ""
    assert not (folder / "imported").exists()


@needs_mpirun
@pytest.mark.long
def test_losses_do_not_depend_on_ranks(folder):
    outputs = [
        run_in_process(folder, "run", "toy.yaml")[1],
        run_command(build_command("run", "toy.yaml", "-n", 3, "--overwrite"), folder)[1],
    ]
    mpirun_output = run_command(
        build_mpirun_command(2, "run", "toy.yaml", "--overwrite"), folder, **mpirun_environment()
    )[1]
    curves = [parse_losses(out) for out in (*outputs, mpirun_output)]
    assert len(curves[0]) == 2
    assert all(curve == curves[0] for curve in curves)
    assert [out.count("written:") for out in (*outputs, mpirun_output)] == [1, 1, 1]


def test_written_experiment_can_be_run(folder):
    run_in_process(folder, "run", "toy.yaml", "--set", "epochs=1", "--output", "a")
    written = (folder / "a" / "experiment.yaml").read_text()
    import_module("neondist.train")  # registers FitExperiment
    reloaded = load_experiment(folder / "a" / "experiment.yaml")
    assert dump(reloaded) == written
    assert "epochs: 1" in written
    code, *_ = run_in_process(folder, "run", "a/experiment.yaml", "--output", "b")
    assert code == 0
    first, second = (json.loads((folder / name / "metrics.jsonl").read_text()) for name in "ab")
    assert (first["train_loss"], first["test_loss"]) == (second["train_loss"], second["test_loss"])


def test_serial_classes_compute_the_same_losses(folder):
    words = ["run", "toy.yaml", "--overwrite", "--set"]
    outputs = [run_in_process(folder, *words, f"dist_flag={flag}")[1] for flag in ("true", "false")]
    assert parse_losses(outputs[0]) == parse_losses(outputs[1]) != []
    assert "ConvnetDist on" in outputs[0]
    assert "Convnet on" in outputs[1]


def test_resume(folder):
    expected = parse_losses(run_in_process(folder, "run", "toy.yaml")[1])
    run_in_process(folder, "run", "toy.yaml", "--set", "epochs=1", "--output", "r")
    code, out, _ = run_in_process(folder, "run", "toy.yaml", "--output", "r", "--resume")
    assert code == 0
    assert parse_losses(out) == expected[1:]


@pytest.mark.long
def test_import_registers_classes(folder):
    (folder / "mine.py").write_text("import neondist as nd\nclass MySGD(nd.SGD):\n    'Mine.'\n")
    words = ["check", "toy.yaml", "--set", "model.optimizer=!MySGD {learning_rate: 0.1}"]
    assert run_command(build_command(*words), folder)[0] == 2
    assert run_command(build_command(*words, "--import", "mine.py"), folder)[0] == 0
    assert run_command(build_command(*words, "--import", "mine"), folder)[0] == 0


@needs_mpirun
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.long
def test_signals_end_all_ranks(folder, pids, number, code):
    """Train for enough epochs to keep the ranks running for minutes."""
    process = start_command(
        build_command("run", "toy.yaml", "-n", 2, "--set", "epochs=100000", "--import", "write_pid.py"), folder
    )
    for line in process.stdout:
        if line.startswith("epoch 2/"):
            break
    process.send_signal(number)
    signalled = time.perf_counter()
    process.stdout.close()
    communicate(process, 60)
    assert process.returncode == code
    assert len(pids()) == 3
    while any(is_alive(pid) for pid in pids()):
        assert time.perf_counter() - signalled < 60
        time.sleep(0.05)


def read_one_line(words, folder, **env):
    """Close stdout of a command after its first line; return the exit code and stderr."""
    process = start_command(words, folder, **env)
    assert process.stdout.readline()
    process.stdout.close()
    _, err = communicate(process)
    return process.returncode, strip_progress_lines(err)


@pytest.mark.parametrize("ranks", [[], pytest.param(["-n", 2], marks=needs_mpirun)])
@pytest.mark.long
def test_run_continues_after_stdout_is_closed(folder, ranks):
    """Emulate `| head -1`, upon which mpirun would end the job with SIGPIPE."""
    words = build_command("run", "toy.yaml", *ranks, "--set", "epochs=10")
    code, err = read_one_line(words, folder)
    assert (code, err) == (0, "")
    assert len((folder / "runs" / "toy" / "metrics.jsonl").read_text().splitlines()) == 10


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.long
def test_run_continues_on_a_full_disk(folder):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            build_command("run", "toy.yaml"), cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (process.returncode, strip_progress_lines(process.stderr)) == (0, "")


def test_call_stack_from_command_to_kernel_spans_twelve_files(folder, monkeypatch):
    """Bound the files on the call stack of the first convolution, apart from checks of arguments."""
    stack, package = [], f"{Path(import_module('neondist').__file__).parent}/"

    def follow(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "conv_into" and not stack:
            while frame is not None:
                stack.append(frame.f_code.co_filename)
                frame = frame.f_back

    monkeypatch.chdir(folder)
    sys.setprofile(follow)
    try:
        assert main(["run", "toy.yaml", "--output", "out"]) == 0
    finally:
        sys.setprofile(None)
    files = [name.removeprefix(package) for name in dict.fromkeys(stack[::-1]) if name.startswith(package)]
    assert (files[0], files[-1]) == ("cli/__init__.py", "backends/rows.py")
    assert len(set(files) - {"registry/arguments.py"}) <= 12
