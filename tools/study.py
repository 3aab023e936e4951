"""`make study`: study of border schemes, with tables and pictures in docs/schemes.md.

python tools/study.py [--cifar10 FILE] [--seeds S] [--folder DIR] [--page FILE] [--only-write]

Takes hours on one core; repeating the command resumes an interrupted study.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from neondist.bench.schemes import (
    count_tiles,
    plot_error_over_bytes,
    plot_error_over_tiles,
    read_results,
    summarise_by_scheme,
)
from neondist.bench.tables import markdown_table
from neondist.config import load_experiment
from neondist.geometry import grid_shape
from neondist.plan.report import format_seconds

ROOT = Path(__file__).parents[1]
TOWER_SCHEMES = "tower,tower(fill=reflect)"
OTHER_SCHEMES = "halo_oneway,stale,every(j=4),quantised(bits=8)"
TIMED_SCHEMES = ["halo", *TOWER_SCHEMES.split(","), *OTHER_SCHEMES.split(","), "overlap_tile"]
DEEP_SCHEMES = ["halo", "deep_halo(layers=2)", "deep_halo(layers=4)", "deep_halo(layers=8)"]
DEEP_FILE = "yaml/study_deep.yaml"
MACHINE_FILE = "yaml/machines/gpu_cluster.yaml"


@dataclass(frozen=True)
class DataSet:
    """Data set: its file, the largest number of tiles, and arguments of --set."""

    name: str
    max_tiles: int
    settings: tuple[str, ...] = ()

    @property
    def file(self):
        """Path of the experiment."""
        return f"yaml/study_{self.name}.yaml"


def neondist(*words):
    """Run a command of neondist."""
    print("$ neondist", *words, flush=True)
    subprocess.run([sys.executable, "-m", "neondist", *map(str, words)], cwd=ROOT, check=True)


def measure(file, *words):
    """Return the JSON in `file`; if it does not exist, first run the neondist command that writes it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        neondist(*words)
    return json.loads(file.read_text(encoding="utf-8"))


def train(part, folder, seeds):
    """Train the missing runs, seed after seed, so that partial results are balanced."""
    cache = f"dataset.serialized_path={folder}/cache/{part.name}_{{rank}}_of_{{size}}.h5"
    output = ["--output", folder / part.name, *(word for text in (cache, *part.settings) for word in ("--set", text))]
    for seed in range(1, seeds + 1):
        for tiles, schemes in (
            (1, "halo"),
            (4, TOWER_SCHEMES),
            (16, f"{TOWER_SCHEMES},{OTHER_SCHEMES}"),
            (part.max_tiles, TOWER_SCHEMES),
        ):
            neondist("bench", "schemes", part.file, *output, "--virtual", tiles, "--seeds", seed, "--schemes", schemes)
    seams = ["--virtual", 4, "--schemes", "tower,quantised(bits=8)", "--output", folder / f"{part.name}-seams"]
    neondist("bench", "seams", part.file, *seams, *(word for text in part.settings for word in ("--set", text)))


def measure_times(file, schemes, folder, *settings):
    """Return the seconds of a step on two ranks by scheme."""
    seconds = {}
    for scheme in schemes:
        result = folder / f"{Path(file).stem}-{scheme}.json"
        words = ["-n", 2, "--steps", 20, "--set", f"model.scheme={scheme}", *settings, "--json", result]
        seconds[scheme] = measure(result, "bench", "step", file, *words)["seconds_per_step"]
    return seconds


def deep_rows(folder):
    """Yield rows that compare halo and deep_halo: predicted for three grids of GPUs, measured on two ranks."""
    measured = measure_times(DEEP_FILE, DEEP_SCHEMES, folder)
    for side in (4, 8, 16):
        for scheme in DEEP_SCHEMES:
            result = folder / f"deep-{side**2}-{scheme}"
            words = ["--machine", MACHINE_FILE, "--ranks", side**2, "--measure", "none", "--output", result]
            words += ["--set", f"model.scheme={scheme}", f"grid.rows={side}", f"grid.cols={side}"]
            row = measure(result / "model.jsonl", "bench", "model", "predict", DEEP_FILE, *words)
            kinds = ("compute_seconds", "exchange_seconds", "sum_seconds", "seconds_per_step")
            cells = [
                str(row["messages"]),
                f"{row['bytes_sent'] / 1e3:.1f}",
                *(format_seconds(row[kind]) for kind in kinds),
            ]
            yield [str(side**2), f"`{scheme}`", *cells, format_seconds(measured[scheme]) if side == 4 else ""]


