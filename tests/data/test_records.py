"""Record readers for CSV, RecordIO, database tables, HDF5 and datasets, and the feed function."""

import gzip
import sqlite3
import struct
import sys
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_definition import draw_records, write_csv

import neondist as nd
from neondist.data.records import (
    BadRecordError,
    FeedFunction,
    Mode,
    RecordIOWriter,
    RecordSamples,
    open_records,
    record_dataset,
)


def read_values(reader):
    return np.stack(reader.read(range(len(reader))))


@pytest.mark.parametrize("header", ["", ",".join(f"p{n}" for n in range(17))])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\n\n"])
def test_csv(tmp_path, header, line_end):
    expected = draw_records(5)
    path = write_csv(tmp_path / "a.csv", expected, header)
    text = (tmp_path / "a.csv").read_text()
    (tmp_path / "a.csv").write_bytes(text.replace("\n", line_end).rstrip("\r\n").encode())
    reader = open_records(path)
    np.testing.assert_array_equal(read_values(reader), expected)
    assert reader.column_names == (header.split(",") if header else [])
    np.testing.assert_array_equal(reader.read([3, 1])[0], expected[3])


def test_csv_with_text(tmp_path):
    (tmp_path / "a.csv").write_text('name,n\n"a, b",1\nc,2\n')
    assert [row.tolist() for row in open_records(str(tmp_path / "a.csv")).read([0, 1])] == [["a, b", "1"], ["c", "2"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [("1,2", r"a\.csv:4: has 2 columns, expected 3"), ("1,x,3", r"a\.csv:4: column b: 'x' is not a number")],
)
def test_bad_csv_row(tmp_path, row, message):
    (tmp_path / "a.csv").write_text(f"a,b,c\n1,2,3\n\n{row}\n4,5,6\n")
    reader = open_records(str(tmp_path / "a.csv"))
    with pytest.raises(BadRecordError, match=message) as error:
        reader.read([1])
    assert error.value.record_number == 1
    assert [number for number, _ in reader.find_bad_records()] == [1]
    np.testing.assert_array_equal(reader.read([2])[0], [4, 5, 6])


@given(
    st.lists(st.lists(st.integers(-1000, 1000), max_size=6), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([None, "gzip"]),
)
def test_recordio_round_trip(tmp_path_factory, records, per_chunk, compressor):
    path = tmp_path_factory.mktemp("recordio") / "a.recordio"
    with RecordIOWriter(path, per_chunk, compressor) as file:
        for record in records:
            file.write(np.array(record, np.int64))
    reader = open_records(str(path))
    assert [record.tolist() for record in reader.read(range(len(reader)))] == records


def test_recordio_file_of_the_original_package(tmp_path):
    packed = gzip.compress(struct.pack("<I", 5) + b"Hello" + struct.pack("<I", 0))
    header = struct.pack("<5I", 0x01020304, zlib.crc32(packed), 2, len(packed), 2)
    (tmp_path / "a").write_bytes(header + packed)
    reader = open_records(str(tmp_path / "a"))
    assert [record.tobytes() for record in reader.read([0, 1])] == [b"Hello", b""]


def test_bad_checksum_names_the_record(tmp_path):
    path = tmp_path / "a.recordio"
    with RecordIOWriter(path) as file:
        for n in range(5):
            file.write(np.arange(10) + n)
    size = path.stat().st_size // 5
    content = bytearray(path.read_bytes())
    content[3 * size - 1] ^= 1
    path.write_bytes(content)
    reader = open_records(str(path))
    with pytest.raises(BadRecordError, match=r"a\.recordio: record 2: its chunk at byte \d+ has a bad checksum"):
        reader.read([0, 2])
    assert [number for number, _ in reader.find_bad_records()] == [2]
    path.write_bytes(content[: 4 * size + 9])
    with pytest.raises(nd.DataError, match="record 4"):
        open_records(str(path))


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
@pytest.mark.parametrize("header", [[], ["a", "b", "label"]])
def test_csv_with_other_separators(tmp_path, separator, name, header):
    rows = [*([header] if header else []), ["1", "-2.5", "0"], ["3", "4e3", "1"]]
    (tmp_path / "a.csv").write_text("".join(separator.join(row) + "\n" for row in rows))
    with pytest.raises(nd.DataError, match=rf"a\.csv: separates columns with {name}; use commas, as in 1\.5,2,3"):
        open_records(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text(f"to be{separator} or not\nto be{separator} that\n")  # text of one column
    assert open_records(str(tmp_path / "a.csv")).read([1])[0].tolist() == [f"to be{separator} that"]


def test_folder_concatenates_its_files(tmp_path):
    records = draw_records(5)
    write_csv(tmp_path / "a.csv", records[:2])
    write_csv(tmp_path / "b.csv", records[2:])
    (tmp_path / "_SUCCESS").touch()  # written by Hadoop and Spark
    np.testing.assert_array_equal(read_values(open_records(str(tmp_path))), records)


def test_empty_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "a.csv", draw_records(5))
    with pytest.raises(nd.DataError, match="the name of the records is empty; specify a CSV"):
        open_records("")


@pytest.mark.parametrize("text", ["Digits\n\nwritten by a script\n", "1,2\n", "a,1,2\nb,3,4\n"])
def test_folder_with_other_files(tmp_path, text):
    write_csv(tmp_path / "a.csv", draw_records(5))
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(nd.DataError, match=r"README\.md has rows of .*, but .*a\.csv of .*; keep only files"):
        open_records(str(tmp_path))


def test_table(tmp_path):
    pytest.importorskip("sqlalchemy")
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE digits (id INTEGER PRIMARY KEY, x REAL)")
        database.executemany("INSERT INTO digits VALUES (?, ?)", [(2, 0.5), (1, 1.5)])
    url = f"sqlite:///{tmp_path}/a.db"
    np.testing.assert_array_equal(read_values(open_records(url)), [[1, 1.5], [2, 0.5]])
    assert open_records(f"{url}#digits").column_names == ["id", "x"]
    with pytest.raises(nd.DataError, match="no table 'letters'; the database has digits"):
        open_records(f"{url}#letters")
    with pytest.raises(nd.DataError, match="no database"):
        open_records(f"sqlite:///{tmp_path}/b.db")
    assert not (tmp_path / "b.db").exists()
    with pytest.raises(nd.DataError, match=r"mysql://me:\*\*\*@localhost:1/db#t: cannot be read") as error:
        open_records("mysql://me:secret@localhost:1/db#t")  # no driver, or no server
    assert "secret" not in str(error.value)


def test_view(tmp_path):
    pytest.importorskip("sqlalchemy")
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE digits (id INTEGER PRIMARY KEY, x REAL)")
        database.executemany("INSERT INTO digits VALUES (?, ?)", [(1, 0.5), (2, 1.5), (3, 2.5)])
        database.execute("CREATE VIEW large AS SELECT x, id FROM digits WHERE x > 1 ORDER BY x DESC")
    url = f"sqlite:///{tmp_path}/a.db"
    reader = open_records(f"{url}#large")
    assert reader.column_names == ["x", "id"]
    np.testing.assert_array_equal(read_values(reader), [[2.5, 3], [1.5, 2]])
    assert len(open_records(url)) == 3  # the only table
    with pytest.raises(nd.DataError, match="no table 'small'; the database has digits, large"):
        open_records(f"{url}#small")


@pytest.mark.parametrize(
    ("cell", "problem"), [(None, "None"), (b"\1" * 99, repr(b"\1" * 99)[:40])], ids=["null", "blob"]
)
@pytest.mark.parametrize("row", [0, 1])
def test_table_rejects_cells_without_a_number(tmp_path, cell, problem, row):
    pytest.importorskip("sqlalchemy")
    cells = [1.5, 2.5]
    cells[row] = cell
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x)")
        database.executemany("INSERT INTO t VALUES (?, ?)", enumerate(cells))
    reader = open_records(f"sqlite:///{tmp_path}/a.db")
    with pytest.raises(BadRecordError) as error:
        reader.read([row])
    assert f"row {row}: column x: {problem} is not a number; correct the row" in str(error.value)
    assert reader.read([1 - row])[0].tolist() == [1 - row, cells[1 - row]]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
@pytest.mark.parametrize("kind", ["NUMERIC", "DECIMAL(8, 2)", "REAL"])
def test_table_keeps_all_digits(tmp_path_factory, kind, numbers):
    pytest.importorskip("sqlalchemy")
    path = tmp_path_factory.mktemp("table") / "a.db"
    with sqlite3.connect(path) as database:
        database.execute(f"CREATE TABLE t (id INTEGER PRIMARY KEY, x {kind})")
        database.executemany("INSERT INTO t VALUES (?, ?)", enumerate(numbers))
    values = read_values(open_records(f"sqlite:///{path}"))
    assert [record.tolist() for record in values] == [list(row) for row in enumerate(numbers)]


def test_table_without_a_driver_names_it(monkeypatch):
    pytest.importorskip("sqlalchemy")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(nd.DataError, match="without the database driver psycopg; install it"):
        open_records("postgresql+psycopg://localhost/db#t")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("a,b\n1,2\n3,\n", [[1, 2], None]), ("1,\n2,3\n", [None, [2, 3]]), (",0,1\n0,5,6\n", [[0, 5, 6]])],
)
def test_csv_rejects_rows_with_an_empty_cell(tmp_path, text, numbers):
    (tmp_path / "a.csv").write_text(text)
    reader = open_records(str(tmp_path / "a.csv"))
    assert [number for number, _ in reader.find_bad_records()] == [i for i, row in enumerate(numbers) if row is None]
    assert [reader.read([i])[0].tolist() for i, row in enumerate(numbers) if row] == [row for row in numbers if row]


