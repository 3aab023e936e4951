import gzip
import hashlib
import http.client
import http.server
import re
import shutil
import socket
import threading
import time

import pytest
from dataset_toys import small_mnist

from neondist.cli.data import bars
from neondist.data import MNIST
from neondist.data.datasets import download, mnist
from neondist.errors import DataError

NAME = "train-images-idx3-ubyte.gz"


class Mirror(http.server.ThreadingHTTPServer):
    """Serves a folder; can be told to ignore Range, cut answers short, stall, or answer with another range."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.asked = folder, []
        self.ranges, self.cut_after, self.stall, self.shift, self.no_length = True, None, False, 0, False
        self.url = f"http://127.0.0.1:{self.server_address[1]}/mnist/"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        mirror = self.server
        name, wanted = self.path.rsplit("/", 1)[1], self.headers.get("Range")
        mirror.asked.append((name, wanted))
        if not (mirror.folder / name).exists():
            return self.send_error(404)
        raw = (mirror.folder / name).read_bytes()
        start = int(re.match(r"bytes=(\d+)-", wanted)[1]) if wanted and mirror.ranges else 0
        if start >= len(raw):
            return self.send_error(416)
        start -= mirror.shift if start else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(raw) - 1}/{len(raw)}")
        if not mirror.no_length:
            self.send_header("Content-Length", str(len(raw) - start))
        self.end_headers()
        body = raw[start:] if mirror.cut_after is None else raw[start : start + mirror.cut_after]
        self.wfile.write(body)
        self.wfile.flush()
        if mirror.stall:
            time.sleep(3)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A local mirror of four small files, whose checksums stand in for the official ones."""
    small_mnist(tmp_path / "mirror")
    files = []
    for file in mnist.ALL:
        raw = gzip.decompress((tmp_path / "mirror" / f"{file.name}.gz").read_bytes())
        files.append(mnist.MnistFile(file.name, file.magic, file.count, hashlib.md5(raw).hexdigest()))
    monkeypatch.setattr(download, "ALL", tuple(files))
    monkeypatch.setattr(download, "_PIECE", 1000)
    monkeypatch.setenv("no_proxy", "*")
    server = Mirror(tmp_path / "mirror")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "some" / "where"


def complete(target, mirror):
    """The folder holds the four good files and nothing else."""
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in mirror.folder.iterdir())
    assert all(p.read_bytes() == (mirror.folder / p.name).read_bytes() for p in target.iterdir())
    MNIST(target).check()
    return True


def test_all_four_files(mirror, target):
    seen = []
    paths = download.download_mnist(target, mirror.url, lambda *report: seen.append(report))
    assert complete(target, mirror)
    assert paths == [target / f"{file.name}.gz" for file in mnist.ALL]
    size = (target / NAME).stat().st_size
    mine = [(there, total) for name, there, total in seen if name == NAME]
    assert mine[-1] == (size, size)
    assert mine == sorted(mine)
    assert len(mine) > 10


def test_good_files_are_kept_and_bad_ones_replaced(mirror, target):
    download.download_mnist(target, mirror.url)
    good = (target / NAME).stat().st_ino
    (target / "t10k-labels-idx1-ubyte.gz").write_bytes(b"rubbish")
    mirror.asked.clear()
    seen = []
    download.download_mnist(target, mirror.url.rstrip("/"), lambda name, *_: seen.append(name))
    assert mirror.asked == [("t10k-labels-idx1-ubyte.gz", None)]
    assert complete(target, mirror)
    assert (target / NAME).stat().st_ino == good
    assert set(seen) == {f"{file.name}.gz" for file in mnist.ALL}


def _interrupted(mirror, target, bytes_sent=7000):
    mirror.cut_after = bytes_sent
    with pytest.raises(DataError, match=rf"{bytes_sent} of \d+ bytes arrived; repeat the command to resume"):
        download.download_mnist(target, mirror.url)
    mirror.cut_after = None
    mirror.asked.clear()
    assert [(p.name, p.stat().st_size) for p in target.iterdir()] == [(f"{NAME}.part", bytes_sent)]
    return bytes_sent


def test_an_interrupted_transfer_goes_on_where_it_stopped(mirror, target):
    _interrupted(mirror, target)
    seen = []
    download.download_mnist(target, mirror.url, lambda *report: seen.append(report))
    assert mirror.asked[0] == (NAME, "bytes=7000-")
    assert seen[0] == (NAME, 8000, (target / NAME).stat().st_size)
    assert complete(target, mirror)
    assert len(mirror.asked) == 4


