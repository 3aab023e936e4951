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
from small_datasets import write_mnist

from neondist.cli.data import progress_bars
from neondist.data import MNIST
from neondist.data.datasets import download, mnist
from neondist.errors import DataError

NAME = "train-images-idx3-ubyte.gz"


class Mirror(http.server.ThreadingHTTPServer):
    """Serve a folder; optionally ignore Range, truncate responses, stall, or send another range."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.requests = folder, []
        self.accepts_ranges, self.cut_after, self.stalls, self.shift, self.no_length = True, None, False, 0, False
        self.url = f"http://127.0.0.1:{self.server_address[1]}/mnist/"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        mirror = self.server
        name, byte_range = self.path.rsplit("/", 1)[1], self.headers.get("Range")
        mirror.requests.append((name, byte_range))
        if not (mirror.folder / name).exists():
            return self.send_error(404)
        raw = (mirror.folder / name).read_bytes()
        start = int(re.match(r"bytes=(\d+)-", byte_range)[1]) if byte_range and mirror.accepts_ranges else 0
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
        if mirror.stalls:
            time.sleep(3)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """Local mirror of four small files, whose checksums replace the official ones."""
    write_mnist(tmp_path / "mirror")
    files = []
    for file in mnist.ALL_FILES:
        raw = gzip.decompress((tmp_path / "mirror" / f"{file.name}.gz").read_bytes())
        files.append(mnist.MnistFile(file.name, file.magic, file.count, hashlib.md5(raw).hexdigest()))
    monkeypatch.setattr(download, "ALL_FILES", tuple(files))
    monkeypatch.setattr(download, "_DOWNLOAD_PIECE_BYTES", 1000)
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


def is_complete(target, mirror):
    """Check that the folder holds exactly the four files of the mirror."""
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in mirror.folder.iterdir())
    assert all(p.read_bytes() == (mirror.folder / p.name).read_bytes() for p in target.iterdir())
    MNIST(target).check()
    return True


def test_all_four_files(mirror, target):
    reports = []
    paths = download.download_mnist(target, mirror.url, lambda *report: reports.append(report))
    assert is_complete(target, mirror)
    assert paths == [target / f"{file.name}.gz" for file in mnist.ALL_FILES]
    size = (target / NAME).stat().st_size
    progress = [(received, total) for name, received, total in reports if name == NAME]
    assert progress[-1] == (size, size)
    assert progress == sorted(progress)
    assert len(progress) > 10


def test_only_bad_files_are_replaced(mirror, target):
    download.download_mnist(target, mirror.url)
    inode = (target / NAME).stat().st_ino
    (target / "t10k-labels-idx1-ubyte.gz").write_bytes(b"rubbish")
    mirror.requests.clear()
    names = []
    download.download_mnist(target, mirror.url.rstrip("/"), lambda name, *_: names.append(name))
    assert mirror.requests == [("t10k-labels-idx1-ubyte.gz", None)]
    assert is_complete(target, mirror)
    assert (target / NAME).stat().st_ino == inode
    assert set(names) == {f"{file.name}.gz" for file in mnist.ALL_FILES}


def interrupt_download(mirror, target, bytes_sent=7000):
    mirror.cut_after = bytes_sent
    with pytest.raises(DataError, match=rf"{bytes_sent} of \d+ bytes arrived; repeat the command to resume"):
        download.download_mnist(target, mirror.url)
    mirror.cut_after = None
    mirror.requests.clear()
    assert [(p.name, p.stat().st_size) for p in target.iterdir()] == [(f"{NAME}.part", bytes_sent)]
    return bytes_sent


def test_interrupted_transfer_resumes(mirror, target):
    interrupt_download(mirror, target)
    reports = []
    download.download_mnist(target, mirror.url, lambda *report: reports.append(report))
    assert mirror.requests[0] == (NAME, "bytes=7000-")
    assert reports[0] == (NAME, 8000, (target / NAME).stat().st_size)
    assert is_complete(target, mirror)
    assert len(mirror.requests) == 4


def test_interrupted_twice(mirror, target):
    interrupt_download(mirror, target)
    mirror.cut_after = 5000
    with pytest.raises(DataError, match="12000 of"):
        download.download_mnist(target, mirror.url)
    mirror.cut_after = None
    download.download_mnist(target, mirror.url)
    assert mirror.requests[1] == (NAME, "bytes=12000-")
    assert is_complete(target, mirror)


def test_server_ignores_range(mirror, target):
    interrupt_download(mirror, target)
    mirror.accepts_ranges = False
    download.download_mnist(target, mirror.url)
    assert len(mirror.requests) == 4
    assert is_complete(target, mirror)


def test_server_sends_another_range(mirror, target):
    interrupt_download(mirror, target)
    mirror.shift = 10
    download.download_mnist(target, mirror.url)
    assert mirror.requests[:2] == [(NAME, "bytes=7000-"), (NAME, None)]
    assert is_complete(target, mirror)


@pytest.mark.parametrize("kind", ["other bytes", "too long", "complete"])
def test_existing_partial_file(mirror, target, kind):
    raw = (mirror.folder / NAME).read_bytes()
    target.mkdir(parents=True)
    content = {"other bytes": b"x" * 7000, "too long": raw + b"x", "complete": raw}[kind]
    (target / f"{NAME}.part").write_bytes(content)
    download.download_mnist(target, mirror.url)
    assert [start for name, start in mirror.requests if name == NAME] == {
        "other bytes": ["bytes=7000-", None],
        "too long": [f"bytes={len(raw) + 1}-", None],
        "complete": [f"bytes={len(raw)}-"],
    }[kind]
    assert is_complete(target, mirror)


def test_no_content_length(mirror, target):
    mirror.no_length = True
    reports = []
    download.download_mnist(target, mirror.url, lambda *report: reports.append(report))
    assert {total for _, _, total in reports} == {None}
    assert is_complete(target, mirror)


@pytest.mark.parametrize("content", [b"<html>sign in</html>", gzip.compress(b"another", mtime=0), b"\x1f\x8b broken"])
def test_corrupt_download_is_deleted(mirror, target, content):
    (mirror.folder / NAME).write_bytes(content)
    with pytest.raises(DataError, match=f"{NAME}: the download is damaged .*; try again, or choose another mirror"):
        download.download_mnist(target, mirror.url)
    assert not list(target.iterdir())


def test_file_missing_on_the_mirror(mirror, target):
    (mirror.folder / NAME).unlink()
    with pytest.raises(DataError, match=rf"{NAME}: the server returned 404 .*; specify another mirror"):
        download.download_mnist(target, mirror.url)


def test_no_network(target, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(DataError, match=r"^no network: .*refused.*; copy the files by hand to .*where, or specify"):
            download.download_mnist(target, url)


def test_no_name_server(target, monkeypatch):
    def getaddrinfo(*address, **kind):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(DataError, match=r"^no network: https://.*name resolution.*; copy the files by hand to"):
        download.download_mnist(target)


def test_stalled_server_times_out(mirror, target):
    mirror.stalls, mirror.cut_after = True, 4000
    with pytest.raises(DataError, match=r"the transfer stopped: .*timed out; repeat the command"):
        download.download_mnist(target, mirror.url, timeout=1.0)
    assert (target / f"{NAME}.part").stat().st_size >= 3000
    mirror.stalls, mirror.cut_after = False, None
    download.download_mnist(target, mirror.url)
    assert is_complete(target, mirror)


def test_invalid_folders_and_mirrors(mirror, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.* cannot be written .*; choose another folder"):
        download.download_mnist(tmp_path / "file" / "below", mirror.url)
    with pytest.raises(DataError, match="mirror: 'nonsense' is not a URL"):
        download.download_mnist(tmp_path / "new", "nonsense")


def test_full_disk_is_not_a_network_error(mirror, target, monkeypatch):
    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", fsync)
    with pytest.raises(DataError, match=r"where cannot be written \(No space left on device\)"):
        download.download_mnist(target, mirror.url)


def test_network_error_is_not_a_full_disk(mirror, target, monkeypatch):
    def read(response, count):
        raise OSError("bad record mac")

    monkeypatch.setattr(http.client.HTTPResponse, "read", read)
    with pytest.raises(DataError, match=r"no network: .*bad record mac; copy the files by hand"):
        download.download_mnist(target, mirror.url)


def test_console_shows_progress(mirror, target, capsys):
    with progress_bars() as progress:
        download.download_mnist(target, mirror.url, progress)
    assert NAME in capsys.readouterr().out


def test_official_checksums(official_mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    for file in mnist.ALL_FILES:
        shutil.copy(official_mnist / f"{file.name}.gz", tmp_path)
    # no mirror is contacted, as all files are valid
    download.download_mnist(tmp_path, "http://127.0.0.1:1/")
