"""Restarts after lost ranks: a run ends with the weights of an uninterrupted one."""

import argparse
import os
import re

import numpy as np
import pytest
from availability import needs_mpirun
from cli_runs import EXPERIMENT, build_command, run_command
from restart_runs import read_weights

from neondist.cli import main
from neondist.cli.arguments import create_parser
from neondist.cli.run import parse_rank_bounds
from neondist.errors import DataError
from neondist.io.checkpoint import checksum
from neondist.launcher.launch import rank_args
from neondist.launcher.restarts import restore_newest_checkpoint, resume_arguments

# rank 1 kills itself in its second epoch, once per file die*, after it has damaged a checkpoint if the file asks for it
DYING_ACTIVATION_MODULE = """
import os, pathlib, signal
import neondist as nd
class Dies(nd.Activation):
    "The identity."
    calls = 0
    def fprop(self, z):
        self.calls += 1
        files = sorted(pathlib.Path().glob("die*"))
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "1" and self.calls == 6 and files:
            if "damage" in files[0].read_text():
                with open("out/checkpoint.h5", "rb+") as file:
                    file.seek(600)
                    file.write(b"broken")
            files[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return z
    def bprop(self, y, dy):
        return dy
"""


@pytest.fixture
def folder(tmp_path):
    text = EXPERIMENT.replace("!ReLU {}", "!Dies {}").replace("1e-3", "1e-2, momentum: 0.9")
    (tmp_path / "toy.yaml").write_text(text.replace("epochs: 2", "epochs: 3\ncheckpoint: {every_steps: 1}"))
    (tmp_path / "dies.py").write_text(DYING_ACTIVATION_MODULE)
    return tmp_path


def run_toy(folder, output, *options):
    words = ["toy.yaml", "--import", "dies.py", "--output", output, *options]
    return run_command(build_command("run", *words), folder)


@needs_mpirun
@pytest.mark.long
def test_killed_rank_and_damaged_checkpoint(folder):
    (folder / "die1").write_text("damage")
    (folder / "die2").write_text("")
    code, out, err = run_toy(folder, "out", "-n", 2, "--restarts", 3, "--elastic", "1:2")
    assert code == 0, err
    restarts = [line for line in out.splitlines() if line.startswith("restart ")]
    assert len(restarts) == 1
    assert re.match(r"restart 1 of 3: rank 1 of 2 on \S+ .*; resuming from checkpoint-0000000", restarts[0])
    assert restarts[0].endswith("on 1 rank")
    assert "Traceback" not in err
    (folder / "die2").unlink()
    assert run_toy(folder, "other")[0] == 0
    weights, expected = read_weights(folder / "out" / "checkpoint.h5"), read_weights(folder / "other" / "checkpoint.h5")
    assert list(weights) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, rtol=1e-10, atol=1e-12, err_msg=name)


@needs_mpirun
@pytest.mark.long
def test_restarts_are_limited_and_not_for_errors(folder):
    for number in range(2):
        (folder / f"die{number}").write_text("")
    code, out, _ = run_toy(folder, "out", "-n", 2, "--restarts", 1)
    assert (code, out.count("restart ")) == (137, 1)
    assert "restart 1 of 1" in out
    code, out, err = run_toy(folder, "out", "-n", 2, "--restarts", 1)
    assert (code, "restart " in out) == (2, False)
    assert "has a run already" in err


def test_arguments_of_restarts():
    words = [
        "run",
        "a.yaml",
        "--resume",
        "auto",
        "--restarts",
        "3",
        "-n",
        "4",
        "--elastic=2:4",
        "--lease",
        "9s",
        "--overwrite",
    ]
    assert (
        resume_arguments(words[:4])
        == resume_arguments(["run", "a.yaml", "--overwrite"])
        == ["run", "a.yaml", "--resume", "auto"]
    )
    assert resume_arguments(["run", "--resume", "a.yaml"]) == ["run", "a.yaml", "--resume", "auto"]
    assert rank_args(create_parser().parse_args(words)) == ["run", "a.yaml", "--resume", "auto", "--overwrite"]
    assert parse_rank_bounds("2:8") == (2, 8)
    for text in ("2", "0:3", "4:2", "a:b", "1:2:3"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_rank_bounds(text)


def test_newest_valid_checkpoint(tmp_path, monkeypatch):
    def check(path):
        if "damaged" in path.read_text():
            raise DataError("damaged")

    monkeypatch.setattr(checksum, "verify_checksum", check)
    (tmp_path / "pretrain_2.h5").write_text("two")
    (tmp_path / "pretrain_10.h5").write_text("ten")
    assert restore_newest_checkpoint(tmp_path).name == "pretrain_10.h5"
    for i, (name, text) in enumerate({"-00000002": "old", "-00000004": "damaged", "": "damaged"}.items()):
        path = tmp_path / f"checkpoint{name}.h5"
        path.write_text(text)
        os.utime(path, (i, i))
    assert restore_newest_checkpoint(tmp_path).name == "checkpoint-00000002.h5"
    assert (tmp_path / "checkpoint.h5").read_text() == "old"


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--restarts", 2], "give their number with -n"), (["--elastic", "1:2"], "also give --restarts"),
     (["--restarts", 2, "--elastic", "2:3", "-n", 1], "not within --elastic 2:3")],
)  # fmt: skip
def test_conflicting_options(capsys, options, message):
    assert main(["run", "toy.yaml", *map(str, options)]) == 2
    assert message in capsys.readouterr().err
