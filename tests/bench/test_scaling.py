"""Scaling: what follows from the measured steps, and the files."""

import json

import pytest

from neondist.bench.scaling import bench_scaling, scaling_table, write


def made(ranks, seconds, batch=8):
    return {
        "seconds_per_step": seconds,
        "batch_size": batch,
        "grid": {"replicas": 1, "rows": ranks, "cols": 1},
        "layers": [{"wait": 0.1, "bytes_sent": 5 * ranks}, {"wait": 0.2, "bytes_sent": 0}],
        "peak_bytes": [3, 4],
    }


def test_every_count_has_its_turn_in_every_round():
    asked = []
    slow = iter([1, 1, 2, 2, 3, 3])  # the machine slows down from round to round

    def measure(ranks):
        asked.append(ranks)
        return made(ranks, next(slow) * {1: 4.0, 2: 2.5}[ranks])

    one, two = bench_scaling(measure, [1, 2], 3)
    assert asked == [1, 2] * 3
    assert (one["speedup"], one["efficiency"]) == (1, 1)
    assert (two["speedup"], two["efficiency"]) == (1.6, 0.8)
    assert two["seconds_per_step"] == 5
    assert two["wait_seconds"] == pytest.approx(0.3)
    assert (two["bytes_sent"], two["peak_bytes"]) == (10, 4)


def test_weak():
    rows = bench_scaling(lambda ranks: made(ranks, 2.0, batch=8 * ranks), [2, 4], 1)
    assert [row["efficiency"] for row in rows] == [1, 1]
    assert rows[1]["samples_per_second"] == 16


def test_files(tmp_path):
    rows = bench_scaling(lambda ranks: made(ranks, 1 / ranks), [1, 2], 1)
    files = write(tmp_path / "a" / "b", rows, "title")
    assert [json.loads(line) for line in files[0].read_text().splitlines()] == rows
    assert files[1].read_text() == f"title\n\n{scaling_table(rows)}\n"
    assert "| 2 | 1 × 2 × 1 | 8 | 500 ms | 2.00 | 100% | 300 ms | 10 B | 4 B |" in scaling_table(rows)
    assert len(files) == 2 or files[2].read_bytes().startswith(b"\x89PNG")
