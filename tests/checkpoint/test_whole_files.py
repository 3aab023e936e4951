"""The one writer: whole or not at all, never through a link, and a refusal in one message."""

import os
import stat

import numpy as np
import pytest
from checkpoint_toys import load, save

import neondist as nd
from neondist.errors import OutputError
from neondist.io.files import Draft, append, make_folder, partial, replacing, write_text


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious"


def test_a_link_in_the_place_of_a_draft_leads_nowhere(tmp_path, victim):
    target = tmp_path / "x.json"
    partial(target).symlink_to(victim)
    write_text(target, "mine")
    assert target.read_text() == "mine"
    assert not os.path.lexists(partial(target))


def test_a_checkpoint_is_not_written_through_a_link(tmp_path, victim):
    for name in ("c.h5.partial", "c-00000001.h5.partial"):
        (tmp_path / name).symlink_to(victim)
    save(tmp_path / "c.h5", 2, steps=1)
    assert load(tmp_path / "c.h5")[0].step == 1
    assert not (tmp_path / "c.h5").is_symlink()


def test_predictions_are_not_written_through_a_link(tmp_path, victim):
    for name in ("y.npy", "y.h5"):
        partial(tmp_path / name).symlink_to(victim)
        with nd.create_sink(tmp_path / name, (2, 3), "float32", "NC") as sink:
            sink.write([(0, 2), (0, 3)], np.ones((2, 3)))
            sink.commit()
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.ones((2, 3), np.float32))


def test_lines_are_not_added_through_a_link(tmp_path, victim):
    (tmp_path / "log").symlink_to(victim)
    with pytest.raises(OutputError, match="log: cannot be written"):
        append(tmp_path / "log", "line\n")


def test_a_block_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_text(path, "old")

    def block():
        with replacing(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert path.read_text() == "old"


def test_two_writers_of_one_file(tmp_path):
    """The second removes the first's draft; the first must not give the second's its name, nor remove it."""
    first = Draft(tmp_path / "x")
    second = Draft(tmp_path / "x")
    second.file.write(b"second")
    with pytest.raises(OSError, match="another process"):
        first.finish()
    first.discard()
    second.finish()
    second.discard()
    assert (tmp_path / "x").read_bytes() == b"second"
    assert len(list(tmp_path.iterdir())) == 1


def test_messages_name_path_reason_and_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for action in (lambda: write_text(tmp_path / "file" / "x", "a"), lambda: make_folder(tmp_path / "file" / "x")):
        with pytest.raises(OutputError, match=r"file/x: .*\((Not a directory|File exists)\); free disk space or check"):
            action()


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="not a regular file"):
        write_text(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
