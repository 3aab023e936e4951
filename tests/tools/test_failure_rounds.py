"""Summary of rounds with disturbed jobs."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_times_by_kind_of_event(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import failure_rounds

    rounds = [
        {"events": ["rank", "stop+daemon"], "first_steps": [1.0, 4.0], "load": 1.5},
        {"events": ["rank", "rank, growth"], "first_steps": [2.0, 9.0], "load": 0.5},
        {"events": ["mpirun"], "first_steps": [], "load": 1.0},  # the job ended before
    ]
    first, *lines, load = failure_rounds.summarise(rounds).splitlines()
    assert "after its lease of 2 s expired" in first
    assert [line.split() for line in lines] == [
        f"{event} {count} times median {median} maximum {maximum}".split()
        for event, count, median, maximum in [
            ("growth", 1, "9.00", "9.00"),
            ("rank", 2, "1.50", "2.00"),
            ("two", 1, "4.00", "4.00"),
            ("all", 4, "3.00", "9.00"),
        ]
    ]
    assert load.endswith("cores: 0.5 to 1.5")