def test_hdf5_array(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(read_values(open_records(f"{tmp_path}/a.h5:x")), [[0, 1], [2, 3], [4, 5]])
    with pytest.raises(nd.DataError, match=r"no numeric array 'y'.*choose from x"):
        open_records(f"{tmp_path}/a.h5:y")


def test_hdf5_dataset(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for split, n in (("train", 3), ("test", 2)):
            file[f"{split}/images"] = np.full((n, 2, 2, 1), n, np.uint8)
            file[f"{split}/labels"] = np.arange(n)
    np.testing.assert_array_equal(read_values(open_records(f"{tmp_path}/a.h5"))[2], [3, 3, 3, 3, 2])
    assert len(open_records(f"{tmp_path}/a.h5", "prediction")) == 2


def test_missing_source(tmp_path):
    with pytest.raises(nd.DataError, match=r"none\.csv: cannot be read"):
        open_records(str(tmp_path / "none.csv"))


def reshape_digits(records, mode):
    x = np.stack(records)
    return x[:, :16].reshape(-1, 1, 4, 4), x[:, 16].astype(int)


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (
            lambda r, m: (reshape_digits(r, m)[0][1:], reshape_digits(r, m)[1]),
            r"model\.py:7: .*: features: got 1 for 2 records",
        ),
        (lambda r, m: (reshape_digits(r, m)[0], reshape_digits(r, m)[1][1:]), "labels: got 1 for 2 records"),
        (lambda r, m: reshape_digits(r, m)[0], "return .features, labels."),
        (lambda r, m: 1 / 0, "ZeroDivisionError"),
        (lambda r, m: (["a", "b"], [0, 1]), "return numbers"),
        (lambda r, m: (np.full((2, 1), 2**63, np.uint64), [0, 1]), "9223372036854775808, which int64 cannot represent"),
    ],
)
def test_feed_is_validated(tmp_path, feed, message):
    reader = open_records(write_csv(tmp_path / "a.csv", draw_records(2)))
    with pytest.raises(nd.ConfigError, match=message):
        record_dataset(RecordSamples(reader, FeedFunction(feed, "model.py:7"), Mode.TRAINING)).check()


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint8])
def test_integer_features_are_exact(tmp_path, dtype):
    reader = open_records(write_csv(tmp_path / "a.csv", draw_records(4)))
    ids = np.array([[0], [2 ** (8 * np.dtype(dtype).itemsize - 1) - 1]], dtype)
    data = record_dataset(RecordSamples(reader, FeedFunction(lambda r, m: (ids[-len(r) :], r), ""), Mode.TRAINING))
    data.open(nd.ProcessGrid.serial())
    images = data.train.subset(1, 3).images([0, 1])
    assert images.tolist() == ids.tolist()
    assert images.dtype == ("float32" if dtype == np.uint8 else "int64")


