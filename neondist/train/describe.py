"""Description of an experiment on a number of ranks, as printed by `neondist check`."""

from __future__ import annotations

from typing import Any

from ..backends import precision_note
from ..plan.report import grid_text, join_extents
from .validate import Experiment, validate_experiment


def describe_experiment(experiment: Experiment, ranks: int = 1) -> Any:
    """Return a description, for a rich console, of every layer of an experiment on `ranks` ranks; needs no MPI.

    Raises
    ------
    UserError
        As in `FitExperiment.validate`.
    """
    from rich.console import Group
    from rich.text import Text

    plan = validate_experiment(experiment, ranks)
    data_text = f"{type(experiment.dataset).__name__} {join_extents(experiment.dataset.sample_shape)}"
    precision = experiment.model.precision
    precision_text = str(experiment.model.dtype) + f", products in {precision.name}" * (precision.name != "float32")
    model_text = f"{type(experiment.model).__name__} ({precision_text})"
    headline = f"{model_text} on {grid_text(plan.grid)}, {data_text}, batches of {experiment.batch_size}"
    fields = experiment.dataset.fields
    lines = [] if fields is None else [f"channels: {', '.join(fields.input_names)}; targets: {', '.join(fields.names)}"]
    lines += filter(None, [precision_note(experiment.model.backend, precision)])
    return Group(Text(headline, style="bold"), *map(Text, lines), Text(), plan.table())
