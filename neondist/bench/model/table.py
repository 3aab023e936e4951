"""Predictions as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tables import bytes_text, markdown, seconds_text

HEADS = ["ranks", "grid", "step", "compute", "exchange", "sums", "sent by a rank", "held by a rank", "measured"]


def prediction_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `predict`."""
    return markdown(
        HEADS,
        [
            [
                str(row["ranks"]),
                "{replicas} × {rows} × {cols}".format(**row["grid"]),
                *(seconds_text(row[f"{name}"]) for name in ("seconds_per_step", "compute_seconds")),
                *(seconds_text(row[f"{name}_seconds"]) for name in ("exchange", "sum")),
                bytes_text(row["bytes_sent"]),
                bytes_text(row["bytes_held"]),
                seconds_text(row["measured_seconds"]) if row.get("measured_seconds") else "-",
            ]
            for row in rows
        ],
    )
