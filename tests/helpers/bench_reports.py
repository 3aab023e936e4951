"""Benchmark reports made of rows that a test has measured."""


def make_report(rows, variants, rounds, means):
    """Return the report of rows on two ranks, as a benchmark writes it."""
    environment = {
        "started": "2026-01-01T00:00",
        "processor": "P",
        "cores": 2,
        "python": "3",
        "versions": {"numpy": "2"},
    }
    sizes = {"ranks": 2, "threads": 1, "cores": 2, "rounds": rounds}
    return {**sizes, "variants": variants, "environment": environment, "networks": rows, "notes": [], "means": means}
