"""`neondist bench suite`: built-in networks, or any experiment file, compared with PyTorch's fastest mode."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import ConfigError, LaunchError, MissingPackageError
from ...io.files import has_matplotlib, write_text
from ...launcher.ranks import get_mpi_job
from ...system import threads
from ...terminal.console import counted
from ...terminal.progress_line import ProgressLine
from ...version import find_module_spec
from .. import options
from ..experiment import load_from_arguments
from .scaling import estimate_step_bench_seconds, run_step_bench

NETWORK_NAMES_HELP = "plain, vgg, mnist, resnet, unet, vol, wide, dilated, separable, unet3d, lcn, deep"


def add_parser(benches: Any) -> None:
    """Register the command."""
    help_text = "training steps of several networks, compared with PyTorch's fastest mode"
    cmd = benches.add_parser("suite", help=help_text, allow_abbrev=False)
    cmd.add_argument(
        "--networks", metavar="A,B,FILE.yaml", default="main,others",
        help=f"{NETWORK_NAMES_HELP}, a FILE.yaml, or the groups main (the first six) and others (default: both groups)",
    )  # fmt: skip
    options.add_rank_options(cmd, "number of ranks that share this machine's cores (default: one per core)")
    options.add_round_options(cmd, "all variants are", steps=5)
    cmd.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE", help=options.IMPORT_HELP
    )
    for kind in "json", "markdown", "plot":
        cmd.add_argument(
            f"--{kind}", metavar="FILE", type=options.parse_as_path, help="also write the results to this file"
        )
    cmd.set_defaults(command=measure_suite)


def measure_suite(arguments: argparse.Namespace) -> int:
    """Measure every network; return 1 if a variant of neondist could not be measured."""
    from ...bench.least_time import CoreSpeed
    from ...bench.networks import NETWORK_GROUPS
    from ...bench.step import ROUND_SECONDS
    from ...bench.suite import NEONDIST_VARIANTS, TORCH_VARIANTS, bench_suite
    from ...bench.suite_report import draw_suite, suite_markdown, suite_table
    from ...terminal.rich_console import Console

    cores = threads.count_cores()
    ranks = cores if arguments.ranks is None else arguments.ranks
    if arguments.plot and not has_matplotlib():
        raise MissingPackageError("--plot needs matplotlib: pip install 'neondist[plot]'")
    check_timing_conditions(arguments, "suite", ranks, cores, [arguments.json, arguments.markdown, arguments.plot])
    notes: list[str] = []
    variants = [variant for variant in NEONDIST_VARIANTS if variant != "ranks" or ranks > 1]
    variants += measurable_torch_variants(list(TORCH_VARIANTS), notes)
    results: dict[str, Any] = {
        "bench": "suite", "ranks": ranks, "threads": max(1, cores // ranks), "cores": cores, "rounds": arguments.rounds,
        "variants": variants, "environment": describe_environment(), "networks": [], "notes": notes,
        "compared": any(variant in TORCH_VARIANTS for variant in variants),
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="neondist-suite-") as folder,
        ProgressLine(None, sys.stderr, "turn", delay=0) as progress,
    ):
        files, speed = _write_network_files(arguments, Path(folder)), CoreSpeed.measure()
        variant_order = _interleave(variants) * arguments.rounds
        turns = [(network, variant) for network in files for variant in variant_order]
        progress.set_total_parts(len(turns), planned_seconds=[ROUND_SECONDS] * len(turns))
        progress.begin_part("checking the networks")
        least_seconds: dict[tuple[str, int], float] = {}
        for network, file in files.items():
            for count in sorted({1, ranks}):
                network_arguments = _arguments_for(arguments, file)
                _, seconds = estimate_step_bench_seconds(network_arguments, count, arguments.steps, speed, cores)
                least_seconds[network, count] = seconds
        planned_seconds = [least_seconds[network, ranks if variant == "ranks" else 1] for network, variant in turns]
        progress.set_total_parts(len(turns), planned_seconds=planned_seconds)
        measure = _VariantMeasurement(arguments, files, ranks, cores, Path(folder))
        networks, order = list(files), _interleave(variants)
        rows = bench_suite(networks, order, measure, arguments.rounds, progress, measure.progress_file)
        add_measured_rows(results, rows, {**NETWORK_GROUPS, "all": networks}, arguments.json)
    Console(soft_wrap=True).print(suite_table(results))
    if arguments.markdown:
        write_text(arguments.markdown, suite_markdown(results))
    if arguments.plot:
        draw_suite(arguments.plot, results)
    options.print_written([arguments.json, arguments.markdown, arguments.plot])
    return int(any(variant in row["why"] for row in results["networks"] for variant in NEONDIST_VARIANTS))


def add_measured_rows(
    results: dict[str, Any], rows: Iterable[dict[str, Any]], groups: Mapping[str, Sequence[str]], file: Path | None
) -> None:
    """Add rows as they are measured, and update the means of the groups; write the results to `file` after each row."""
    from ...bench.suite import geometric_means

    for row in rows:
        results["networks"].append(row)
        results["means"] = geometric_means(results["networks"], groups)
        if file is not None:  # an interrupted run keeps its results
            write_text(file, json.dumps(results, indent=2, default=str) + "\n")


def check_timing_conditions(
    arguments: argparse.Namespace, bench: str, ranks: int, cores: int, files: Sequence[Path | None]
) -> None:
    """Raise LaunchError if timings on these ranks are meaningless, ConfigError if a file cannot be written."""
    if get_mpi_job(arguments) is not None:
        raise LaunchError(f"bench {bench} starts MPI jobs itself; run it outside an MPI job, with -n RANKS")
    if ranks > cores and not arguments.force:
        raise LaunchError(
            f"-n {ranks}: this machine has {counted(cores, 'core')}, and timings of ranks that share a core are"
            f" meaningless; give at most {cores}, or --force"
        )
    for file in filter(None, files):  # before hours of measurements
        if file.is_dir():
            raise ConfigError(f"{file}: is a folder; give a file")
        if not file.parent.is_dir():
            raise ConfigError(f"{file}: its folder does not exist; create it, or choose another")


def measurable_torch_variants(variants: list[str], notes: list[str]) -> list[str]:
    """Return the PyTorch variants that can be measured; add the reasons for omitting variants to `notes`."""
    if find_module_spec("torch") is None:
        notes.append("PyTorch is not installed, so only neondist was timed; run pip install 'neondist[torch]'")
        return []
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        notes.append("torch.compile was not timed: it needs a C++ compiler; install g++ or clang++")
        variants.remove("compile")
    return variants


def _interleave(variants: list[str]) -> list[str]:
    own, other = [s for s in variants if s in ("ranks", "one")], [s for s in variants if s not in ("ranks", "one")]
    interleaved = [variant for pair in zip(own, other, strict=False) for variant in pair]
    return interleaved + [variant for variant in (*own, *other) if variant not in interleaved]


def _write_network_files(arguments: argparse.Namespace, folder: Path) -> dict[str, Path]:
    from ...bench.networks import NETWORK_GROUPS, NETWORKS
    from ...config import dump

    words = [word.strip() for word in arguments.networks.split(",") if word.strip()]
    names = [name for word in words for name in NETWORK_GROUPS.get(word, (word,))]
    paths: dict[str, Path] = {}
    for name in dict.fromkeys(names):
        if name in NETWORKS:
            file = folder / f"{name}.yaml"
            file.write_text(dump(NETWORKS[name].experiment()), encoding="utf-8")
        elif name.endswith((".yaml", ".yml")):
            name, file = Path(name).stem, Path(name).absolute()
        else:
            raise ConfigError(
                f"--networks {name}: unknown; expected {', '.join([*NETWORKS, *NETWORK_GROUPS])} or any FILE.yaml"
            )
        if name in paths:
            raise ConfigError(f"--networks {file}: two networks are named {name}; rename the file")
        paths[name] = file
    if not paths:
        raise ConfigError(f"--networks: no network is given; choose from {', '.join(NETWORKS)}, or FILE.yaml")
    return paths


def _arguments_for(arguments: argparse.Namespace, file: Path) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(arguments), "file": str(file), "settings": []})


class _VariantMeasurement:
    """Measurement of one variant of one network in a new process."""

    def __init__(
        self, arguments: argparse.Namespace, files: dict[str, Path], ranks: int, cores: int, folder: Path
    ) -> None:
        self.arguments, self.files, self.ranks, self.cores, self.folder = arguments, files, ranks, cores, folder
        self.progress_file = folder / "end"
        self.get_torch_benchmark = cache(self._create_torch_benchmark)

    def __call__(self, network: str, variant: str, is_first_round: bool) -> dict[str, Any]:
        """Return 'seconds', 'peak_bytes' and, for neondist, the shapes, 'layers' and, in the first round, 'machine'."""
        steps = self.arguments.steps
        if variant not in ("ranks", "one"):
            return self.get_torch_benchmark(network).measure(variant, steps)
        num_ranks, cores = (self.ranks, None) if variant == "ranks" else (1, self.cores)
        extra_options = ["--roofline"] if is_first_round else []
        file = _arguments_for(self.arguments, self.files[network])
        step = run_step_bench(file, num_ranks, [], steps, cores, extra_options, self.progress_file)
        result = {"seconds": step["seconds_per_step"], "peak_bytes": max(step["process_bytes"])}
        result |= {name: step[name] for name in ("batch_size", "sample_shape", "layers", "machine") if name in step}
        return result

    def _create_torch_benchmark(self, network: str) -> Any:
        from ...bench.suite import TorchVariantBenchmark

        settings = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        experiment = load_from_arguments(_arguments_for(self.arguments, self.files[network]))
        return TorchVariantBenchmark(experiment, self.cores, settings)


def describe_environment() -> dict[str, Any]:
    """Return the environment of the results: versions, machine, processor."""
    from ...comm import ProcessGrid
    from ...io import environment as about

    return about.describe_environment(ProcessGrid.serial()) | {"processor": about.processor_model()}
