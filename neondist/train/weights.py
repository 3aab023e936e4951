"""From a checkpoint to a model that works without being trained."""

from __future__ import annotations

from contextlib import suppress

from ..io.checkpoint import Piece, take
from ..io.checkpoint.read import Opened
from ..io.checkpoint.texts import plain_json
from ..models import TrainableModel
from ..optim import AVERAGE


def take_weights(file: Opened, model: TrainableModel) -> None:
    """Fill a model with a checkpoint's weights, or with their running mean, if it has one; collective."""
    arrays = model.kept_arrays()["model"]
    take(file, arrays, strict=True)
    trained = None
    with suppress(ValueError):
        trained = plain_json(file.facts.texts.get("position", "{}"), dict).get("step")
    there = file.facts.group("optimizer") if trained else {}
    means = [(shard.slot(AVERAGE), array) for shard, array in arrays]
    file.fill([Piece.of(*each, "optimizer") for each in means if each[0].full_name in there])
