"""`make bench`: run the benchmarks, and write their tables between the markers of docs/measured.md.

python tools/bench_report.py [--page FILE] [options of neondist bench suite, such as --networks main --rounds 5]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from neondist.system.threads import THREAD_COUNT_VARIABLES, count_cores

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- make bench: begin -->", "<!-- make bench: end -->"
HALO_SHAPE = [8, 256, 256, 64]
LARGE_FILE = "yaml/bench_2048.yaml"
BEFORE_UNIT = re.compile(r"(?<=\d) (?=[a-zµA-Z]{1,2}\*? \|)")


def run(*words, threads=None):
    """Run a `neondist bench` command."""
    env = {name: value for name, value in os.environ.items() if name not in THREAD_COUNT_VARIABLES}
    if threads:
        env |= dict.fromkeys(THREAD_COUNT_VARIABLES, str(threads))
    print("$ neondist bench", *words, flush=True)
    subprocess.run([sys.executable, "-m", "neondist", "bench", *map(str, words)], cwd=ROOT, env=env, check=True)


def compare_exchanges(folder):
    """Return comparisons outside the suite: halo exchange against plain messages, and memory on 4 ranks against 1."""
    file = folder / "result.json"

    def measure(*words, threads=None):
        run(*words, "--json", file, threads=threads)
        return json.loads(file.read_text(encoding="utf-8"))

    halo = next(size for size in measure("halo", "-n", 2)["sizes"] if size["shape"] == HALO_SHAPE)
    four_ranks, one_rank = (
        max(measure("step", LARGE_FILE, *words, "--steps", 2, threads=threads)["peak_bytes"])
        for words, threads in ((["-n", 4], None), ([], 1))
    )
    return [
        "### Exchanges and memory",
        "",
        "| Compared | Ratio |",
        "| --- | --- |",
        "| halo exchange of (8, 256, 256, 64) split along H over 2 ranks ÷ the same messages in plain mpi4py"
        f" | {halo['exchange_over_raw']:.2f} |",
        f"| peak memory per rank of a step on one 2048² image, 4 ranks ÷ 1 rank | {four_ranks / one_rank:.2f} |",
    ]


def write(path, text):
    """Write text between the markers of a page."""
    page = path.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    text = BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)  # no line break between a number and its unit
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main(argv=None):
    """Run the benchmarks, and write their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "measured.md")
    arguments, words = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "suite.md")
        run("suite", "-n", count_cores(), "--markdown", page, *words)
        write(arguments.page, page.read_text(encoding="utf-8") + "\n" + "\n".join(compare_exchanges(Path(folder))))


if __name__ == "__main__":
    main()
