"""Scaling: figures derived from measured steps, and files."""

import json

import pytest

from neondist.bench.scaling import bench_scaling, scaling_table, write_scaling_report


def make_report(ranks, seconds, batch=8):
    return {
        "seconds_per_step": seconds,
        "batch_size": batch,
        "grid": {"replicas": 1, "rows": ranks, "cols": 1},
        "layers": [{"wait": 0.1, "bytes_sent": 5 * ranks}, {"wait": 0.2, "bytes_sent": 0}],
        "peak_bytes": [3, 4],
    }


def test_rounds_measure_every_number_of_ranks():
    calls = []
    slowdown = iter([1, 1, 2, 2, 3, 3])  # the machine slows down from round to round

    def measure(ranks):
        calls.append(ranks)
        return make_report(ranks, next(slowdown) * {1: 4.0, 2: 2.5}[ranks])

    first, second = bench_scaling(measure, [1, 2], 3)
    assert calls == [1, 2] * 3
    assert (first["speedup"], first["efficiency"]) == (1, 1)
    assert (second["speedup"], second["efficiency"]) == (1.6, 0.8)
    assert second["seconds_per_step"] == 5
    assert second["wait_seconds"] == pytest.approx(0.3)
    assert (second["bytes_sent"], second["peak_bytes"]) == (10, 4)
    assert second["noise"] == 1


def test_warning_of_unstable_times(tmp_path):
    seconds = iter([4.0, 2.5, 4.1, 2.6, 4.2, 4.9, 4.2, 5.0])
    rows = bench_scaling(lambda ranks: make_report(ranks, next(seconds)), [1, 2], 4)
    _, page, *_ = write_scaling_report(tmp_path, rows, "title")
    assert page.read_text().endswith(
        "timings of the same work differed by 50%; repeat the benchmark without other programs running\n"
    )


def test_weak_scaling():
    rows = bench_scaling(lambda ranks: make_report(ranks, 2.0, batch=8 * ranks), [2, 4], 1)
    assert [row["efficiency"] for row in rows] == [1, 1]
    assert rows[1]["samples_per_second"] == 16


def test_files(tmp_path):
    rows = bench_scaling(lambda ranks: make_report(ranks, 1 / ranks), [1, 2], 1)
    files = write_scaling_report(tmp_path / "a" / "b", rows, "title")
    assert [json.loads(line) for line in files[0].read_text().splitlines()] == rows
    assert files[1].read_text() == f"title\n\n{scaling_table(rows)}\n"
    assert "| 2 | 1 × 2 × 1 | 8 | 500 ms | 2.00 | 100% | 300 ms | 10 B | 4 B |" in scaling_table(rows)
    assert len(files) == 2 or files[2].read_bytes().startswith(b"\x89PNG")
