"""Random PyTorch modules on tiles: python tools/random_modules.py [--cases N] [--seed S] [--first K] [--jobs J].

Each case is a random module, whose outputs, gradients and buffers on two grids of virtual ranks are those of one
process, in float64 (tests/helpers/random_modules.py says how). Wrong ones are printed as programs, as small as they
could be made; the exit code is 1 if there are any.
"""

import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the modules are tiny
os.environ.setdefault("TORCH_LOGS", "-all")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from random_modules import attempt, draw, shrink
from trials import parser, told, tried


def outcomes(seed: int, number: int, small: bool) -> list[tuple[str, str]]:
    """Return the outcome of a case on each of its grids, and what to print."""
    drawn, found = draw(seed, number), []
    for grid, outcome in attempt(drawn):
        kind, _, why = outcome.partition(": ")
        if kind == "wrong":
            case = shrink(drawn, grid) if small else drawn
            mode = "training" if case.training else "evaluation"
            how = f"{case.shapes}, in {mode}, {case.options()}"
            why = f"seed {seed}, case {number}, {grid}: {why}\n{how}\n{case.program()}"
        found.append((kind, why))
    return found


def main() -> int:
    """Try them all."""
    options = parser(__doc__)
    options.add_argument("--large", action="store_true", help="print wrong ones as they are")
    given = options.parse_args()
    results, refusals = Counter(), Counter()
    for found in tried(outcomes, given, not given.large):
        for kind, why in found:
            results[kind] += 1
            if kind == "refused":
                refusals[why.partition(": ")[2].partition(";")[0]] += 1
            if kind == "wrong":
                print(why, flush=True)
    print(f"seed {given.seed}, {given.cases} modules: {told(results)}")
    for why, count in refusals.most_common():
        print(f"{count:5d}  {why}")
    return int(results["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
