"""`neondist bench suite`: training steps of several networks, of neondist and of PyTorch at its best, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from ..comm import SingleTransport
from ..errors import ConfigError, LaunchError
from ..models import made_of_layers
from ..train import FitExperiment
from .step import ROUND, WARM_UP, labels_for
from .torch_baseline import TorchBaseline

WARM = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""what lets the C library keep freed memory, instead of asking the system for new pages in every step"""
OURS = {"ranks": "a thread's share of the cores for each rank", "one": "one process with all cores"}
THEIRS = {"eager": "eager, channels-last", "warm": "eager with a warm allocator", "compile": "torch.compile, warm"}
Made = dict[str, Any]


@dataclass
class Turns:
    """Measurements of one side for a network.

    Attributes
    ----------
    seconds : of a step, in each round
    peaks : bytes of the process that held most, in each round
    why : the reason, where it cannot be measured
    more : what else the first round told
    """

    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    why: str = ""
    more: Made = field(default_factory=dict)


def bench_suite(
    networks: Sequence[str],
    sides: Sequence[str],
    measure: Callable[[str, str, bool], Made],
    rounds: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Made]:
    """Yield a row for each network, as soon as it is measured.

    Parameters
    ----------
    networks : names
    sides : of OURS and THEIRS, in the order of a round
    measure : function of a network, a side, and whether it is the first round
        Returns 'seconds' of a step and 'peak_bytes', in a new process, and 'details', if there are any, of that side. A
        side that raises ConfigError or LaunchError is left out from then on, and its row says why.
    rounds : int
        In each, every side has its turn, so that a machine that becomes slower slows all of them down.
    tell : function of a text
        Called before each turn.
    """
    for network in networks:
        turns = {side: Turns() for side in sides}
        for count in range(rounds):
            for side, mine in turns.items():
                if mine.why:
                    continue
                tell(f"{network}: {side}, round {count + 1} of {rounds}")
                try:
                    made = measure(network, side, count == 0)
                except (ConfigError, LaunchError) as error:
                    mine.why = str(error)
                    continue
                mine.seconds.append(made.pop("seconds"))
                mine.peaks.append(made.pop("peak_bytes"))
                mine.more = mine.more or made
        yield row_of(network, turns)


def row_of(network: str, turns: Mapping[str, Turns]) -> Made:
    """Return medians, and ratios of turns of the same round; 'memory' is that of one process, or else of a rank."""
    timed = {side: one for side, one in turns.items() if one.seconds and not one.why}
    sides: Made = {
        side: {"seconds": median(one.seconds), "all_seconds": one.seconds, "peak_bytes": max(one.peaks)}
        | one.more.pop("details", {})
        for side, one in timed.items()
    }
    theirs = {side: sides[side]["seconds"] for side in THEIRS if side in sides}
    best = min(theirs, key=theirs.__getitem__, default=None)
    ratios = {}
    for side in OURS:
        if side in timed and best is not None:
            every = [a / b for a, b in zip(timed[side].seconds, timed[best].seconds, strict=True)]
            ratios[side] = {"ratio": median(every), "all": every}
    memory, mine = None, sides.get("one", sides.get("ranks"))
    if mine and "eager" in sides:
        memory = mine["peak_bytes"] / sides["eager"]["peak_bytes"]
    told = next((timed[side].more for side in OURS if side in timed and timed[side].more), {})
    why = {side: one.why for side, one in turns.items() if one.why}
    return {"network": network, "sides": sides, "best": best, "ratios": ratios, "memory": memory, "why": why} | told


def means(rows: Sequence[Made], groups: Mapping[str, Sequence[str]]) -> dict[str, Made]:
    """Return the geometric means of the ratios over each group of networks, all of which must have been measured."""
    found = {}
    for group, names in groups.items():
        inside = [row for row in rows if row["network"] in names]
        made = {side: [row["ratios"][side]["ratio"] for row in inside if side in row["ratios"]] for side in OURS}
        made["memory"] = [row["memory"] for row in inside if row["memory"] is not None]
        whole = {kind: geometric_mean(each) for kind, each in made.items() if each and len(each) == len(names)}
        if whole:
            found[group] = whole
    return found


class TorchSide:
    """A network in PyTorch, for new processes that train on one batch of an experiment.

    Parameters
    ----------
    experiment : FitExperiment
        Not built.
    threads : int
    settings : dict
        More variables of the environment of each process.
    """

    def __init__(self, experiment: FitExperiment, threads: int, settings: Mapping[str, str]) -> None:
        self.threads, self.settings = threads, settings
        grid, dataset = experiment.open_grid(SingleTransport()), experiment.dataset
        self.model = made_of_layers(experiment.model, "networks", "name others")
        plan = self.model.plan(dataset.sample_shape, grid.shape, experiment.batch_size)
        dataset.open(grid.reading(plan.wide_tiles))
        batch = np.arange(experiment.batch_size) % len(dataset.train)
        self.model.build(dataset.sample_shape, len(batch), grid, plan)
        self.model.place(dataset.fields)
        targets = labels_for(plan, dataset.train.targets(batch))
        self.batch = dataset.train.images(batch, self.model.dtype), targets
        self.state, self.trained = self.model.state(), list(self.model.gradients())

    def measure(self, side: str, steps: int) -> Made:
        """Return the seconds of a step of a new process, the median of so many and more, and its peak of memory."""
        settings = {**self.settings, **(WARM if side != "eager" else {})}
        other = TorchBaseline(self.model, self.state, self.trained, *self.batch, self.threads, settings)
        try:
            why = other.compile() if side == "compile" else ""
            if why:
                raise ConfigError(why)
            (*_, last), *_ = other.time(WARM_UP)
            taken, _, peak = other.time(max(steps, round(ROUND / last)))
        finally:
            other.close()
        return {"seconds": median(taken), "peak_bytes": peak}
