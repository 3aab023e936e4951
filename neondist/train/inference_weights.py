"""Loading of a checkpoint's weights for inference."""

from __future__ import annotations

from contextlib import suppress

from ..io.checkpoint import ArrayPart, load_weights
from ..io.checkpoint.read import CheckpointReader
from ..io.checkpoint.texts import parse_json
from ..models import TrainableModel
from ..optim import AVERAGE_SLOT


def load_inference_weights(file: CheckpointReader, model: TrainableModel) -> None:
    """Load a checkpoint's weights, or their running mean if present, into a model. Collective."""
    arrays = model.checkpoint_arrays()["model"]
    load_weights(file, arrays, strict=True)
    trained_steps = None
    with suppress(ValueError):
        trained_steps = parse_json(file.contents.texts.get("position", "{}"), dict).get("step")
    slots = file.contents.group("optimizer") if trained_steps else {}
    averages = [(shard.slot_shard(AVERAGE_SLOT), array) for shard, array in arrays]
    file.fill_parts([ArrayPart.of(*pair, "optimizer") for pair in averages if pair[0].full_name in slots])
