"""Exclusive use of run folders, and protection of earlier runs."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from toy_training import Recorder, make_experiment
from training_records import StopAtStep

from neondist.comm import ProcessGrid, loopback
from neondist.errors import ConfigError, DataError, OutputError
from neondist.io import lock, output
from neondist.io.lock import FolderLock
from neondist.train import Hook

LOCK_HOLDER_SCRIPT = """
    import sys
    from pathlib import Path
    from neondist.io.lock import FolderLock

    held = FolderLock(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def short_lock_timeout(monkeypatch):
    monkeypatch.setattr(lock, "LOCK_TIMEOUT_SECONDS", 0.2)


@pytest.fixture
def lock_holder(tmp_path):
    """Another process that holds the lock of the folder."""
    command = [sys.executable, "-c", textwrap.dedent(LOCK_HOLDER_SCRIPT), str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def read_files(folder):
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}


def test_folder_locked_by_another_process(tmp_path, lock_holder):
    host = json.loads((tmp_path / lock.LOCK_FILE_NAME).read_text())["host"]
    with pytest.raises(OutputError, match=rf"in use by another run \(process {lock_holder.pid} on {host}, since 20"):
        make_experiment(1).run(output=tmp_path, hooks=[])
    assert list(read_files(tmp_path)) == [lock.LOCK_FILE_NAME]


def test_killed_process_releases_the_lock(tmp_path, lock_holder):
    lock_holder.send_signal(signal.SIGKILL)
    lock_holder.wait()
    assert (tmp_path / lock.LOCK_FILE_NAME).exists()
    make_experiment(1).run(output=tmp_path, hooks=[])
    assert not (tmp_path / lock.LOCK_FILE_NAME).exists()


def test_second_run_in_one_process_is_rejected(tmp_path):
    class StartSecondRun(Hook):
        def after_epoch(self, run):
            with pytest.raises(OutputError, match=f"process {os.getpid()} on"):
                make_experiment(1).run(output=tmp_path, hooks=[], resume=True)

    make_experiment(1).run(output=tmp_path, hooks=[StartSecondRun()])


def test_all_ranks_raise_if_the_folder_is_locked(tmp_path, lock_holder):
    def body(world):
        with pytest.raises(OutputError, match="in use by another run"):
            make_experiment(1).run(ProcessGrid(world), output=tmp_path, hooks=[])

    loopback.run(3, body)


@pytest.mark.parametrize("process", ["mine", "gone", "of another machine"])
def test_lock_file_decides_without_file_locks(tmp_path, monkeypatch, process):
    """The contents of the lock file decide."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(lock, "fcntl", SimpleNamespace(flock=refuse, LOCK_EX=0, LOCK_NB=0))
    FolderLock(tmp_path).release()
    folder_lock = FolderLock(tmp_path)
    contents = json.loads((tmp_path / lock.LOCK_FILE_NAME).read_text())
    exited = subprocess.Popen([sys.executable, "-c", ""])
    exited.wait()
    contents |= {"gone": {"process": exited.pid}, "of another machine": {"host": "elsewhere"}}.get(process, {})
    (tmp_path / lock.LOCK_FILE_NAME).write_text(json.dumps(contents))
    if process == "gone":
        FolderLock(tmp_path)
    else:
        with pytest.raises(OutputError, match=f"process {contents['process']} on {contents['host']}"):
            FolderLock(tmp_path)
    folder_lock.release()


def test_run_is_not_replaced_by_default(tmp_path):
    make_experiment(1).run(output=tmp_path, hooks=[])
    before = read_files(tmp_path)
    with pytest.raises(ConfigError, match=r"has a run already; resume it \(--resume\), overwrite it"):
        make_experiment(1).run(output=tmp_path, hooks=[])
    assert read_files(tmp_path) == before
    with pytest.raises(ConfigError, match="pass only one of resume and overwrite"):
        make_experiment(1).run(output=tmp_path, hooks=[], resume="auto", overwrite=True)
    make_experiment(1).run(output=tmp_path, hooks=[], overwrite=True)


class DataErrorAtStep(Hook):
    def __init__(self, step):
        self.step = step

    def after_step(self, run):
        if run.step == self.step:
            raise DataError("x.npy: has missing values (NaN)")

    def before_run(self, run):
        if self.step == 0:
            raise DataError("x.npy: has missing values (NaN)")


def test_unreadable_data_leave_no_run_folder(tmp_path):
    def body(world):
        for folder in (tmp_path / "new/run", tmp_path / "old"):
            with pytest.raises(DataError, match="missing values"):
                make_experiment(1).run(ProcessGrid(world), output=folder, hooks=[DataErrorAtStep(0)])

    (tmp_path / "old").mkdir()
    (tmp_path / "old/notes.txt").write_text("mine")
    loopback.run(2, body)
    assert list(read_files(tmp_path)) == ["old"]
    assert list(read_files(tmp_path / "old")) == ["notes.txt"]
    with pytest.raises(DataError, match="missing values"):
        make_experiment(1).run(output=tmp_path / "trained", hooks=[DataErrorAtStep(2)])
    assert (tmp_path / "trained/checkpoint.h5").exists()


def test_files_without_a_checkpoint_are_replaced(tmp_path):
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    assert len(make_experiment(1).run(output=tmp_path, hooks=[]).history) == 1


def test_auto_starts_or_resumes(tmp_path):
    folder, hook = tmp_path / "new", Recorder()
    make_experiment(1).run(output=folder, resume="auto", hooks=[StopAtStep(2)])
    make_experiment(1).run(output=folder, resume="auto", hooks=[hook])
    assert hook.calls[0] == ("before_run", 0, 2)


def test_resume_of_a_run_killed_before_its_first_file(tmp_path):
    (tmp_path / lock.LOCK_FILE_NAME).write_text("")
    (tmp_path / "environment.json.partial").write_text("{")
    assert len(make_experiment(1).run(output=tmp_path, resume=True, hooks=[]).history) == 1
    assert not [name for name in read_files(tmp_path) if name.endswith(("partial", "lock"))]


@pytest.mark.parametrize("name", ["none", "other"])
def test_resume_without_a_run_is_rejected(tmp_path, name):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match=r"no run to resume|no such file"):
        make_experiment(1).run(output=tmp_path / name, resume=True, hooks=[])
    assert not (tmp_path / "none").exists()


def test_earlier_run_stays_until_the_new_one_is_writable(tmp_path, monkeypatch):
    make_experiment(1).run(output=tmp_path, yaml_text="first", hooks=[])
    (tmp_path / "experiment.yaml.partial").mkdir()  # in the way
    with pytest.raises(OutputError, match=r"experiment\.yaml"):
        make_experiment(1).run(output=tmp_path, yaml_text="second", overwrite=True, hooks=[])
    (tmp_path / "experiment.yaml.partial").rmdir()
    assert make_experiment(1).run(output=tmp_path, resume=True, hooks=[]).history[0]["epoch"] == 1


def test_clear_removes_the_checkpoint_last(tmp_path):
    for name in ("checkpoint.h5", "pretrain_1.h5", "metrics.jsonl"):
        (tmp_path / name).write_text(name)
    (tmp_path / "tiles.png").mkdir()
    with pytest.raises(OutputError, match=r"tiles\.png: cannot be removed"):
        output.remove_run_files(tmp_path)
    assert (tmp_path / "checkpoint.h5").exists()