def add_halo(part, rows):
    """Return the results of `halo` for all numbers of tiles: trained on one tile, with bytes from the plan."""
    exact = [row for row in rows if row["scheme"] == "halo" and count_tiles(row) == 1]
    for tiles in dict.fromkeys(count_tiles(row) for row in rows if count_tiles(row) > 1):
        experiment, grid = load_experiment(ROOT / part.file), grid_shape(tiles)
        plan = experiment.model.plan(experiment.dataset.sample_shape, grid, experiment.batch_size)
        sent = sum(cost.total_sent_bytes for cost in plan.costs())
        rows += [row | {"grid": [1, grid.rows, grid.cols], "bytes_per_step": sent} for row in exact]
    return rows


def accuracy_rows(rows):
    """Yield the cells of the table of errors; differences are between runs of the same seed."""
    halo = {row["seed"]: row["test_error"] for row in rows if row["scheme"] == "halo"}
    for group in sorted(summarise_by_scheme(rows), key=lambda row: row["tiles"]):
        results = [r for r in rows if (count_tiles(r), r["scheme"]) == (group["tiles"], group["scheme"])]
        increases = [100 * (row["test_error"] - halo[row["seed"]]) for row in results if row["seed"] in halo]
        deviation = stdev(increases) if len(increases) > 1 else float("inf")
        significant = "yes" if abs(mean(increases)) > 2 * deviation else "no"
        yield (
            str(group["tiles"]), f"`{group['scheme']}`", f"{100 * group['error']:.2f} ± {100 * group['deviation']:.2f}",
            f"{group['loss']:.3f}", f"{group['bytes'] / 1e3:.0f}", str(group["runs"]),
            *((f"{mean(increases):+.2f} ± {deviation:.2f}", significant) if group["scheme"] != "halo" else ("", "")),
        )  # fmt: skip


ACCURACY_HEADS = [
    "tiles", "scheme", "test error, %", "loss", "kB per step", "seeds", "increase over `halo`, points", "significant",
]  # fmt: skip


def write(path, name, text):
    """Write text between two markers of a page."""
    begin, end = f"<!-- make study: {name} -->", f"<!-- {name}: end -->"
    head, rest = path.read_text(encoding="utf-8").split(begin)
    path.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main():
    """Train, measure, and write the tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar10", type=Path, help="official binary batches (default: train only on the digits)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "study", help="results (default runs/study)")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "schemes.md")
    parser.add_argument("--only-write", action="store_true", help="train nothing; write existing results")
    arguments = parser.parse_args()
    folder, pictures = arguments.folder.resolve(), arguments.page.parent / "pictures"
    parts = [DataSet("digits", 49)]
    if arguments.cifar10:
        parts.append(DataSet("cifar10", 64, (f"dataset.path={arguments.cifar10.resolve()}",)))
    for part in parts:
        if not arguments.only_write:
            train(part, folder, arguments.seeds)
        results = {row["key"]: row for row in read_results(folder / part.name / "results.jsonl")}
        rows = add_halo(part, list(results.values()))
        write(arguments.page, part.name, markdown_table(ACCURACY_HEADS, accuracy_rows(rows)))
        results = summarise_by_scheme([row for row in rows if row["scheme"] == "halo" or count_tiles(row) > 1])
        plot_error_over_bytes([row for row in results if row["tiles"] == 16], pictures / f"study_{part.name}_front.png")
        towers = [row for row in results if row["scheme"] in ("halo", *TOWER_SCHEMES.split(","))]
        plot_error_over_tiles(towers, pictures / f"study_{part.name}_tiles.png")
        shutil.copy(folder / f"{part.name}-seams" / "seams.png", pictures / f"study_{part.name}_seams.png")
    by_part = [measure_times(part.file, TIMED_SCHEMES, folder / "times", *part.settings) for part in parts]
    rows = ([f"`{scheme}`", *(format_seconds(seconds[scheme]) for seconds in by_part)] for scheme in TIMED_SCHEMES)
    write(arguments.page, "times", markdown_table(["scheme", *(part.name for part in parts)], rows))
    heads = ["tiles", "scheme", "messages", "kB sent", "compute", "exchange", "sums", "step"]
    heads.append("measured step (2 local ranks)")
    write(arguments.page, "deep", markdown_table(heads, deep_rows(folder / "times")))


if __name__ == "__main__":
    main()
