"""Random PyTorch modules on tiles: python tools/random_modules.py [--cases N] [--seed S] [--first K] [--jobs J].

Each case is a random module, whose outputs, gradients and buffers on two grids of virtual ranks must equal those of one
process in float64 (see tests/helpers/random_modules.py). Failures are printed as minimised programs; the exit code is 1
if there are any.
"""

import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the modules are tiny
os.environ.setdefault("TORCH_LOGS", "-all")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from random_modules import draw_module, run_on_grids, shrink
from trials import create_parser, format_counts, run_cases


def run_case(seed: int, number: int, small: bool) -> list[tuple[str, str]]:
    """Return the outcome of a case on each of its grids, and text to print."""
    drawn, results = draw_module(seed, number), []
    for grid, outcome in run_on_grids(drawn):
        kind, _, text = outcome.partition(": ")
        if kind == "wrong":
            case = shrink(drawn, grid) if small else drawn
            mode = "training" if case.training else "evaluation"
            setup = f"{case.shapes}, in {mode}, {case.options()}"
            text = f"seed {seed}, case {number}, {grid}: {text}\n{setup}\n{case.program()}"
        results.append((kind, text))
    return results


def main() -> int:
    """Run all cases."""
    options = create_parser(__doc__)
    options.add_argument("--large", action="store_true", help="print failures without minimising them")
    arguments = options.parse_args()
    results, refusals = Counter(), Counter()
    for outcomes_of_case in run_cases(run_case, arguments, not arguments.large):
        for kind, text in outcomes_of_case:
            results[kind] += 1
            if kind == "refused":
                refusals[text.partition(": ")[2].partition(";")[0]] += 1
            if kind == "wrong":
                print(text, flush=True)
    print(f"seed {arguments.seed}, {arguments.cases} modules: {format_counts(results)}")
    for text, count in refusals.most_common():
        print(f"{count:5d}  {text}")
    return int(results["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
