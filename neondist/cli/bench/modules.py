"""`neondist bench torch`: training steps of distributed PyTorch modules, compared with PyTorch in one process."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...comm import Transport
from ...errors import ConfigError, LaunchError, UserError
from ...io.files import write_text
from ...launcher.ranks import run_on_ranks
from ...system import threads
from ...terminal.progress_line import ProgressFile, ProgressLine
from ...version import find_module_spec
from .. import options
from ..experiment import load_factory
from . import suite
from .scaling import run_bench_for_json

if TYPE_CHECKING:
    from ...bench.least_time import CoreSpeed

BASELINES = ("eager", "compile")
MODEL_NAMES_HELP = (
    "efficientnet_b0, convnext_tiny, fcn_resnet50, unetplusplus, segresnet, r3d_18, vit_b_16, vit_small, swin_t,"
    " gcvit_xxtiny, fno, tfno"
)


def add_parser(benches: Any) -> None:
    """Register the command."""
    help_text = "training steps of distributed PyTorch modules, compared with PyTorch in one process"
    cmd = benches.add_parser("torch", help=help_text, allow_abbrev=False)
    cmd.add_argument(
        "--models", type=_parse_model_names, metavar="A,FILE.py:NAME,MODULE:NAME",
        help=f"functions or classes that return a module, such as torchvision.models:resnet18, or {MODEL_NAMES_HELP}"
             " (default: all of these that are installed)",
    )  # fmt: skip
    cmd.add_argument(
        "--against", type=_parse_variants, default=list(BASELINES), metavar="eager,compile",
        help="modes of PyTorch to compare with, in one process on all cores, or none (default: both)",
    )  # fmt: skip
    cmd.add_argument(
        "-n", "--ranks", dest="ranks", type=options.rank_count, metavar="RANKS",
        help="number of ranks that share this machine's cores (default: one per core)",
    )  # fmt: skip
    cmd.add_argument("--force", action="store_true", help="allow more ranks than this machine has cores")
    cmd.add_argument(
        "--input", type=options.positive_ints, metavar="N,C,H,W",
        help="input shape (default: from the first convolution, 1,C,224,224 or 1,C,64,64,64)",
    )  # fmt: skip
    cmd.add_argument(
        "--compile",
        nargs="?",
        const=True,
        default=False,
        choices=["auto"],
        help="compile the computation on the ranks: ndt.distribute(..., compile=True), or compile='auto'",
    )
    options.add_round_options(cmd, "all variants are", steps=3)
    for kind in "json", "markdown":
        cmd.add_argument(
            f"--{kind}", metavar="FILE", type=options.parse_as_path, help="also write the results to this file"
        )
    cmd.add_argument(
        "--variant",
        choices=["ranks", *BASELINES],
        help="time one variant of a model for one round, and write the result to --json",
    )
    cmd.add_argument("--profile", action="store_true", help="with --variant: also profile a step")
    cmd.add_argument(
        "--progress", metavar="FILE", type=options.parse_path,
        help="with --variant: write the estimated end time to this file, in seconds since 1970",
    )  # fmt: skip
    cmd.set_defaults(command=measure_modules)


def measure_modules(arguments: argparse.Namespace) -> int:
    """Measure every model; return 2 if one of them cannot be distributed."""
    if find_module_spec("torch") is None:
        raise ConfigError("bench torch: PyTorch is not installed; install it with pip install 'neondist[torch]'")
    return _bench_models(arguments) if arguments.variant is None else _measure_variant(arguments)


def _bench_models(arguments: argparse.Namespace) -> int:
    from ...bench.least_time import CoreSpeed
    from ...bench.module_report import module_markdown, module_table
    from ...bench.public_models import MODELS
    from ...bench.step import ROUND_SECONDS
    from ...bench.suite import bench_suite
    from ...terminal.rich_console import Console

    cores = threads.count_cores()
    ranks = arguments.ranks = cores if arguments.ranks is None else arguments.ranks
    suite.check_timing_conditions(arguments, "torch", ranks, cores, [arguments.json, arguments.markdown])
    notes: list[str] = []
    variants = ["ranks", *suite.measurable_torch_variants(list(arguments.against), notes)]
    names = arguments.models or _installed_models(list(MODELS), notes)
    results: dict[str, Any] = {
        "bench": "torch", "ranks": ranks, "threads": max(1, cores // ranks), "cores": cores,
        "rounds": arguments.rounds, "variants": variants, "compile": arguments.compile,
        "environment": suite.describe_environment(), "networks": [], "notes": notes, "means": {},
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="neondist-torch-") as folder,
        ProgressLine(None, sys.stderr, "turn", delay=0) as progress,
    ):
        num_turns = arguments.rounds * len(variants)
        progress.set_total_parts(len(names) * num_turns, planned_seconds=[ROUND_SECONDS] * (len(names) * num_turns))
        speed, loading, planned_seconds = CoreSpeed.measure(), 0.0, list[float]()
        for name in names:
            progress.begin_part(f"checking {name}")
            start_time = time.monotonic()
            min_step_seconds = _step_seconds_lower_bound(name, arguments.input, speed) / cores
            loading = max(loading, time.monotonic() - start_time)  # every turn imports PyTorch and the model anew
            planned_seconds += [loading + max(ROUND_SECONDS, arguments.steps * min_step_seconds)] * num_turns
        progress.set_total_parts(len(planned_seconds), planned_seconds=planned_seconds)
        measure = _VariantMeasurement(arguments, cores, Path(folder))
        rows = bench_suite(names, variants, measure, arguments.rounds, progress, measure.progress_file)
        suite.add_measured_rows(results, rows, {**_models_by_family(names), "all": names}, arguments.json)
    failed = [row["why"]["ranks"] for row in results["networks"] if "ranks" in row["why"]]
    if len(failed) == len(names):
        raise ConfigError("\n".join(dict.fromkeys(failed)))
    Console(soft_wrap=True).print(module_table(results))
    if arguments.markdown:
        write_text(arguments.markdown, module_markdown(results))
    options.print_written([arguments.json, arguments.markdown])
    return 2 if failed else 0


def _measure_variant(arguments: argparse.Namespace) -> int:
    """Measure one variant of one model, in this process or on several ranks."""
    if arguments.models is None or len(arguments.models) != 1:
        raise ConfigError("--variant measures one model; specify it with --models")
    if arguments.variant != "ranks":
        if arguments.ranks not in (None, 1):
            raise ConfigError(f"--variant {arguments.variant} runs in one process; leave out -n")
        arguments.ranks = None
    (name,) = arguments.models

    def prepare(world: Transport, ranks: int) -> Any:
        return get_factory_and_shape(name) if world.size == ranks else None  # only after mpirun has started the ranks

    def work(world: Transport, model: tuple[Callable[[], Any], Any]) -> int:
        from ...bench.module_step import measure_module

        factory, shape = model
        progress = None if arguments.progress is None or world.rank else ProgressFile(arguments.progress)
        settings = arguments.steps, arguments.compile, arguments.profile, progress
        result = measure_module(arguments.variant, factory, arguments.input or shape, world, *settings)
        if world.rank == 0 and arguments.json is not None:
            write_text(arguments.json, json.dumps(result) + "\n")
            options.print_written([arguments.json])
        return 0

    return run_on_ranks(arguments, prepare, work)


def get_factory_and_shape(name: str) -> tuple[Callable[[], Any], tuple[int, ...] | None]:
    """Return the factory of a model and its input shape, if known; ConfigError if there is no such model."""
    from ...bench.public_models import MODELS

    model = MODELS.get(name)
    if model is None:
        if ":" not in name:
            raise ConfigError(f"--models {name}: unknown; expected {', '.join(MODELS)}, FILE.py:NAME or MODULE:NAME")
        return load_factory(name, "--models "), None
    return partial(load_factory(model.factory, "--models "), **model.arguments), model.shape


def _step_seconds_lower_bound(name: str, shape: tuple[int, ...] | None, speed: CoreSpeed) -> float:
    """Return the minimum seconds of a training step of a model on one core; 0 if its operations cannot be counted."""
    from ...bench.module_step import forward_flops
    from ...bench.public_models import MODELS

    try:
        factory, default_shape = get_factory_and_shape(name)
    except UserError:
        if name in MODELS:
            return 0.0  # the report states the reason
        raise
    # a backward pass costs as much as two forward passes
    return speed.seconds_lower_bound(3 * forward_flops(factory, shape or default_shape))


class _VariantMeasurement:
    """Measurement of one variant of one model in a new process."""

    def __init__(self, arguments: argparse.Namespace, cores: int, folder: Path) -> None:
        self.arguments, self.cores, self.folder = arguments, cores, folder
        self.progress_file = folder / "end"
        self._errors: dict[str, UserError] = {}

    def __call__(self, model: str, variant: str, is_first_round: bool) -> dict[str, Any]:
        """Return the result of `measure_module`; a model that cannot be distributed is not measured at all."""
        if model in self._errors:
            raise self._errors[model]
        try:
            profile_options = ["--profile"] if is_first_round and variant != "compile" else []
            return self._measure_in_subprocess(model, variant, profile_options)
        except UserError as error:
            if variant == "ranks":
                self._errors[model] = error
            raise

    def _measure_in_subprocess(self, model: str, variant: str, extra_options: list[str]) -> dict[str, Any]:
        from ...bench.suite import WARM_ALLOCATOR_ENV

        arguments = self.arguments
        words = ["--models", model, "--variant", variant, "--steps", str(arguments.steps), *extra_options]
        words += ["--progress", str(self.progress_file)]
        words += ["--input", ",".join(map(str, arguments.input))] if arguments.input else []
        thread_count = self.cores
        if variant == "ranks":
            words += ["-n", str(arguments.ranks), *(["--force"] if arguments.force else [])]
            words += ["--compile"] if arguments.compile else []
            words += ["auto"] if arguments.compile == "auto" else []
            thread_count = max(1, self.cores // arguments.ranks)
        env = os.environ | WARM_ALLOCATOR_ENV | dict.fromkeys(threads.THREAD_COUNT_VARIABLES, str(thread_count))
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        return run_bench_for_json(["torch", *words], env, _measurement_error)


def _measurement_error(code: int, stderr: str) -> UserError:
    if code == 2:
        return ConfigError(stderr.rpartition("error: ")[2].strip() or stderr.strip())
    sys.stderr.write(stderr)
    return LaunchError(f"the benchmark process ended with exit code {code}; see its output above")


def _installed_models(names: list[str], notes: list[str]) -> list[str]:
    """Return the public models whose packages are installed; add the missing packages to `notes`."""
    from ...bench.public_models import MODELS

    packages = {name: MODELS[name].factory.partition(":")[0].partition(".")[0] for name in names}
    missing = {name: package for name, package in packages.items() if find_module_spec(package) is None}
    for package in dict.fromkeys(missing.values()):
        notes.append(f"{package} is not installed; omitted: {', '.join(n for n in missing if missing[n] == package)}")
    available = [name for name in names if name not in missing]
    if not available:
        raise ConfigError(f"--models: none of {', '.join(names)} is installed; give FILE.py:NAME")
    return available


def _models_by_family(names: list[str]) -> dict[str, list[str]]:
    from ...bench.public_models import MODELS

    families: dict[str, list[str]] = {}
    for name in names:
        if name in MODELS:
            families.setdefault(MODELS[name].family, []).append(name)
    return families


def _parse_model_names(text: str) -> list[str]:
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"'{text}' does not name a model; expected names such as FILE.py:NAME")
    return names


def _parse_variants(text: str) -> list[str]:
    variants = [] if text == "none" else list(dict.fromkeys(text.split(",")))
    for word in variants:
        if word not in BASELINES:
            raise argparse.ArgumentTypeError(f"'{word}' is unknown; choose from {', '.join(BASELINES)}, or none")
    return variants
