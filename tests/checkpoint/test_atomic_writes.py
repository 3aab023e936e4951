"""Atomic writes: complete or absent, never through a link, and errors in one message."""

import os
import stat
import tempfile

import numpy as np
import pytest
from checkpoint_runs import load_run, save_run

import neondist as nd
from neondist.errors import OutputError
from neondist.io.files import (
    DraftFile,
    append_text,
    atomic_replacement,
    make_folder,
    partial_path,
    write_figure,
    write_text,
)


def read_umask():
    os.umask(umask := os.umask(0))
    return umask


def supports_unnamed_files(folder):
    """Whether the file system of a folder has unnamed files."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR))
    except (AttributeError, OSError):
        return False
    return True


needs_unnamed_files = pytest.mark.skipif(not supports_unnamed_files(tempfile.gettempdir()), reason="needs O_TMPFILE")


@pytest.fixture
def named_drafts(monkeypatch):
    """As on file systems without unnamed files."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)


@pytest.fixture(params=[False, True], ids=["unnamed", "named"])
def link_target(request, tmp_path):
    if request.param:
        request.getfixturevalue("named_drafts")
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious"


def test_draft_replaces_a_link(tmp_path, link_target):
    target = tmp_path / "x.json"
    partial_path(target).symlink_to(link_target)
    write_text(target, "mine")
    assert target.read_text() == "mine"
    assert not os.path.lexists(partial_path(target))


def test_checkpoint_is_not_written_through_a_link(tmp_path, link_target):
    for name in ("c.h5.partial", "c-00000001.h5.partial"):
        (tmp_path / name).symlink_to(link_target)
    save_run(tmp_path / "c.h5", 2, steps=1)
    assert load_run(tmp_path / "c.h5")[0].step == 1
    assert not (tmp_path / "c.h5").is_symlink()


def test_predictions_are_not_written_through_a_link(tmp_path, link_target):
    for name in ("y.npy", "y.h5"):
        partial_path(tmp_path / name).symlink_to(link_target)
        with nd.create_sink(tmp_path / name, (2, 3), "float32", "NC") as sink:
            sink.write([(0, 2), (0, 3)], np.ones((2, 3)))
            sink.commit()
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.ones((2, 3), np.float32))


@pytest.mark.parametrize("path", [".", "..", "/", "folder", "folder/"])
def test_folders_are_not_replaced(path, tmp_path, monkeypatch):
    (tmp_path / "inside" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "inside")
    strategy = nd.strategies.PS().build([nd.ParameterSpec("a", (4,))], 2)
    with pytest.raises(OutputError, match=r"cannot be written .*choose another path"):
        strategy.save(path)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["inside", "folder"]


def test_lines_are_not_appended_through_a_link(tmp_path, link_target):
    (tmp_path / "log").symlink_to(link_target)
    with pytest.raises(OutputError, match="log: cannot be written"):
        append_text(tmp_path / "log", "line\n")


def test_failed_block_keeps_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_text(path, "old")

    def write_and_fail():
        with atomic_replacement(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert path.read_text() == "old"


def test_two_writers_of_one_file(tmp_path, named_drafts):
    """The second writer removes the first one's draft; the first must neither rename nor remove the second's."""
    first = DraftFile(tmp_path / "x")
    second = DraftFile(tmp_path / "x")
    second.file.write(b"second")
    with pytest.raises(OSError, match="another process"):
        first.finish()
    first.discard()
    second.finish()
    second.discard()
    assert (tmp_path / "x").read_bytes() == b"second"
    assert len(list(tmp_path.iterdir())) == 1


def raise_permission_error(*args, **kwargs):
    raise PermissionError(1, "Operation not permitted")


@needs_unnamed_files
def test_killed_process_leaves_no_draft(tmp_path, monkeypatch):
    write_text(tmp_path / "x", "old")
    draft = DraftFile(tmp_path / "x")
    draft.file.write(b"new" * 10_000)
    draft.file.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]  # what SIGKILL would leave
    monkeypatch.setattr(os, "fsync", raise_permission_error)
    with pytest.raises(PermissionError):
        draft.finish()
    draft.discard()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"old"}


@needs_unnamed_files
@pytest.mark.parametrize("can_link", [True, False])
def test_unnamed_draft_gets_its_name(tmp_path, monkeypatch, can_link):
    """If the system refuses to link the file, it is copied."""
    if not can_link:
        monkeypatch.setattr(os, "link", raise_permission_error)
    partial_path(tmp_path / "x").write_text("of a killed process")
    draft = DraftFile(tmp_path / "x")
    draft.file.write(b"new" * 10_000)
    draft.finish()
    draft.discard()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"new" * 10_000}
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~read_umask()


def test_messages_name_path_reason_and_remedy(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for action in (lambda: write_text(file / "x", "a"), lambda: make_folder(file / "x")):
        with pytest.raises(OutputError, match=r"file/x: .*\(Not a directory\); choose another path: part of this"):
            action()
    with pytest.raises(OutputError, match=r"file: .*\(File exists\); choose another path, or remove the file"):
        make_folder(file)


def test_special_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="not a regular file"):
        write_text(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_figure_is_drawn_before_its_file_exists(tmp_path):
    """A process that is killed while it draws leaves no partial file."""
    calls = []

    class Figure:
        def savefig(self, file, dpi, format):
            calls.append((dpi, format, list(tmp_path.iterdir())))
            file.write(b"image")

        def clear(self):
            calls.append("clear")

    write_figure(tmp_path / "curves.png", Figure(), dpi=7)
    assert calls == [(7, "png", []), "clear"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"curves.png": b"image"}
