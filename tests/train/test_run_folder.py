"""One run at a time in a folder, and none that deletes another by mistake."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from session_toys import Recorder, experiment

from neondist.comm import ProcessGrid, loopback
from neondist.errors import ConfigError, DataError, OutputError
from neondist.io import lock, output
from neondist.io.lock import FolderLock
from neondist.train import Hook, Stop

HOLD = """
    import sys
    from pathlib import Path
    from neondist.io.lock import FolderLock

    held = FolderLock(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.2)


@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder."""
    words = [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def files(folder):
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}


def test_another_process_has_the_folder(tmp_path, holder):
    host = json.loads((tmp_path / lock.NAME).read_text())["host"]
    with pytest.raises(OutputError, match=rf"in use by another run \(process {holder.pid} on {host}, since 20"):
        experiment(1).run(output=tmp_path, hooks=[])
    assert list(files(tmp_path)) == [lock.NAME]


def test_a_holder_that_was_killed_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / lock.NAME).exists()
    experiment(1).run(output=tmp_path, hooks=[])
    assert not (tmp_path / lock.NAME).exists()


def test_two_runs_in_one_process(tmp_path):
    class Second(Hook):
        def after_epoch(self, run):
            with pytest.raises(OutputError, match=f"process {os.getpid()} on"):
                experiment(1).run(output=tmp_path, hooks=[], resume=True)

    experiment(1).run(output=tmp_path, hooks=[Second()])


def test_every_rank_learns_that_the_folder_is_taken(tmp_path, holder):
    def body(world):
        with pytest.raises(OutputError, match="in use by another run"):
            experiment(1).run(ProcessGrid(world), output=tmp_path, hooks=[])

    loopback.run(3, body)


@pytest.mark.parametrize("process", ["mine", "gone", "of another machine"])
def test_where_a_file_system_has_no_locks(tmp_path, monkeypatch, process):
    """What the file says decides."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(lock, "fcntl", SimpleNamespace(flock=refuse, LOCK_EX=0, LOCK_NB=0))
    FolderLock(tmp_path).release()
    held = FolderLock(tmp_path)
    said = json.loads((tmp_path / lock.NAME).read_text())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    said |= {"gone": {"process": gone.pid}, "of another machine": {"host": "elsewhere"}}.get(process, {})
    (tmp_path / lock.NAME).write_text(json.dumps(said))
    if process == "gone":
        FolderLock(tmp_path)
    else:
        with pytest.raises(OutputError, match=f"process {said['process']} on {said['host']}"):
            FolderLock(tmp_path)
    held.release()


def test_a_run_is_not_replaced_by_mistake(tmp_path):
    experiment(1).run(output=tmp_path, hooks=[])
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="has a run already; continue it with --resume, replace it with --overwrite"):
        experiment(1).run(output=tmp_path, hooks=[])
    assert files(tmp_path) == before
    with pytest.raises(ConfigError, match="leave out --resume or --overwrite"):
        experiment(1).run(output=tmp_path, hooks=[], resume="auto", overwrite=True)
    experiment(1).run(output=tmp_path, hooks=[], overwrite=True)


class BadData(Hook):
    def __init__(self, step):
        self.step = step

    def after_step(self, run):
        if run.step == self.step:
            raise DataError("x.npy: has missing values (NaN)")

    def before_run(self, run):
        if self.step == 0:
            raise DataError("x.npy: has missing values (NaN)")


def test_data_that_cannot_be_read_leave_no_run(tmp_path):
    def body(world):
        for place in (tmp_path / "new/run", tmp_path / "old"):
            with pytest.raises(DataError, match="missing values"):
                experiment(1).run(ProcessGrid(world), output=place, hooks=[BadData(0)])

    (tmp_path / "old").mkdir()
    (tmp_path / "old/notes.txt").write_text("mine")
    loopback.run(2, body)
    assert list(files(tmp_path)) == ["old"]
    assert list(files(tmp_path / "old")) == ["notes.txt"]
    with pytest.raises(DataError, match="missing values"):
        experiment(1).run(output=tmp_path / "trained", hooks=[BadData(2)])
    assert (tmp_path / "trained/checkpoint.h5").exists()


def test_what_a_run_left_before_its_first_checkpoint_may_go(tmp_path):
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    assert len(experiment(1).run(output=tmp_path, hooks=[]).history) == 1


class StopAt(Hook):
    def after_step(self, run):
        run.stop = Stop("asked to") if run.step == 2 else None


def test_auto_begins_or_goes_on(tmp_path):
    folder, hook = tmp_path / "new", Recorder()
    experiment(1).run(output=folder, resume="auto", hooks=[StopAt()])
    experiment(1).run(output=folder, resume="auto", hooks=[hook])
    assert hook.calls[0] == ("before_run", 0, 2)


def test_resume_after_a_kill_before_the_folder_was_begun(tmp_path):
    (tmp_path / lock.NAME).write_text("")
    (tmp_path / "environment.json.partial").write_text("{")
    assert len(experiment(1).run(output=tmp_path, resume=True, hooks=[]).history) == 1
    assert not [name for name in files(tmp_path) if name.endswith(("partial", "lock"))]


@pytest.mark.parametrize("name", ["none", "other"])
def test_resume_where_no_run_ever_was(tmp_path, name):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match=r"no run to resume|no such file"):
        experiment(1).run(output=tmp_path / name, resume=True, hooks=[])
    assert not (tmp_path / "none").exists()


def test_an_earlier_run_stays_until_the_new_one_can_be_written(tmp_path, monkeypatch):
    experiment(1).run(output=tmp_path, resolved="first", hooks=[])
    (tmp_path / "experiment.yaml.partial").mkdir()  # in the way
    with pytest.raises(OutputError, match=r"experiment\.yaml"):
        experiment(1).run(output=tmp_path, resolved="second", overwrite=True, hooks=[])
    (tmp_path / "experiment.yaml.partial").rmdir()
    assert experiment(1).run(output=tmp_path, resume=True, hooks=[]).history[0]["epoch"] == 1


def test_clear_takes_the_checkpoint_last(tmp_path):
    for name in ("checkpoint.h5", "pretrain_1.h5", "metrics.jsonl"):
        (tmp_path / name).write_text(name)
    (tmp_path / "tiles.png").mkdir()
    with pytest.raises(OutputError, match=r"tiles\.png: cannot be removed"):
        output.clear(tmp_path)
    assert (tmp_path / "checkpoint.h5").exists()