def test_features_of_one_dtype_are_required(tmp_path):
    reader = open_records(write_csv(tmp_path / "a.csv", draw_records(5)))

    def feed(records, mode):
        return np.zeros((len(records), 1), int if len(records) == 2 else float), records

    data = record_dataset(RecordSamples(reader, FeedFunction(feed, "model.py:7"), Mode.TRAINING))
    data.open(nd.ProcessGrid.serial())
    with pytest.raises(nd.ConfigError, match=r"model\.py:7: feed: features are integers in some batches only"):
        data.train.images([0, 1, 2])
    floats = RecordSamples(reader, FeedFunction(reshape_digits, ""), Mode.EVALUATION)
    integers = RecordSamples(reader, FeedFunction(lambda r, m: (np.ones((len(r), 1, 4, 4), int), r), ""), Mode.TRAINING)
    with pytest.raises(nd.DataError, match="shape or dtype; return the same for both"):
        record_dataset(integers, floats).check()


def test_each_rank_reads_its_tile(tmp_path):
    records = draw_records(6)
    reader = open_records(write_csv(tmp_path / "a.csv", records))

    def body(world):
        data = record_dataset(RecordSamples(reader, FeedFunction(reshape_digits, ""), Mode.TRAINING, bad_numbers=[1]))
        grid = nd.ProcessGrid(world, rows=2, cols=1)
        data.open(grid)
        return data.train.images([0, 1]), data.train.targets([0, 1]), len(data.train)

    for rank, (images, labels, count) in enumerate(nd.loopback.run(2, body)):
        np.testing.assert_allclose(
            images[..., 0], records[[0, 2], :16].reshape(2, 4, 4)[:, 2 * rank : 2 * rank + 2], 1e-6
        )
        np.testing.assert_array_equal(labels, records[[0, 2], 16])
        assert count == 5
