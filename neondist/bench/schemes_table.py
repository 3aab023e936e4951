"""What `bench schemes` tells of its runs: means over seeds, the front, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from statistics import mean, stdev
from typing import Any

from ..schemes import as_scheme

Row = dict[str, Any]


def tiles_of(row: Row) -> int:
    """Return how many tiles an image was cut into."""
    return int(prod(row["grid"][1:]))


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each scheme and number of tiles: means over the seeds, deviations, and what is on the front.

    A scheme is on the front if no other, on as many tiles, has both a lower mean error and fewer bytes.
    """
    found = []
    for tiles, scheme in dict.fromkeys((tiles_of(row), row["scheme"]) for row in rows):
        mine = [row for row in rows if (tiles_of(row), row["scheme"]) == (tiles, scheme)]
        errors = [row["valid_error"] for row in mine]
        found.append(
            {
                "tiles": tiles,
                "scheme": scheme,
                "exact": mine[0]["exact"],
                "formula": as_scheme(scheme).formula,
                "runs": len(mine),
                "error": mean(errors),
                "deviation": stdev(errors) if len(errors) > 1 else 0.0,
                "loss": mean(row["valid_loss"] for row in mine),
                "bytes": mean(row["bytes_per_step"] for row in mine),
                "seconds": mean(row["seconds_per_epoch"] for row in mine),
            }
        )
    for row in found:
        row["front"] = not any(
            other["tiles"] == row["tiles"]
            and other["error"] <= row["error"] and other["bytes"] <= row["bytes"]
            and (other["error"], other["bytes"]) != (row["error"], row["bytes"])
            for other in found
        )  # fmt: skip
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [
        "| tiles | scheme | exact | valid error, % | valid loss | kB sent a step | s an epoch | runs | front |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        exact = "yes" if row["exact"] else "no"
        spread = f" ± {100 * row['deviation']:.2f}" if row["runs"] > 1 else ""
        lines.append(
            f"| {row['tiles']} | `{row['scheme']}` | {exact} | {100 * row['error']:.2f}{spread}"
            f" | {row['loss']:.4f} | {row['bytes'] / 1e3:.1f} | {row['seconds']:.1f} | {row['runs']}"
            f" | {'yes' if row['front'] else ''} |"
        )
    return "\n".join(lines) + "\n"