def test_interrupted_twice(mirror, target):
    _interrupted(mirror, target)
    mirror.cut_after = 5000
    with pytest.raises(DataError, match="12000 of"):
        download.download_mnist(target, mirror.url)
    mirror.cut_after = None
    download.download_mnist(target, mirror.url)
    assert mirror.asked[1] == (NAME, "bytes=12000-")
    assert complete(target, mirror)


def test_a_server_that_ignores_range(mirror, target):
    _interrupted(mirror, target)
    mirror.ranges = False
    download.download_mnist(target, mirror.url)
    assert len(mirror.asked) == 4
    assert complete(target, mirror)


def test_a_server_that_sends_another_range(mirror, target):
    _interrupted(mirror, target)
    mirror.shift = 10
    download.download_mnist(target, mirror.url)
    assert mirror.asked[:2] == [(NAME, "bytes=7000-"), (NAME, None)]
    assert complete(target, mirror)


@pytest.mark.parametrize("kind", ["other bytes", "too long", "all there"])
def test_an_old_piece(mirror, target, kind):
    raw = (mirror.folder / NAME).read_bytes()
    target.mkdir(parents=True)
    piece = {"other bytes": b"x" * 7000, "too long": raw + b"x", "all there": raw}[kind]
    (target / f"{NAME}.part").write_bytes(piece)
    download.download_mnist(target, mirror.url)
    assert [start for name, start in mirror.asked if name == NAME] == {
        "other bytes": ["bytes=7000-", None],
        "too long": [f"bytes={len(raw) + 1}-", None],
        "all there": [f"bytes={len(raw)}-"],
    }[kind]
    assert complete(target, mirror)


def test_no_content_length(mirror, target):
    mirror.no_length = True
    seen = []
    download.download_mnist(target, mirror.url, lambda *report: seen.append(report))
    assert {total for _, _, total in seen} == {None}
    assert complete(target, mirror)


@pytest.mark.parametrize("content", [b"<html>sign in</html>", gzip.compress(b"another", mtime=0), b"\x1f\x8b broken"])
def test_a_corrupt_file_is_not_kept(mirror, target, content):
    (mirror.folder / NAME).write_bytes(content)
    with pytest.raises(DataError, match=f"{NAME}: the download is damaged .*; try again, or choose another mirror"):
        download.download_mnist(target, mirror.url)
    assert not list(target.iterdir())


def test_a_missing_file_on_the_mirror(mirror, target):
    (mirror.folder / NAME).unlink()
    with pytest.raises(DataError, match=rf"{NAME}: the server returned 404 .*; name another mirror"):
        download.download_mnist(target, mirror.url)


def test_no_network(target, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(DataError, match=r"^no network: .*refused.*; copy the files by hand to .*where, or name"):
            download.download_mnist(target, url)


def test_no_name_server(target, monkeypatch):
    def unknown(*address, **kind):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DataError, match=r"^no network: https://.*name resolution.*; copy the files by hand to"):
        download.download_mnist(target)


def test_a_stalled_server_does_not_hang(mirror, target):
    mirror.stall, mirror.cut_after = True, 4000
    with pytest.raises(DataError, match=r"the transfer stopped: .*timed out; repeat the command"):
        download.download_mnist(target, mirror.url, timeout=1.0)
    assert (target / f"{NAME}.part").stat().st_size >= 3000
    mirror.stall, mirror.cut_after = False, None
    download.download_mnist(target, mirror.url)
    assert complete(target, mirror)


def test_places_that_cannot_work(mirror, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.* cannot be written .*; choose another folder"):
        download.download_mnist(tmp_path / "file" / "below", mirror.url)
    with pytest.raises(DataError, match="mirror: 'nonsense' is not a URL"):
        download.download_mnist(tmp_path / "new", "nonsense")


def test_a_full_disk_is_not_called_a_network_fault(mirror, target, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(DataError, match=r"where cannot be written \(No space left on device\)"):
        download.download_mnist(target, mirror.url)


def test_a_network_fault_is_not_called_a_full_disk(mirror, target, monkeypatch):
    def broken(answer, count):
        raise OSError("bad record mac")

    monkeypatch.setattr(http.client.HTTPResponse, "read", broken)
    with pytest.raises(DataError, match=r"no network: .*bad record mac; copy the files by hand"):
        download.download_mnist(target, mirror.url)


def test_the_console_shows_progress(mirror, target, capsys):
    with bars() as progress:
        download.download_mnist(target, mirror.url, progress)
    assert NAME in capsys.readouterr().out


def test_the_official_checksums(official_mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    for file in mnist.ALL:
        shutil.copy(official_mnist / f"{file.name}.gz", tmp_path)
    # all are good already, so that no mirror is asked
    download.download_mnist(tmp_path, "http://127.0.0.1:1/")
