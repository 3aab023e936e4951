"""Random networks compared with PyTorch: python tools/random_graphs.py [--cases N] [--seed S] [--first K] [--jobs J].

Each case is a random network, trained serially and on two grids of virtual ranks (see tests/helpers/graphs).
Failures are printed as minimised programs; the exit code is 1 if there are any.
"""

import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the networks are tiny
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from graphs.case import Case, count_ranks, list_leaves
from graphs.check import check_case
from graphs.draw import draw_case
from graphs.shrink import shrink
from trials import create_parser, format_counts, run_cases


def attempt(seed: int, number: int) -> tuple[str, Case, str]:
    """Return the outcome of a case, the case, and text to print."""
    case = draw_case(seed, number)
    try:
        return check_case(case), case, ""
    except Exception:
        small = shrink(case, check_case)
    try:
        check_case(small)
    except Exception as error:
        return "wrong", case, f"seed {seed}, case {number}: {type(error).__name__}: {error}\n\n{small.program()}"
    return "wrong", case, f"seed {seed}, case {number}: not reproducible\n\n{small.program()}"


def main() -> int:
    """Run all cases."""
    arguments = create_parser(__doc__).parse_args()
    results, drawn = Counter(), {"layers": Counter(), "schemes": Counter(), "ranks": Counter()}
    for result, case, text in run_cases(attempt, arguments):
        results[result] += 1
        drawn["layers"].update(kind for kind, _ in list_leaves(case.network))
        drawn["schemes"].update(
            {case.scheme, *(layer["scheme"] for _, layer in list_leaves(case.network) if "scheme" in layer)}
        )
        drawn["ranks"].update([count_ranks(case.grid), count_ranks(case.second_grid)])
        if text:
            print(text, flush=True)
    print(f"seed {arguments.seed}, {arguments.cases} cases: {format_counts(results)}")
    for name, counts in drawn.items():
        print(f"{name}: {format_counts(counts)}")
    return int(results["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
