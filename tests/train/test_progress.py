"""Progress display: lines in a file, a bar on a terminal."""

import io
import math
import re

import pytest
from toy_training import Recorder, ToyData, ToyModel

from neondist.train import Hook, ProgressBar, fit
from neondist.train.callbacks.progress_bar import epoch_line
from neondist.train.state import EpochRecord


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _no_mpi_environment(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "NEONDIST_LAUNCHED", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_one_line_per_epoch(capsys):
    fit(ToyModel(), ToyData(), 2, 4, [ProgressBar()])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "ToyModel on 1 rank: 10 training and 7 test samples of 2 x 2 x 1, batches of 4"
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert "valid" not in "".join(lines), "the only split is the test split"
    assert all("train loss " in line and "test error " in line and "samples/s" in line for line in lines)


def test_steps_of_a_long_epoch_are_reported_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("neondist.train.callbacks.progress_bar.FIRST_LINE_SECONDS", 0)
    fit(ToyModel(), ToyData(), 2, 4, [ProgressBar()])
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    (line,) = err.splitlines()  # the next one follows after half a minute
    assert re.fullmatch(r"step 1: epoch 1/2, 40%, loss [\d.]+, [\d,.e+]+ samples/s, 0 s left in this epoch", line)


def test_speed_is_not_negative_at_an_earlier_position(capsys, monkeypatch):
    """Follow a worker whose next task is earlier in the epoch, or in another epoch."""
    monkeypatch.setattr("neondist.train.callbacks.progress_bar.FIRST_LINE_SECONDS", 0)
    monkeypatch.setattr("neondist.train.callbacks.progress_bar.LINE_INTERVAL_SECONDS", 0)
    bar = ProgressBar()

    class Reassignment(Hook):
        def after_step(self, run):
            bar.speed_start_sample = 6

    fit(ToyModel(), ToyData(), 2, 4, [Reassignment(), bar])
    assert not re.search(r"-[\d.,e+]+ samples/s", capsys.readouterr().err)


def test_validation_and_test_splits_are_shown(capsys):
    record = fit(ToyModel(), ToyData(validation=5), 1, 4, [ProgressBar()])[0]
    head, line = capsys.readouterr().out.splitlines()
    assert "10 training, 5 validation and 7 test samples of" in head
    names = ("train loss", "validation loss", "test loss", "validation error", "test error")
    assert [part.rpartition(" ")[0].removesuffix(" %") for part in line.split("  ")[1:4]] == list(names[:3])
    assert f"validation error {100 * record['validation_error']:.2f} %  test error" in line


def test_bar_on_a_terminal():
    file = Terminal()
    fit(ToyModel(), ToyData(), 2, 4, [ProgressBar(file)])
    assert "\x1b[" in file.getvalue()
    assert "epoch 2/2" in file.getvalue()
    assert file.getvalue().count("\x1b[?25h") == 1  # shows the cursor again


def test_terminal_is_restored_after_an_error():
    file = Terminal()
    with pytest.raises(RuntimeError):
        fit(ToyModel(), ToyData(), 2, 4, [ProgressBar(file), Recorder(fail_at=("after_step", 2))])
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize(
    "env", [{"TERM": "dumb"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"OMPI_COMM_WORLD_SIZE": "4", "TERM": "dumb"}]
)
def test_no_bar_without_terminal_support(env, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    file = Terminal()
    fit(ToyModel(), ToyData(), 2, 4, [ProgressBar(file)])
    assert "\x1b" not in file.getvalue()
    assert len(file.getvalue().splitlines()) == 3


def test_bar_for_ranks_of_the_launcher(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("NEONDIST_LAUNCHED", "4")
    file = Terminal()
    fit(ToyModel(), ToyData(), 1, 4, [ProgressBar(file)])
    assert "\x1b[" in file.getvalue()


def test_complete_run_is_reported(capsys):
    fit(ToyModel(), ToyData(), 2, 4, [ProgressBar()], epoch=2)
    assert "training is complete after 2 epochs" in capsys.readouterr().out


@pytest.mark.parametrize(("speed", "loss", "text"), [
    (0.0, math.nan, "train loss - (other workers trained"), (0.0, 0.5, "train loss 0.500000  "),
    (1.0, math.nan, "train loss nan  "),
])  # fmt: skip
def test_epoch_without_minibatches_of_this_worker(speed, loss, text):
    """Do not print NaN, which looks like a divergence, if other workers trained all minibatches."""
    record = EpochRecord(epoch=2, train_loss=loss, seconds=0.0, samples_per_second=speed, bytes_sent=0)
    assert epoch_line(record, 3).startswith(f"epoch 2/3  {text}")
