"""`make bench`: measure, and write the tables between the markers of docs/performance.md.

python tools/bench_report.py [--page FILE] [--json FILE] [--steps K]
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from neondist.bench.allocations import PURPOSES
from neondist.threads import VARIABLES, cores

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"
LARGE, DIGITS = "yaml/bench_2048.yaml", "yaml/mnist_distarray_convnet.yaml"
HALO = [8, 256, 256, 64]


def measure(*words, threads=None):
    """Return the JSON of one `neondist bench` command."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if threads:
        env |= dict.fromkeys(VARIABLES, str(threads))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "made.json")
        command = [sys.executable, "-m", "neondist", "bench", *map(str, words), "--json", str(file)]
        print("$ neondist", *command[3:-2], flush=True)
        subprocess.run(command, cwd=ROOT, env=env, check=True)
        return json.loads(file.read_text(encoding="utf-8"))


def commands(steps, threads):
    """Return the arguments of `measure` for all measurements by name; both sides of a ratio are in one run."""
    against = ["--against", "torch", "--steps"]
    return {
        "ranks": (["step", LARGE, "-n", 2, *against, steps, "--roofline"], None),
        "serial": (["step", LARGE, *against, steps], threads),
        "digits": (["step", DIGITS, "-n", 2, *against, 10 * steps, "--roofline"], None),
        "halo": (["halo", "-n", 2], None),
        "numpy": (["step", LARGE, "-n", 2, *against, max(2, steps // 2), "--set", "backend=numpy"], None),
        "four": (["step", LARGE, "-n", 4, "--steps", 2], None),
        "alone": (["step", LARGE, "--steps", 2], 1),
    }


def rows(found, threads):
    """Yield what was compared, its ratio, the ratio to reach and the aim."""
    large = "a step on one 2048² image"
    yield f"{large}: 2 ranks × 1 thread ÷ PyTorch autograd, {threads} threads", ratio(found["ranks"]), 0.55, 0.40
    yield (
        f"{large}: 1 process, {threads} threads ÷ PyTorch autograd, {threads} threads",
        ratio(found["serial"]),
        0.8,
        0.6,
    )
    yield (
        f"MNIST, batches of 128: 2 ranks × 1 thread ÷ PyTorch autograd, {threads} threads",
        ratio(found["digits"]),
        1.0,
        0.7,
    )
    halo = next(size for size in found["halo"]["sizes"] if size["shape"] == HALO)
    yield (
        "halo of (8, 256, 256, 64), 2 ranks, cut along H ÷ the same messages in plain mpi4py",
        halo["exchange_over_raw"],
        1.3,
        1.1,
    )
    # each was measured against PyTorch's autograd within a run: that takes out how fast the machine was at the time
    backends = ratio(found["numpy"]) / ratio(found["ranks"])
    yield f"{large}, 2 ranks: backend numpy ÷ backend torch", backends, 3.5, 2.5
    peak = max(found["four"]["peak_bytes"]) / max(found["alone"]["peak_bytes"])
    yield f"{large}: peak of memory of a rank, 4 ranks ÷ 1 rank", peak, 0.30, 0.27


def ratio(made):
    """Return the seconds of a step over those in PyTorch."""
    return made["against"]["ratio"]


def page(found, threads):
    """Return the text between the markers."""
    versions = found["ranks"]["versions"]
    where = f"{processor()}, {threads} cores, Python {platform.python_version()}"
    named = ", ".join(f"{name} {versions[name]}" for name in ("numpy", "mpi4py", "torch") if name in versions)
    lines = [
        f"{date.today().isoformat()}, {where}, {named}.",
        "",
        "| Compared | Ratio | To reach | Aim |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {name} | {value:.2f} | {bar:.2f} | {aim:.2f} |" for name, value, bar, aim in rows(found, threads)]
    lines += ["", *timings(found), "", *roofline("2048²", found["ranks"]), "", *allocated(found["ranks"])]
    lines += ["", *roofline("MNIST", found["digits"])]
    return "\n".join(lines)


def timings(found):
    """Return the seconds behind the ratios."""
    lines = [
        "| Step | neondist | PyTorch | ratios of all turns | of the fastest | memory, neondist | memory, PyTorch |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    names = {
        "ranks": "2048², 2 ranks",
        "serial": "2048², 1 process",
        "digits": "MNIST, 2 ranks",
        "numpy": "2048², 2 ranks, numpy",
    }
    for key, name in names.items():
        made = found[key]
        other, peak = made["against"], max(made["peak_bytes"])
        memory = f"{peak / 1e6:.0f} MB each | {other['peak_bytes'] / 1e6:.0f} MB"
        turns = f"{min(other['ratios']):.2f} to {max(other['ratios']):.2f} | {other['ratio_of_fastest']:.2f}"
        lines.append(f"| {name} | {milliseconds(made)} | {milliseconds(other)} | {turns} | {memory} |")
    return lines


def milliseconds(made):
    """Return the time of a step."""
    return f"{1000 * made['seconds_per_step']:.4g} ms"


def roofline(name, made):
    """Return what limits each layer."""
    machine = made["machine"]
    lines = [
        f"Where the time of the {name} step on 2 ranks goes, and what limits it: matrix products of both ranks reach"
        f" {machine['flops_per_second'] / 1e9:.0f} Gflop/s, copies {machine['bytes_per_second'] / 1e9:.1f} GB/s;"
        " the last column is the share of that limit which the layer's computing reaches (more than 100% where arrays"
        " stay in caches).",
        "",
        "| Layer | forward | backward | exchange | wait | limit | reached |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in made["layers"]:
        times = " | ".join(f"{1000 * row[kind]:.3g} ms" for kind in ("forward", "backward", "exchange", "wait"))
        share = row.get("share_of_limit")
        lines.append(
            f"| {row['name']} | {times} | {row.get('limit', '')} | {'' if share is None else f'{share:.0%}'} |"
        )
    return lines


def allocated(made):
    """Return what PyTorch's kernels allocate."""
    lines = [
        "What is left of new memory in such a step: NumPy's side of it allocates less than 1 MiB (a test counts with"
        " tracemalloc), and PyTorch's kernels, which write into new memory, a strip at a time, these blocks of 64 KiB"
        " and more on one rank:",
        "",
        "| Operator | for | blocks | largest | all |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in made["allocations"]:
        sizes = f"{one['blocks']} | {one['largest'] / 2**20:.2g} MiB | {one['total'] / 2**20:.4g} MiB"
        lines.append(f"| {one['operator']} | {PURPOSES.get(one['operator'], '')} | {sizes} |")
    return [
        *lines,
        "",
        "They are freed within the layer, but for the places of maxima, and used again by the next one.",
    ]


def processor():
    """Return the processor's name."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def write(path, text):
    """Put a text between the markers of a page."""
    old = path.read_text(encoding="utf-8")
    head, rest = old.split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main(argv=None):
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument(
        "--json", type=Path, help="keep the measurements there; what it holds already is not measured again"
    )
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args(argv)
    threads = cores()
    kept = arguments.json
    found = json.loads(kept.read_text(encoding="utf-8")) if kept and kept.exists() else {}
    for name, (words, limit) in commands(arguments.steps, threads).items():
        if name not in found:
            found[name] = measure(*words, threads=limit)
            if kept:
                kept.write_text(json.dumps(found, indent=2), encoding="utf-8")
    write(arguments.page, page(found, threads))


if __name__ == "__main__":
    main()
