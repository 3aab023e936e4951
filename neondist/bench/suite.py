"""`neondist bench suite`: training steps of several networks in neondist and in variants of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from ..comm import SingleTransport
from ..errors import ConfigError, LaunchError
from ..models import require_layer_model
from ..terminal.progress_line import ProgressLine
from ..train import FitExperiment
from .step import ROUND_SECONDS, WARM_UP_STEPS, load_own_batch
from .torch_baseline import TorchBaseline

WARM_ALLOCATOR_ENV = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""settings with which the C library keeps freed memory instead of requesting new pages in every step"""
NEONDIST_VARIANTS = {"ranks": "ranks that share the cores", "one": "one process with all cores"}
TORCH_VARIANTS = {
    "eager": "eager mode, channels-last",
    "warm": "eager mode with an allocator that keeps freed memory",
    "compile": "torch.compile with the same allocator",
}
Results = dict[str, Any]


@dataclass
class VariantMeasurements:
    """Measurements of one variant for a network.

    Attributes
    ----------
    seconds : seconds per step, in each round
    peak_bytes : peak memory of the largest process, in each round
    failure_reason : reason why the variant cannot be measured, or ''
    extra : other results of the first round
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    failure_reason: str = ""
    extra: Results = field(default_factory=dict)


def bench_suite(
    networks: Sequence[str],
    variants: Sequence[str],
    measure: Callable[[str, str, bool], Results],
    rounds: int,
    progress: ProgressLine,
    progress_file: Path,
) -> Iterator[Results]:
    """Yield a row for each network, as soon as it is measured.

    Parameters
    ----------
    networks : names
    variants : keys of NEONDIST_VARIANTS and TORCH_VARIANTS, in their order within a round
    measure : function of a network, a variant, and whether this is the first round
        Measures in a new process; returns 'seconds' per step, 'peak_bytes', and 'details', if there are any.
        A variant that raises ConfigError or LaunchError is skipped for the network's other rounds; the row has the
        reason.
    rounds : int
        Every round measures all variants, so that a slowdown of the machine affects all of them.
    progress : ProgressLine
        Counts the turns, including skipped ones.
    progress_file : Path
        Path of the `ProgressFile` of the processes.
    """
    for network in networks:
        turns = {variant: VariantMeasurements() for variant in variants}
        for count in range(rounds):
            for variant, turn in turns.items():
                if turn.failure_reason:
                    continue
                progress.begin_process(f"{network}: {variant}, round {count + 1} of {rounds}", progress_file)
                try:
                    measurement = measure(network, variant, count == 0)
                except (ConfigError, LaunchError) as error:
                    turn.failure_reason = str(error)
                    progress.add_done_parts(rounds - count)
                    continue
                progress.add_done_parts(1)
                turn.seconds.append(measurement.pop("seconds"))
                turn.peak_bytes.append(measurement.pop("peak_bytes"))
                turn.extra = turn.extra or measurement
        yield summarise_network(network, turns)


def summarise_network(network: str, turns: Mapping[str, VariantMeasurements]) -> Results:
    """Return medians, and ratios of turns of the same round.

    'memory' is the peak memory of the single process, or of a rank if there is none, relative to PyTorch's eager mode.
    """
    timed = {variant: turn for variant, turn in turns.items() if turn.seconds and not turn.failure_reason}
    variants: Results = {
        variant: {"seconds": median(turn.seconds), "all_seconds": turn.seconds, "peak_bytes": max(turn.peak_bytes)}
        | turn.extra.pop("details", {})
        for variant, turn in timed.items()
    }
    torch_seconds = {variant: variants[variant]["seconds"] for variant in TORCH_VARIANTS if variant in variants}
    best = min(torch_seconds, key=torch_seconds.__getitem__, default=None)
    ratios = {}
    for variant in NEONDIST_VARIANTS:
        if variant in timed and best is not None:
            quotients = [a / b for a, b in zip(timed[variant].seconds, timed[best].seconds, strict=True)]
            ratios[variant] = {"ratio": median(quotients), "all": quotients}
    memory, own_variant = None, variants.get("one", variants.get("ranks"))
    if own_variant and "eager" in variants:
        memory = own_variant["peak_bytes"] / variants["eager"]["peak_bytes"]
    details = next((timed[name].extra for name in NEONDIST_VARIANTS if name in timed and timed[name].extra), {})
    why = {variant: turn.failure_reason for variant, turn in turns.items() if turn.failure_reason}
    row = {"network": network, "variants": variants, "best": best, "ratios": ratios, "memory": memory, "why": why}
    return row | details


def geometric_means(rows: Sequence[Results], groups: Mapping[str, Sequence[str]]) -> dict[str, Results]:
    """Return the geometric means of the ratios over each group whose networks have all been measured."""
    means_by_group = {}
    for group, names in groups.items():
        group_rows = [row for row in rows if row["network"] in names]
        ratios = {
            name: [row["ratios"][name]["ratio"] for row in group_rows if name in row["ratios"]]
            for name in NEONDIST_VARIANTS
        }
        ratios["memory"] = [row["memory"] for row in group_rows if row["memory"] is not None]
        complete = {kind: values for kind, values in ratios.items() if values and len(values) == len(names)}
        if complete:
            means_by_group[group] = {kind: geometric_mean(values) for kind, values in complete.items()}
    return means_by_group


class TorchVariantBenchmark:
    """A network in PyTorch, trained in new processes on one batch of an experiment.

    Parameters
    ----------
    experiment : FitExperiment
        Experiment whose model is not built.
    threads : int
    settings : dict
        Additional environment variables of each process.
    """

    def __init__(self, experiment: FitExperiment, threads: int, settings: Mapping[str, str]) -> None:
        self.threads, self.settings = threads, settings
        grid, dataset = experiment.open_grid(SingleTransport()), experiment.dataset
        self.model = require_layer_model(experiment.model, "networks", "choose other networks")
        plan = self.model.plan(dataset.sample_shape, grid.shape, experiment.batch_size)
        self.batch = load_own_batch(experiment, grid, plan)
        self.model.build(dataset.sample_shape, experiment.batch_size, grid, plan)
        self.model.restrict_cost_to_local_cells(dataset.fields)
        self.state, self.trained = self.model.state(), list(self.model.gradients())

    def measure(self, variant: str, steps: int) -> Results:
        """Return the median seconds of at least `steps` steps in a new process, and the process's peak memory."""
        settings = {**self.settings, **(WARM_ALLOCATOR_ENV if variant != "eager" else {})}
        baseline = TorchBaseline(self.model, self.state, self.trained, *self.batch, self.threads, settings)
        try:
            why = baseline.compile() if variant == "compile" else ""
            if why:
                raise ConfigError(why)
            (*_, last_seconds), *_ = baseline.time_steps(WARM_UP_STEPS)
            step_seconds, _, peak = baseline.time_steps(max(steps, round(ROUND_SECONDS / last_seconds)))
        finally:
            baseline.close()
        return {"seconds": median(step_seconds), "peak_bytes": peak}
